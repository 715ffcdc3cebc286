"""The way in which a loop makes its steps, and the reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cgraph._reason import Reason
from cgraph._text import plural

__all__ = ["LoopReport"]


@dataclass(frozen=True)
class LoopReport:
    """The way in which a loop makes its steps, and the reason.

    >>> print(LoopReport("decode", "launch", 4, 1, None, None, None, None))
    decode: one launch a run, 4 steps an iteration, captured once

    Attributes:
        name: The name of the step.
        how: ``"launch"``: a run is one launch. ``"steps"``: the host makes each step.
        unroll: Steps of an iteration.
        captures: Number of captures.
        reason: Why the host makes the steps; None if it does not.
        where: The line of that, as ``model.py:31``.
        fix: What to do about it.
        code: The code whose page ``cgraph why`` prints.
    """

    name: str
    how: Literal["launch", "steps"]
    unroll: int
    captures: int
    reason: str | None
    where: str | None
    fix: str | None
    code: str | None

    @classmethod
    def of(cls, name: str, unroll: int, captures: int, against: Reason | None) -> LoopReport:
        """Return the report of a loop, which a reason may keep from being one launch."""
        if against is None:
            return cls(name, "launch", unroll, captures, None, None, None, None)
        facts = against.text, against.where, against.fix, against.cause.code
        return cls(name, "steps", 1, captures, *facts)

    def __str__(self) -> str:
        """Return it as a sentence."""
        if self.how == "launch":
            steps, times = plural(self.unroll, "step"), plural(self.captures, "time")
            times = "once" if self.captures == 1 else times
            return f"{self.name}: one launch a run, {steps} an iteration, captured {times}"
        where = "" if self.where is None else f" ({self.where})"
        fix = "" if self.fix is None else f". Fix: {self.fix}"
        return f"{self.name}: the host makes each step, as {self.reason}{where}{fix}"
