"""Where breaks do not divide a capture: in calls before it, and where it must be whole."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from cgraph import _driver
from cgraph.breaks import GradientBreakError, Work

__all__ = ["BreakFoundError", "Calls", "InBreak", "Passes", "Whole"]

InBreak = Callable[[], AbstractContextManager[None]]
"""Gives a block in which a break runs."""


class BreakFoundError(BaseException):
    """A break was called in a capture that is not divided. No code of users catches this."""


class Calls:
    """Calls before a capture, whose breaks just run.

    Args:
        in_break: The blocks in which they do.

    Attributes:
        are_met: Whether there was a break.
    """

    are_met = False

    def __init__(self, in_break: InBreak) -> None:
        self._in_break = in_break

    def run(self, work: Work, args: Any, kwargs: Any) -> Any:
        """Run a break."""
        self.are_met = True
        with self._in_break():
            return work.fn(*args, **kwargs)


class Whole:
    """A capture that is not divided."""

    def run(self, *_: object) -> Any:
        """Tell that there is a break."""
        raise BreakFoundError


class Passes:
    """Warm-up calls, whose breaks just run, and captures of passes that are not divided.

    Args:
        in_break: The blocks in which they do.

    Attributes:
        met: A break that was called; None if there was none.
    """

    met: str | None = None

    def __init__(self, in_break: InBreak) -> None:
        self._in_break = in_break

    def run(self, work: Work, args: Any, kwargs: Any) -> Any:
        """Run a break in a warm-up call; refuse it in a capture."""
        self.met = work.name
        if _driver.current().is_capturing():
            self.require_none()
        with self._in_break():
            return work.fn(*args, **kwargs)

    def require_none(self) -> None:
        """Refuse a break that was called, also where the function has caught the refusal."""
        if self.met is not None:
            raise GradientBreakError(
                "a break in a function whose result requires gradients, whose passes are captured"
                f" whole: {self.met}"
            )
