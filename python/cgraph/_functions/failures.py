"""Why a key could not be captured, in words for its report."""

from __future__ import annotations

from typing import NamedTuple

from cgraph._explanation.findings import fix_of
from cgraph._recording.refusals import ResultError
from cgraph._source import place_of
from cgraph._text import first_line
from cgraph.breaks import GradientBreakError

__all__ = ["Failure", "failure_of"]


class Failure(NamedTuple):
    """Why a key could not be captured.

    Attributes:
        reason: Why.
        where: The line that is the reason.
        fix: What to do about it, where that is known.
    """

    reason: str
    where: str | None
    fix: str | None


def failure_of(error: BaseException) -> Failure:
    """What an error of a capture says."""
    reason = first_line(error)
    if not isinstance(error, GradientBreakError | ResultError):
        reason = f"raised in the capture: {type(error).__name__}: {reason}"
    # What the error of a result says is all that there is to say.
    fix = None if isinstance(error, ResultError) else fix_of(error)
    return Failure(reason, place_of(error), fix)
