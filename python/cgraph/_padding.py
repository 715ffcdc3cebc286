"""Calls of fewer rows than a graph has: inputs are padded, outputs cut."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cgraph._calls import Call
from cgraph._options import Options, Pad
from cgraph._recorded import Recorded
from cgraph._torch import tree_flatten, tree_unflatten

__all__ = ["Fit", "Padded", "cut", "cut_leaves", "fit", "leaks", "resized"]


@dataclass(frozen=True)
class Fit:
    """Where a call's rows are.

    Attributes:
        rows: How many it has.
        size: The size that it is padded to; None if it has more rows than all sizes.
        dims: For each tensor the dimension of the rows; None for a tensor without.
    """

    rows: int
    size: int | None
    dims: tuple[int | None, ...]


def fit(options: Options, call: Call, without: set[str]) -> Fit | None:
    """The rows of a call; None if no tensor has any.

    The first tensor that has the dimension says how many rows there are. Another one has rows if it
    is as long there, and never was of another length.

    Args:
        options: The sizes, and the dimension.
        call: The call.
        without: The names of tensors that are known to have no rows; those that show it now are
            added.
    """
    assert options.sizes is not None
    dims: list[int | None] = []
    rows: int | None = None
    for tensor, name in zip(call.tensors, call.names, strict=True):
        dim = options.dim if isinstance(options.dim, int) else options.dim.get(_root(name))
        if dim is None or tensor.dim() <= dim or name in without:
            dims.append(None)
            continue
        rows = tensor.shape[dim] if rows is None else rows
        dims.append(dim if tensor.shape[dim] == rows else None)
        if tensor.shape[dim] != rows:
            without.add(name)
    if rows is None:
        return None
    place = bisect.bisect_left(options.sizes, rows)
    size = options.sizes[place] if place < len(options.sizes) else None
    return Fit(rows, size, tuple(dims))


def resized(tensors: Sequence[torch.Tensor], found: Fit, size: int, pad: Pad) -> list[torch.Tensor]:
    """Tensors of another number of rows: cut, or padded."""
    return [
        tensor if dim is None else _resized(tensor, dim, size, pad)
        for tensor, dim in zip(tensors, found.dims, strict=True)
    ]


class Padded:
    """What a call of so many rows does with the graph of a larger size.

    Args:
        recorded: The graph.
        found: The rows of the call.
        pad: What the padding contains.
    """

    def __init__(self, recorded: Recorded, found: Fit, pad: Pad) -> None:
        self._replay = recorded.graph.replay
        if recorded.debugged is not None:
            self._replay = functools.partial(recorded.debugged, tuple(recorded.statics))
        self._mutated = recorded.mutated
        self._pad = pad
        self._rows = found.rows
        self._dims = found.dims
        self._statics = recorded.statics
        self._heads = [
            static if dim is None else static.narrow(dim, 0, found.rows)
            for static, dim in zip(recorded.statics, found.dims, strict=True)
        ]
        self._tails = [
            None if dim is None else static.narrow(dim, found.rows, static.shape[dim] - found.rows)
            for static, dim in zip(recorded.statics, found.dims, strict=True)
        ]

    def keep(self, objects: object) -> None:
        """Keep something alive as long as this."""
        self._kept = objects

    def __call__(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """Copy, pad and replay."""
        self.fill(tensors, self._pad)
        self._replay()
        for place in self._mutated:
            tensors[place].copy_(self._heads[place])

    def fill(self, tensors: Sequence[torch.Tensor], pad: Pad) -> None:
        """Copy and pad, in as few launches as may be."""
        with torch.no_grad():
            if callable(pad):
                for static, head, tensor, dim in zip(
                    self._statics, self._heads, tensors, self._dims, strict=True
                ):
                    if dim is None:
                        head.copy_(tensor)
                    else:
                        static.copy_(_resized(tensor, dim, static.shape[dim], pad))
                return
            torch._foreach_copy_(self._heads, list(tensors))
            tails = [tail for tail in self._tails if tail is not None]
            if pad == "zero":
                torch._foreach_zero_(tails)
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


def leaks(
    results: Sequence[Sequence[Any]], eager: Sequence[Any], rows: int, size: int
) -> tuple[list[int | None], str | None]:
    """Whether padding shows in the rows of a result.

    Args:
        results: The leaves of two replays that differ in their padding alone.
        eager: Those of the function for the call as it is.
        rows: How many the call has.
        size: How many the graph has.

    Returns:
        For each leaf the dimension of its rows, and what leaks, in words.
    """
    batched: list[int | None] = []
    for place, (one, other, right) in enumerate(zip(*results, eager, strict=True)):
        if not isinstance(one, torch.Tensor):
            batched.append(None)
            continue
        if not isinstance(right, torch.Tensor) or right.dim() != one.dim():
            return [], f"output {place} has another form than without padding"
        differing = [dim for dim in range(one.dim()) if one.shape[dim] != right.shape[dim]]
        if any((one.shape[d], right.shape[d]) != (size, rows) for d in differing):
            return [], (
                f"output {place} has the shape {list(one.shape)} for {size} rows and"
                f" {list(right.shape)} for {rows}"
            )
        if len(differing) > 1:
            return [], f"output {place} has the rows in {len(differing)} dimensions"
        dim = differing[0] if differing else None
        batched.append(dim)
        if dim is not None:
            one, other = one.narrow(dim, 0, rows), other.narrow(dim, 0, rows)
        if not _same_bits(one, other):
            return [], f"output {place} depends on what the padding rows contain"
    return batched, None


def _resized(tensor: torch.Tensor, dim: int, size: int, pad: Pad) -> torch.Tensor:
    rows = tensor.shape[dim]
    if rows >= size:
        return tensor.narrow(dim, 0, size)
    if callable(pad):
        return pad(tensor, size)
    shape = list(tensor.shape)
    shape[dim] = size - rows
    if pad == "repeat":
        return torch.cat([tensor, tensor.narrow(dim, rows - 1, 1).expand(shape)], dim)
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.is_floating_point() or one.is_complex():
        return torch.equal(torch.nan_to_num(one), torch.nan_to_num(other)) and torch.equal(
            one.isnan(), other.isnan()
        )
    return torch.equal(one, other)


def _root(name: str) -> str:
    """The argument that a leaf belongs to."""
    return name.split("[", 1)[0].split(".", 1)[0]
