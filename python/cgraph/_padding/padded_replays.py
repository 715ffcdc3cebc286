"""Replays of a graph with fewer rows than it has: inputs are padded, results are cut."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from cgraph import _core, _torch
from cgraph._graphed.arguments import Arguments
from cgraph._graphed.call import Call
from cgraph._graphed.options import OnePad
from cgraph._graphed.recorded import Recorded
from cgraph._graphed.train import Trained
from cgraph._graphed.writeback import leave
from cgraph._padding.resize import number_of, padded, resized, row_of
from cgraph._padding.rows import Fit
from cgraph._torch import tree_flatten, tree_unflatten
from cgraph.errors import ArgumentError

__all__ = ["Padded", "PaddedPasses", "cut_leaves"]


class Padded:
    """The work of a call of so many rows with the graph of a larger size."""

    def __init__(self, recorded: Recorded, found: Fit, pads: Sequence[OnePad]) -> None:
        self._recorded = recorded
        self._replay = recorded.graph.replay
        if recorded.debugged is not None:
            self._replay = functools.partial(recorded.debugged, tuple(recorded.statics))
        self._pads = pads
        self._rows = found.rows
        self._dims = found.dims
        self._heads = cut_leaves(recorded.statics, found.dims, found.rows)
        self._tails = [
            None if dim is None else static.narrow(dim, found.rows, static.shape[dim] - found.rows)
            for static, dim in zip(recorded.statics, found.dims, strict=True)
        ]

    def __call__(
        self,
        tensors: tuple[torch.Tensor, ...],
        to: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Copy, pad and replay; arguments as for :class:`cgraph._graphed.writeback.Fed`."""
        self._fill(tensors)
        if to:
            self._recorded.graph._replay_into(None, to)
        else:
            self._replay()
        leave(self._recorded, tensors, self._heads)

    def native(self) -> tuple[_core.PaddedGraph, list[torch.Tensor]] | None:
        """Return native work that does the same in one step, and tensors like its; None if none.

        The root node of a graph copies first rows and pads if rows lie side by side.
        """
        recorded = self._recorded
        graph, inputs = recorded.graph._alone, recorded.inputs
        fills = {pad for pad, dim in zip(self._pads, self._dims, strict=True) if dim is not None}
        if fills not in ({"repeat"}, {"zero"}):
            return None
        if recorded.debugged is not None or recorded.leaves_more:
            return None
        fill: Any = fills.pop()
        if graph is None or inputs is None:
            return None
        statics = zip(self._recorded.statics, self._dims, strict=True)
        if any(dim not in (0, None) or not static.is_contiguous() for static, dim in statics):
            return None
        has_rows = [dim is not None for dim in self._dims]
        of = self._recorded.statics[has_rows.index(True)].shape[0]
        try:
            native = _core.PaddedGraph(graph, inputs, self._rows, of, fill, has_rows, self)
        except ArgumentError:  # rows have no elements, or share memory
            return None
        return native, self._heads

    def _fill(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy and pad, in as few launches as possible."""
        zeros, given = [], list(tensors)
        with torch.no_grad():
            _torch.copy_each(self._heads, given)
            for place, (tail, pad) in enumerate(zip(self._tails, self._pads, strict=True)):
                dim = self._dims[place]
                if tail is None or dim is None:
                    continue
                if callable(pad):
                    static = self._recorded.statics[place]
                    static.copy_(padded(given[place], dim, static.shape[dim], pad))
                elif pad in ("repeat", "first"):
                    row = self._heads[place].narrow(dim, row_of(pad, self._rows), 1)
                    tail.copy_(row.expand_as(tail))
                elif pad == "zero":
                    zeros.append(tail)
                else:
                    tail.fill_(number_of(pad))
            if zeros:
                _torch.zero_each(zeros)


class PaddedPasses:
    """A call with gradients, padded and cut by operators that pass gradients on.

    Args:
        trained: The graphs.
        found: The rows of the call.
        pads: The contents of the padding of each tensor.
        batched: For each leaf of the result the dimension of its rows; None without.
        arguments: The names of the function's arguments.
    """

    def __init__(
        self,
        trained: Trained,
        found: Fit,
        pads: Sequence[OnePad],
        batched: Sequence[int | None],
        arguments: Arguments,
    ) -> None:
        self._trained = trained
        self._found = found
        self._pads = pads
        self._batched = batched
        self._arguments = arguments

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Pad, replay and cut."""
        assert self._found.size is not None
        call = Call(self._arguments, args, kwargs)
        tensors = resized(call.tensors, self._found, self._found.size, self._pads)
        args, kwargs = call.arguments(tensors)
        work = self._trained.debugged or self._trained.replay
        leaves, spec = tree_flatten(work(*args, **kwargs))
        return tree_unflatten(cut_leaves(leaves, self._batched, self._found.rows), spec)


def cut_leaves(leaves: Sequence[Any], batched: Sequence[int | None], rows: int) -> list[Any]:
    """Cut the leaves of a result to so many rows, in the dimensions that have rows."""
    return [
        leaf if dim is None else leaf.narrow(dim, 0, rows)
        for leaf, dim in zip(leaves, batched, strict=True)
    ]
