"""Reports of graphed functions: what was captured, what was not and why, and what it saves.

A key is what the calls that share one graph have in common: shapes, dtypes, constants and modes.

>>> fast = KeyReport(
...     "x: float32[8]", "captured", None, None, (), 1000, 1, 0.02, 12, 2 << 20, (), 8e-6, 48e-6
... )
>>> report = FunctionReport("decode", "model.py:12", (fast,))
>>> report.replays, round(report.saved_seconds, 3), fast.advice
(1000, 0.04, None)
>>> report.to_dict()["keys"][0]["nodes"]
12
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import asdict, dataclass
from os import PathLike
from typing import Any, Literal, TextIO

from cgraph import _report_page, _report_text
from cgraph._text import in_time, plural

__all__ = ["FIXES", "FunctionReport", "KeyReport", "Report", "Rerecording", "State"]

State = Literal["captured", "eager", "evicted"]
"""What calls of a key do: replay its graph, run eagerly, or capture anew."""

FIXES = {
    "larger than all sizes": "add a size that is large enough to sizes=",
    "too many keys": "give sizes=, so that calls share graphs, and give as tensors the numbers that"
    " change",
    "frozen": "capture this key before freeze(), with .capture()",
    "moved too often": "keep the argument at one address and change it in place, with copy_(), or"
    " do not declare it static",
    "host sync": "keep the value in a tensor, or mark the work with @cgraph.eager_break",
    "data-dependent shape": "use a fixed size and a mask, or mark the work with"
    " @cgraph.eager_break",
    "CPU tensor": "move the tensor to the device before the call",
    "pageable copy": "make the host's tensor with pin_memory()",
    "default stream": "work on torch.cuda.current_stream(), which is the capture's",
    "unjoined stream": "let the current stream wait for the other before the function returns",
    "raised": "mend what raised; the next call of this key then captures it",
}
"""What to do about a key that runs eagerly, by the words that its reason begins with."""

_ELSE = "see what a capture refuses, and the fix of each: cgraph.explain(fn, *args)"
# Each costs a capture; the first few may be a start that had to settle.
_MANY = 3


@dataclass(frozen=True)
class Rerecording:
    """Why a key was captured again.

    Attributes:
        reason: What happened: ``moved`` (an argument that is read where it lies), ``evicted``.
        argument: The argument that it happened to, if it was one.
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
        reason: Why they run eagerly. If it begins with one of :data:`FIXES`, the advice is its fix.
        where: The line that is the reason.
        rerecorded: Why it was captured again.
        replays: How many calls were a replay, the one after the capture included.
        eager_calls: How many calls ran eagerly, warm-ups left out.
        capture_seconds: Of all its captures, warm-up and instantiation included.
        nodes: How many nodes the graph has.
        memory_bytes: Of the device: by how much the pool grew, and the exec.
        breaks: The eager breaks of a call, in order.
        graph_seconds: Of one replay, measured on this machine when the key was captured.
        eager_seconds: Of one eager call, measured likewise.
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
    graph_seconds: float | None
    eager_seconds: float | None

    @property
    def saved_seconds(self) -> float | None:
        """What one replay saves; negative if eager is faster, None if it was not measured."""
        if self.graph_seconds is None or self.eager_seconds is None:
            return None
        return self.eager_seconds - self.graph_seconds

    @property
    def total_saved_seconds(self) -> float | None:
        """What all replays have saved, captures not counted; None if it was not measured."""
        return None if self.saved_seconds is None else self.saved_seconds * self.replays

    @property
    def advice(self) -> str | None:
        """What to do about it; None if it is fine."""
        if self.state == "eager":
            return _fix(self.reason or "")
        if self.saved_seconds is not None and self.saved_seconds <= 0:
            return f"do not graph this: {_comparison(self.graph_seconds, self.eager_seconds)}"
        found = _about_rerecordings(self.rerecorded)
        captures = 1 + sum(one.count for one in self.rerecorded)
        if self.replays <= captures:
            found.append(_about_seldom(captures, self.replays, self.capture_seconds))
        return "; ".join(found) or None

    def to_dict(self) -> dict[str, Any]:
        """All numbers and words by name, fit for JSON; seconds and bytes."""
        return {
            **asdict(self),
            "rerecorded": [asdict(one) for one in self.rerecorded],
            "breaks": list(self.breaks),
            "saved_seconds": self.saved_seconds,
            "total_saved_seconds": self.total_saved_seconds,
            "advice": self.advice,
        }


class _Shown(ABC):
    """What can be read as a table, as numbers and as a page."""

    @property
    @abstractmethod
    def _functions(self) -> tuple[FunctionReport, ...]: ...

    def __str__(self) -> str:
        """A table of the keys of each function, and what is to be said of them below it."""
        return _report_text.text(self._functions)

    def show(self, file: TextIO | None = None) -> None:
        """Print the tables, to standard output unless a file is given."""
        print(self, file=file or sys.stdout)

    def html(self, path: str | PathLike[str] | None = None) -> str:
        """One page that needs nothing else, and has no scripts.

        Args:
            path: The file to write it to, if it is given.
        """
        page = _report_page.page(self._functions)
        if path is not None:
            with open(path, "w", encoding="utf-8") as file:
                file.write(page)
        return page

    def _repr_html_(self) -> str:
        """The page's content, for notebooks."""
        return _report_page.fragment(self._functions)


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

    @property
    def saved_seconds(self) -> float:
        """What all replays of the keys that were measured have saved, captures not counted."""
        return sum(key.total_saved_seconds or 0.0 for key in self.keys)

    def to_dict(self) -> dict[str, Any]:
        """All numbers and words by name, fit for JSON; seconds and bytes."""
        return {
            "name": self.name,
            "where": self.where,
            "captured": self.captured,
            "replays": self.replays,
            "capture_seconds": self.capture_seconds,
            "memory_bytes": self.memory_bytes,
            "saved_seconds": self.saved_seconds,
            "keys": [key.to_dict() for key in self.keys],
        }

    @property
    def _functions(self) -> tuple[FunctionReport, ...]:
        return (self,)


@dataclass(frozen=True)
class Report(_Shown):
    """What became of all graphed functions.

    Attributes:
        functions: They, in the order of their definition.
    """

    functions: tuple[FunctionReport, ...]

    def to_dict(self) -> dict[str, Any]:
        """All numbers and words by name, fit for JSON; seconds and bytes."""
        return {"functions": [function.to_dict() for function in self.functions]}

    @property
    def _functions(self) -> tuple[FunctionReport, ...]:
        return self.functions


def _fix(reason: str) -> str:
    """The fix of the reason that a reason begins with."""
    known = (fix for words, fix in FIXES.items() if reason.lower().startswith(words.lower()))
    return next(known, _ELSE)


def _comparison(graph: float | None, eager: float | None) -> str:
    graph_text, eager_text = in_time(graph or 0.0), in_time(eager or 0.0)
    than = f"eager {eager_text}" if graph_text != eager_text else "as eager does"
    return f"a replay takes {graph_text}, {than}"


def _about_seldom(captures: int, replays: int, seconds: float) -> str:
    """What to do about captures that no more than one replay each has made use of."""
    if captures == 1:
        what = f"captured in {in_time(seconds)} and never replayed{' again' if replays else ''}"
    else:
        what = f"captured {captures:,} times in {in_time(seconds)} for {plural(replays, 'replay')}"
    return f"{what}: leave it eager, or give sizes= so that more calls share a graph"


def _about_rerecordings(rerecorded: tuple[Rerecording, ...]) -> list[str]:
    """What to do about arguments, or evictions, that made a key be captured many times."""
    arguments, evicted = Counter[str](), 0
    for one in rerecorded:
        if one.argument is not None:
            arguments[one.argument] += one.count
        elif one.reason == "evicted":
            evicted += one.count
    found = [
        f"argument {argument} made it be captured again {count:,} times: keep it at one address and"
        " change it in place, with copy_(), or declare as static only what stays where it is"
        for argument, count in arguments.most_common()
        if count >= _MANY
    ]
    if evicted >= _MANY:
        found.append(
            f"evicted and captured again {evicted:,} times: raise max_graphs or max_bytes, or give"
            " sizes= so that more calls share a graph"
        )
    return found
