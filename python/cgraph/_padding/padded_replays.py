"""Replays of a graph with fewer rows than it has: inputs are padded, results are cut."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from cgraph import _core, _torch
from cgraph._graphed.arguments import Arguments
from cgraph._graphed.call import Call
from cgraph._graphed.options import Pad
from cgraph._graphed.recorded import Recorded
from cgraph._graphed.train import Trained
from cgraph._graphed.writeback import leave
from cgraph._padding.resize import padded, resized
from cgraph._padding.rows import Fit
from cgraph._torch import tree_flatten, tree_unflatten
from cgraph.cudagraph import CUDAGraph
from cgraph.errors import ArgumentError

__all__ = ["Padded", "PaddedPasses", "cut", "cut_leaves", "first_rows"]


class Padded:
    """The work of a call of so many rows with the graph of a larger size.

    Args:
        recorded: The graph.
        found: The rows of the call.
        pad: The contents of the padding.
    """

    def __init__(self, recorded: Recorded, found: Fit, pad: Pad) -> None:
        self._recorded = recorded
        self._replay = recorded.graph.replay
        if recorded.debugged is not None:
            self._replay = functools.partial(recorded.debugged, tuple(recorded.statics))
        self._pad = pad
        self._rows = found.rows
        self._dims = found.dims
        self._heads = first_rows(recorded, found)
        self._tails = [
            None if dim is None else static.narrow(dim, found.rows, static.shape[dim] - found.rows)
            for static, dim in zip(recorded.statics, found.dims, strict=True)
        ]

    def __call__(
        self,
        tensors: tuple[torch.Tensor, ...],
        to: Sequence[tuple[int, int]] = (),
        owners: Sequence[torch.Tensor] = (),
    ) -> None:
        """Copy, pad and replay; arguments as for :class:`cgraph._graphed.writeback.Fed`."""
        self._fill(tensors)
        if owners:
            self._recorded.replay_into(to, owners)
        else:
            self._replay()
        leave(self._recorded, tensors, self._heads)

    def native(self) -> tuple[_core.PaddedGraph, list[torch.Tensor]] | None:
        """Return native work that does the same in one step, and tensors like its; None if none.

        The root node of a graph copies first rows and pads if rows lie side by side.
        """
        recorded, fill = self._recorded, self._pad
        graph, inputs = recorded.graph, recorded.inputs
        if callable(fill) or recorded.debugged is not None or recorded.leaves_more:
            return None
        if not isinstance(graph, CUDAGraph) or inputs is None:
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
        with torch.no_grad():
            if callable(self._pad):
                for static, head, tensor, dim in zip(
                    self._recorded.statics, self._heads, tensors, self._dims, strict=True
                ):
                    if dim is None:
                        head.copy_(tensor)
                    else:
                        static.copy_(padded(tensor, dim, static.shape[dim], self._pad))
                return
            _torch.copy_each(self._heads, list(tensors))
            tails = [tail for tail in self._tails if tail is not None]
            if self._pad == "zero":
                _torch.zero_each(tails)
                return
            last = [
                head.narrow(dim, self._rows - 1, 1)
                for head, dim in zip(self._heads, self._dims, strict=True)
                if dim is not None
            ]
            for tail, row in zip(tails, last, strict=True):
                tail.copy_(row.expand_as(tail))


class PaddedPasses:
    """A call with gradients, padded and cut by operators that pass gradients on.

    Args:
        trained: The graphs.
        found: The rows of the call.
        pad: The contents of the padding.
        batched: For each leaf of the result the dimension of its rows; None without.
        arguments: The names of the function's arguments.
    """

    def __init__(
        self,
        trained: Trained,
        found: Fit,
        pad: Pad,
        batched: Sequence[int | None],
        arguments: Arguments,
    ) -> None:
        self._trained = trained
        self._found = found
        self._pad = pad
        self._batched = batched
        self._arguments = arguments

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Pad, replay and cut."""
        assert self._found.size is not None
        call = Call(self._arguments, args, kwargs)
        tensors = resized(call.tensors, self._found, self._found.size, self._pad)
        args, kwargs = call.arguments(tensors)
        return cut(self._trained.call(*args, **kwargs), self._batched, self._found.rows)


def first_rows(recorded: Recorded, found: Fit) -> list[torch.Tensor]:
    """Return the first rows of the static tensors, to which a call with fewer rows is copied."""
    return cut_leaves(recorded.statics, found.dims, found.rows)


def cut(result: Any, batched: Sequence[int | None], rows: int) -> Any:
    """Cut a result to so many rows."""
    leaves, spec = tree_flatten(result)
    return tree_unflatten(cut_leaves(leaves, batched, rows), spec)


def cut_leaves(leaves: Sequence[Any], batched: Sequence[int | None], rows: int) -> list[Any]:
    """Cut the leaves of a result to so many rows, in the dimensions that have rows."""
    return [
        leaf if dim is None else leaf.narrow(dim, 0, rows)
        for leaf, dim in zip(leaves, batched, strict=True)
    ]
