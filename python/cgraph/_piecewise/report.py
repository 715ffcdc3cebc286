"""Reports of models in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from cgraph._piecewise.counters import Counters
from cgraph._piecewise.pieces import Part
from cgraph._piecewise.sized_calls import Size
from cgraph._text import in_time, in_units, plural, print_fitted, table

__all__ = ["PieceReport", "PiecewiseReport", "SizeReport", "report_of"]


@dataclass(frozen=True)
class PieceReport:
    """A part of a split model.

    Attributes:
        number: Its number, in the order of the calls.
        is_splitting: True if it holds splitting operators, and runs eagerly.
        operators: The number of its operators.
        compile_seconds: The time of its compilation for any size.
        size_seconds: The time of its compilation for single sizes, by the size.
    """

    number: int
    is_splitting: bool
    operators: int
    compile_seconds: float
    size_seconds: dict[int, float]


@dataclass(frozen=True)
class SizeReport:
    """A size of a model in pieces.

    Attributes:
        size: The size.
        is_captured: True if there are graphs for it.
        replays: The number of calls that were replayed.
        reserved: Growth of the pool by the capture, in bytes.
        exec: Bytes of the device for the execs of all pieces.
        bridge_bytes: Bytes that results of splitting operators are copied into; part of the pool.
        nodes: The number of nodes of all pieces.
        seconds: The time of the capture.
        refused: The reason why calls run without a graph; None if there is none.
    """

    size: int
    is_captured: bool
    replays: int
    reserved: int
    exec: int
    bridge_bytes: int
    nodes: int
    seconds: float
    refused: str | None


@dataclass(frozen=True)
class PiecewiseReport:
    """A report of a :class:`PiecewiseBackend`.

    Attributes:
        pieces: The parts of the model.
        sizes: The sizes, ascending.
        counters: The counts.
        cache_folder: The folder of the compiled pieces that are kept; None if none are.
    """

    pieces: tuple[PieceReport, ...]
    sizes: tuple[SizeReport, ...]
    counters: Counters
    cache_folder: str | None = None

    @property
    def device(self) -> int:
        """Bytes of the device that all captures took."""
        return sum(one.reserved + one.exec for one in self.sizes)

    def as_dict(self) -> dict[str, Any]:
        """Return everything by name."""
        return {**asdict(self), "device": self.device}

    def __str__(self) -> str:
        """Return a line on the pieces, and a table of the sizes."""
        eager = sum(one.is_splitting for one in self.pieces)
        seconds = sum(one.compile_seconds for one in self.pieces)
        lines = [
            f"{plural(len(self.pieces) - eager, 'piece')}, {plural(eager, 'eager part')} between"
            f" them; compiled in {in_time(seconds)}",
            f"{plural(self.counters.replays, 'replay')},"
            f" {plural(self.counters.uncaptured, 'call')} without a graph,"
            f" {in_units(self.device)} of the device",
        ]
        if self.cache_folder is not None:
            lines.append(f"compiled pieces are kept in {self.cache_folder}")
        if self.sizes:
            lines += ["", table(_HEAD, [_row(one) for one in self.sizes])]
        lines += [f"size {one.size}: {one.refused}" for one in self.sizes if one.refused]
        return "\n".join(lines)

    def show(self, file: TextIO | None = None) -> None:
        """Print the lines, to standard output unless a file is given."""
        print_fitted(self, file)


_HEAD = ["size", "captured", "replays", "pool", "execs", "bridges", "nodes", "capture"]


def _row(one: SizeReport) -> list[str]:
    return [
        str(one.size),
        "yes" if one.is_captured else "no",
        f"{one.replays:,}",
        in_units(one.reserved),
        in_units(one.exec),
        in_units(one.bridge_bytes),
        f"{one.nodes:,}",
        in_time(one.seconds),
    ]


def report_of(
    parts: Sequence[Part], sizes: Sequence[Size], counters: Counters, folder: Path | None
) -> PiecewiseReport:
    """Make a report of the present state."""
    pieces = tuple(
        PieceReport(
            number=one.item.graph_id,
            is_splitting=one.item.is_splitting_graph,
            operators=sum(node.op.startswith("call_") for node in one.item.graph.graph.nodes),
            compile_seconds=one.seconds,
            size_seconds=dict(one.sizes),
        )
        for one in parts
    )
    counts = Counters(**asdict(counters))
    kept = None if folder is None else str(folder)
    return PiecewiseReport(pieces, tuple(map(_of_size, sizes)), counts, kept)


def _of_size(one: Size) -> SizeReport:
    memory = None if one.graph is None else one.graph.memory()
    return SizeReport(
        size=one.size,
        is_captured=memory is not None,
        replays=one.replays,
        reserved=0 if memory is None else memory.reserved or 0,
        exec=0 if memory is None else memory.exec or 0,
        bridge_bytes=0 if one.graph is None else one.graph.bridge_bytes,
        nodes=0 if memory is None else memory.nodes,
        seconds=0.0 if memory is None else memory.seconds,
        refused=None if one.refused is None else one.refused.text,
    )
