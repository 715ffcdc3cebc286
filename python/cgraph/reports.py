"""Reports of graphed functions: captures, failed captures, and the reasons.

A key is the set of common properties of calls that share one graph: shapes, dtypes, constants,
    modes.

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

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from os import PathLike
from typing import Any, Literal, TextIO

from cgraph._reports import text
from cgraph._reports.advice import advice
from cgraph._reports.page import fragment, page
from cgraph._text import print_fitted

__all__ = ["FunctionReport", "KeyReport", "Report", "Rerecording", "State"]

State = Literal["captured", "eager", "observed"]
"""Effect of calls of a key: replay its graph, run eagerly, or run eagerly until a capture."""


@dataclass(frozen=True)
class Rerecording:
    """The reason of a repeated capture of a key.

    Attributes:
        reason: The event, as ``is another object`` or ``evicted``.
        argument: The place that it happened to, if there is one.
        where: The line of the call, as ``model.py:31``.
        count: Number of times.
    """

    reason: str
    argument: str | None
    where: str | None
    count: int


@dataclass(frozen=True)
class KeyReport:
    """The history of one key.

    Attributes:
        key: The common properties of its calls, as ``x: float32[8, 16], mask: None, no grad``.
        state: The present effect of its calls.
        reason: The reason that they run eagerly, or that the last call did which could not be a
            replay of the key's graph.
        where: The line that is the reason.
        rerecorded: The reasons of further captures.
        replays: Number of calls that were a replay, including the one after the capture.
        eager_calls: Number of calls that ran eagerly, including the first one.
        capture_seconds: The duration of all its captures, including instantiation.
        nodes: Number of nodes of the graph.
        memory_bytes: Of the device: the exec, and with gradients the pool that is its own.
        copied_bytes: Of the tensors among arguments and at guarded places that a replay copies.
        breaks: The eager breaks of a call, in order.
        frozen: The memory that it reads without a guard: it stays as at the capture.
        fix: The fix of the reason; None if there is no reason, or it passes by itself.
        has_sizes: True if the function has ``sizes``, so that giving some cannot be the advice.
        is_simulated: True for a graph of the simulator, whose times say nothing about a device.
        captures: Number of times that it has got a graph; after the first one, in place of another.
        code: The code of the reason, as ``CG-HOST-READ``: ``cgraph why CG-HOST-READ`` has a page.
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
    copied_bytes: int | None = None
    is_simulated: bool = False
    captures: int = 0
    code: str | None = None

    @property
    def advice(self) -> str | None:
        """The advice about the key; None if it is fine."""
        return advice(self)

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers and texts by name, fit for JSON; in seconds and bytes."""
        return {
            **asdict(self),
            "rerecorded": [asdict(one) for one in self.rerecorded],
            "breaks": list(self.breaks),
            "frozen": list(self.frozen),
            "advice": self.advice,
        }


class _Shown(ABC):
    """A report that can be read as a table, as numbers and as a page."""

    @property
    @abstractmethod
    def _functions(self) -> tuple[FunctionReport, ...]: ...

    def __str__(self) -> str:
        """Return a table of the keys of each function, with notes below it."""
        return text.text(self._functions)

    def show(self, file: TextIO | None = None) -> None:
        """Print the tables, to standard output unless a file is given."""
        print_fitted(self, file)

    def html(self, path: str | PathLike[str] | None = None) -> str:
        """Return one page that needs no other files and has no scripts.

        Args:
            path: The file to write it to, if any.
        """
        whole = page(self._functions)
        if path is not None:
            with open(path, "w", encoding="utf-8") as file:
                file.write(whole)
        return whole

    def _repr_html_(self) -> str:
        """Return the page's content, for notebooks."""
        return fragment(self._functions)


@dataclass(frozen=True)
class FunctionReport(_Shown):
    """The history of one graphed function.

    Attributes:
        name: Its name.
        where: The line of its definition.
        keys: The keys of its calls.
        pool_bytes: Of the device: the pool of all keys without gradients, which use the same
            memory. It counts for each function that shares it.
        totals: Counts of all calls so far, those of keys that are forgotten included: ``replays``,
            ``eager_calls``, ``captures``, ``recaptures``, ``capture_seconds``.
    """

    name: str
    where: str | None
    keys: tuple[KeyReport, ...]
    pool_bytes: int = 0
    totals: Mapping[str, float] = field(default_factory=dict)

    @property
    def captured(self) -> int:
        """Number of keys that have a graph now."""
        return sum(key.state == "captured" for key in self.keys)

    @property
    def replays(self) -> int:
        """Number of calls that were a replay."""
        return sum(key.replays for key in self.keys)

    @property
    def capture_seconds(self) -> float:
        """Seconds of the captures of all keys."""
        return sum(key.capture_seconds for key in self.keys)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the device: the pool, and those of all keys whose bytes are known."""
        return self.pool_bytes + sum(key.memory_bytes or 0 for key in self.keys)

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers and texts by name, fit for JSON; in seconds and bytes."""
        return {
            "name": self.name,
            "where": self.where,
            "captured": self.captured,
            "replays": self.replays,
            "capture_seconds": self.capture_seconds,
            "memory_bytes": self.memory_bytes,
            "pool_bytes": self.pool_bytes,
            "totals": dict(self.totals),
            "keys": [key.to_dict() for key in self.keys],
        }

    @property
    def _functions(self) -> tuple[FunctionReport, ...]:
        return (self,)


@dataclass(frozen=True)
class Report(_Shown):
    """The history of all graphed functions.

    Attributes:
        functions: The reports of the functions, by name.
    """

    functions: tuple[FunctionReport, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers and texts by name, fit for JSON; in seconds and bytes."""
        return {"functions": [function.to_dict() for function in self.functions]}

    @property
    def _functions(self) -> tuple[FunctionReport, ...]:
        return self.functions
