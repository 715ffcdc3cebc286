"""``Reason``: a cause at one place, as messages tell of it."""

from __future__ import annotations

import linecache
import warnings
from dataclasses import dataclass, replace
from typing import TypeVar

from cgraph._source import levels_to_user
from cgraph._text import short_place
from cgraph.causes import Cause
from cgraph.errors import CaptureError, CgraphError, CgraphWarning, EagerWarning

__all__ = ["Reason", "refused"]

# Of a line of code in a message.
_MOST_LETTERS = 60
_Error = TypeVar("_Error", bound=CgraphError)


@dataclass(frozen=True)
class Reason:
    """Why calls run without a graph, why a capture failed, or what a warning is about.

    Attributes:
        cause: The cause.
        text: What happened, with names and values.
        line: The user's line, as ``file:line``; None if it is not known.
        special_fix: A fix that says more than that of the cause.
    """

    cause: Cause
    text: str
    line: str | None = None
    special_fix: str | None = None

    @property
    def where(self) -> str | None:
        """The line with the file's name and folder."""
        return short_place(self.line)

    @property
    def fix(self) -> str | None:
        """The fix; None if it passes by itself."""
        return self.special_fix or self.cause.fix or None

    def __str__(self) -> str:
        """Return the place, the reason, the fix and the code, in this order."""
        return self.told()

    def told(self, effect: str = "") -> str:
        """Return the place, the reason, what comes of it, the fix, and the code, in this order."""
        where = "" if self.where is None else f"{self.where}{self._source}: "
        so = f". {effect}" if effect else ""
        fix = "" if self.fix is None else f". Fix: {self.fix}"
        return f"{where}{self.text}{so}{fix} (cgraph why {self.cause.code})"

    @property
    def _source(self) -> str:
        """The text of the line, if its file is there."""
        file, _, number = str(self.line).rpartition(":")
        text = linecache.getline(file, int(number)).strip() if number.isdigit() else ""
        if len(text) > _MOST_LETTERS:
            text = f"{text[:_MOST_LETTERS]} …"
        return f" `{text}`" if text else ""

    def at(self, line: str | None) -> Reason:
        """Return this reason with a line, unless it has one."""
        if self.line is not None or line is None:
            return self
        return replace(self, line=line)

    def error(self, effect: str = "") -> CaptureError:
        """Return the error about a capture that fails for it."""
        return self.given_to(CaptureError(self.told(effect)))

    def given_to(self, error: _Error) -> _Error:
        """Give the cause to an error about it; return the error."""
        error._reason = self
        return error

    def warn(self, effect: str = "", kind: type[CgraphWarning] = EagerWarning) -> None:
        """Warn of it, at the user's line."""
        warning = kind(self.told(effect))
        warning._reason = self
        warnings.warn(warning, stacklevel=levels_to_user())


def refused(cause: Cause, operator: str, line: str | None) -> Reason:
    """Return the reason against a capture with an operator that it refuses."""
    text = f"{operator} cannot be captured, as it {cause.what}"
    return Reason(cause, text, line, f"{cause.fix}; or mark the work with @cgraph.eager_break")
