"""Reports of graphed functions: what was captured, what was not and why.

A key is what the calls that share one graph have in common: shapes, dtypes, constants and modes.

>>> fast = KeyReport(
...     "x: float32[8]", "captured", None, None, (), 1000, 1, 0.02, 12, 2 << 20, ()
... )
>>> report = FunctionReport("decode", "model.py:12", (fast,))
>>> report.replays, report.captured, fast.advice
(1000, 1, None)
>>> report.to_dict()["keys"][0]["nodes"]
12
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from os import PathLike
from typing import Any, Literal, TextIO

from cgraph._reports import text
from cgraph._reports.advice import advice
from cgraph._reports.page import fragment, page

__all__ = ["FunctionReport", "KeyReport", "Report", "Rerecording", "State"]

State = Literal["captured", "eager", "observed"]
"""What calls of a key do: replay its graph, run eagerly, or run eagerly until they are captured."""


@dataclass(frozen=True)
class Rerecording:
    """Why a key was captured again.

    Attributes:
        reason: What happened, as ``is another object`` or ``evicted``.
        argument: The place that it happened to, if it was one.
        where: The line of the call, as ``model.py:31``.
        count: How many times.
    """

    reason: str
    argument: str | None
    where: str | None
    count: int


@dataclass(frozen=True)
class KeyReport:
    """What became of one key.

    Attributes:
        key: What its calls have in common, as ``x: float32[8, 16], mask: None, no grad``.
        state: What calls of it do now.
        reason: Why they run eagerly, or why the last one did that could not be a replay of the
            graph that its key has.
        where: The line that is the reason.
        rerecorded: Why it was captured again.
        replays: How many calls were a replay, the one after the capture included.
        eager_calls: How many calls ran eagerly, the first one included.
        capture_seconds: Of all its captures, instantiation included.
        nodes: How many nodes the graph has.
        memory_bytes: Of the device: what it holds of the pool, and the exec.
        breaks: The eager breaks of a call, in order.
        frozen: The memory that it reads and that nothing guards: it stays as at the capture.
        fix: What to do about a capture that failed, where that is known.
        has_sizes: Whether the function has ``sizes``, so that it cannot be the advice to give some.
        is_simulated: Whether its graph is of the simulator, whose times say nothing of a device's.
    """

    key: str
    state: State
    reason: str | None
    where: str | None
    rerecorded: tuple[Rerecording, ...]
    replays: int
    eager_calls: int
    capture_seconds: float
    nodes: int | None
    memory_bytes: int | None
    breaks: tuple[str, ...]
    frozen: tuple[str, ...] = ()
    fix: str | None = None
    has_sizes: bool = False
    is_simulated: bool = False

    @property
    def advice(self) -> str | None:
        """What to do about it; None if it is fine."""
        return advice(self)

    def to_dict(self) -> dict[str, Any]:
        """All numbers and words by name, fit for JSON; seconds and bytes."""
        return {
            **asdict(self),
            "rerecorded": [asdict(one) for one in self.rerecorded],
            "breaks": list(self.breaks),
            "frozen": list(self.frozen),
            "advice": self.advice,
        }


class _Shown(ABC):
    """What can be read as a table, as numbers and as a page."""

    @property
    @abstractmethod
    def _functions(self) -> tuple[FunctionReport, ...]: ...

    def __str__(self) -> str:
        """A table of the keys of each function, and what is to be said of them below it."""
        return text.text(self._functions)

    def show(self, file: TextIO | None = None) -> None:
        """Print the tables, to standard output unless a file is given."""
        print(self, file=file or sys.stdout)

    def html(self, path: str | PathLike[str] | None = None) -> str:
        """One page that needs nothing else, and has no scripts.

        Args:
            path: The file to write it to, if it is given.
        """
        whole = page(self._functions)
        if path is not None:
            with open(path, "w", encoding="utf-8") as file:
                file.write(whole)
        return whole

    def _repr_html_(self) -> str:
        """The page's content, for notebooks."""
        return fragment(self._functions)


@dataclass(frozen=True)
class FunctionReport(_Shown):
    """What became of one graphed function.

    Attributes:
        name: Its name.
        where: The line of its definition.
        keys: What it was called with.
    """

    name: str
    where: str | None
    keys: tuple[KeyReport, ...]

    @property
    def captured(self) -> int:
        """How many keys have a graph now."""
        return sum(key.state == "captured" for key in self.keys)

    @property
    def replays(self) -> int:
        """How many calls were a replay."""
        return sum(key.replays for key in self.keys)

    @property
    def capture_seconds(self) -> float:
        """Of the captures of all keys."""
        return sum(key.capture_seconds for key in self.keys)

    @property
    def memory_bytes(self) -> int:
        """Of the device, for all keys whose bytes are known."""
        return sum(key.memory_bytes or 0 for key in self.keys)

    def to_dict(self) -> dict[str, Any]:
        """All numbers and words by name, fit for JSON; seconds and bytes."""
        return {
            "name": self.name,
            "where": self.where,
            "captured": self.captured,
            "replays": self.replays,
            "capture_seconds": self.capture_seconds,
            "memory_bytes": self.memory_bytes,
            "keys": [key.to_dict() for key in self.keys],
        }

    @property
    def _functions(self) -> tuple[FunctionReport, ...]:
        return (self,)


@dataclass(frozen=True)
class Report(_Shown):
    """What became of all graphed functions.

    Attributes:
        functions: They, by their names.
    """

    functions: tuple[FunctionReport, ...]

    def to_dict(self) -> dict[str, Any]:
        """All numbers and words by name, fit for JSON; seconds and bytes."""
        return {"functions": [function.to_dict() for function in self.functions]}

    @property
    def _functions(self) -> tuple[FunctionReport, ...]:
        return self.functions
