"""Calls of fewer rows than a graph has: inputs are padded, outputs cut."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from cgraph import _core, _torch
from cgraph._functions.leaving import Leaving
from cgraph._functions.padding.contents import padded
from cgraph._functions.padding.rows import Fit
from cgraph._recording.noise import Noise, is_near, same_rows
from cgraph._recording.options import Pad
from cgraph._recording.recorded import Recorded
from cgraph._state.constants import Constant
from cgraph._torch import tree_flatten, tree_unflatten
from cgraph.cudagraph import CUDAGraph
from cgraph.errors import ArgumentError

__all__ = [
    "Leak",
    "Padded",
    "cut",
    "cut_leaves",
    "leaks",
]


class Padded:
    """What a call of so many rows does with the graph of a larger size.

    Args:
        recorded: The graph.
        found: The rows of the call.
        pad: What the padding contains.
        leaving: Leaves to the caller what else the function does.
    """

    def __init__(self, recorded: Recorded, found: Fit, pad: Pad, leaving: Leaving) -> None:
        self._recorded = recorded
        self._replay = recorded.graph.replay
        if recorded.debugged is not None:
            self._replay = functools.partial(recorded.debugged, tuple(recorded.statics))
        self._leaving = leaving
        self._pad = pad
        self._rows = found.rows
        self._dims = found.dims
        self._heads = [
            static if dim is None else static.narrow(dim, 0, found.rows)
            for static, dim in zip(recorded.statics, found.dims, strict=True)
        ]
        self._tails = [
            None if dim is None else static.narrow(dim, found.rows, static.shape[dim] - found.rows)
            for static, dim in zip(recorded.statics, found.dims, strict=True)
        ]

    def __call__(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """Copy, pad and replay."""
        if self._leaving.is_seen_elsewhere(tensors):
            self._leaving.run_eagerly(tensors)
            return
        self._fill(tensors)
        self._replay()
        self._leaving.leave(tensors, self._heads)

    def native(self) -> tuple[_core.PaddedGraph, list[torch.Tensor]] | None:
        """What does the same in one step, and what its tensors are like; None if nothing can.

        The root node of a graph copies first rows and pads, where they lie side by side.
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
        except ArgumentError:  # rows without elements, or that share memory
            return None
        return native, self._heads

    def _fill(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy and pad, in as few launches as may be."""
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


def cut(result: Any, batched: Sequence[int | None], rows: int) -> Any:
    """A result with only so many rows."""
    leaves, spec = tree_flatten(result)
    return tree_unflatten(cut_leaves(leaves, batched, rows), spec)


def cut_leaves(leaves: Sequence[Any], batched: Sequence[int | None], rows: int) -> list[Any]:
    """The leaves of a result with only so many rows, in the dimensions that have rows."""
    return [
        leaf if dim is None else leaf.narrow(dim, 0, rows)
        for leaf, dim in zip(leaves, batched, strict=True)
    ]


class Leak(NamedTuple):
    """How padding shows in other rows.

    Attributes:
        text: It, in words.
        may_be_noise: Whether another replay may tell that it was none.
    """

    text: str
    may_be_noise: bool = False


def leaks(
    names: Sequence[str],
    sames: Sequence[Sequence[Any]],
    other: Sequence[Any],
    eager: Sequence[Any],
    rows: int,
    size: int,
    is_random: Sequence[bool],
    agreed: dict[int, torch.Tensor],
) -> tuple[list[int | None], Leak | None]:
    """Whether padding shows in the rows of a result.

    In numbers with a fraction it shows in each replay in the same rows, where noise comes and goes.

    Args:
        names: What the leaves are called.
        sames: The leaves of replays with one padding, of which there may be several as kernels may
            be noisy.
        other: Those of a replay with another padding.
        eager: Those of the function for the call as it is.
        rows: How many the call has.
        size: How many the graph has.
        is_random: Whether each leaf depends on random numbers: with more rows, others are drawn.
        agreed: For each leaf of such numbers its rows that have come out alike before with the
            other padding, whose replays may be repeated; those that do now are added.

    Returns:
        For each leaf the dimension of its rows, and what leaks.
    """
    batched: list[int | None] = []
    leak: Leak | None = None
    for place, (name, right, one, its_other) in enumerate(
        zip(names, eager, sames[0], other, strict=True)
    ):
        if not isinstance(one, torch.Tensor) or not isinstance(right, torch.Tensor):
            for value in (one, its_other):
                if Constant(value) != Constant(right):
                    text = f"{name} is {value!r:.40} for {size} rows, {right!r:.40} for"
                    return [], Leak(f"{text} {rows}")
            batched.append(None)
            continue
        if right.dim() != one.dim():
            return [], Leak(f"{name} has another form than without padding")
        differing = [dim for dim in range(one.dim()) if one.shape[dim] != right.shape[dim]]
        if any((one.shape[d], right.shape[d]) != (size, rows) for d in differing):
            text = f"{name} has the shape {list(one.shape)} for {size} rows and"
            return [], Leak(f"{text} {list(right.shape)} for {rows}")
        if len(differing) > 1:
            return [], Leak(f"{name} has the rows in {len(differing)} dimensions")
        dim = differing[0] if differing else None
        batched.append(dim)
        first, *others, last = (
            leaf if dim is None else leaf.narrow(dim, 0, rows)
            for leaf in (*(leaves[place] for leaves in sames), its_other)
        )
        if not is_random[place] and not is_near(first, right):
            return [], Leak(f"{name} depends on the number of rows")
        is_right = is_random[place] or all(is_near(one, right) for one in (*others, last))
        if last.is_floating_point() or last.is_complex():
            for same in (first, *others):
                agreed[place] = agreed.get(place, False) | same_rows(same, last, dim)
            if not agreed[place].all():
                agreed[place] |= Noise(first, others, dim).explains(last)
            is_same = bool(agreed[place].all())
        else:
            is_same = any(torch.equal(same, last) for same in (first, *others))
        if not is_right or not is_same:
            found = Leak(f"{name} depends on what the padding rows contain", is_right)
            if not is_right:
                return [], found
            leak = leak or found
    return ([], leak) if leak else (batched, None)
