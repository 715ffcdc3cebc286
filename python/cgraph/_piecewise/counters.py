"""Counts of what a backend has done."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Counters"]


@dataclass
class Counters:
    """Counts of what a :class:`PiecewiseBackend` has done.

    Attributes:
        graphs: Graphs of Dynamo's that it was given.
        parts: Parts of their splits, with the splitting operators.
        pieces: Parts that can be captured.
        inductor_compilations: Compilations of pieces.
        loaded: Pieces that the cache on disk had.
        captures: Sizes that were captured.
        loaded_sizes: Sizes whose graphs a file had.
        piece_captures: Pieces that were captured, each for one size: the graphs.
        replays: Calls that were replayed.
        uncaptured: Calls that ran without a graph.
    """

    graphs: int = 0
    parts: int = 0
    pieces: int = 0
    inductor_compilations: int = 0
    loaded: int = 0
    captures: int = 0
    loaded_sizes: int = 0
    piece_captures: int = 0
    replays: int = 0
    uncaptured: int = 0
