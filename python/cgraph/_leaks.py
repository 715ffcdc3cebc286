"""Whether padding rows show where they must not: in other rows, or in what the function writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

__all__ = ["Written", "leaks", "spoils"]

# Kernels of other sizes round differently. What leaks is far from that in most places.
_TOLERANCE = 0.05
# A word that was written may hold by chance what it held before.
_BY_CHANCE = 4


class Written(NamedTuple):
    """A storage that the function writes, at four times, as typed tensors of one dimension.

    Attributes:
        before: At the beginning.
        eager: After a call without padding.
        one: After a replay with padding.
        other: After a replay with other contents of the padding.
    """

    before: torch.Tensor
    eager: torch.Tensor
    one: torch.Tensor
    other: torch.Tensor


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
        if not _is_close(one, right):
            return [], f"output {place} depends on how many rows there are"
    return batched, None


def spoils(written: Sequence[Written]) -> str | None:
    """Whether padding shows in what the function writes; how, in words.

    What a call without padding writes must be the same. Elsewhere padding rows may write, as to the
    rows of a cache behind those of the call, if their contents do not say where.
    """
    for before, eager, one, other in written:
        touched = _differs(eager, before)
        if not _same_bits(one[touched], other[touched]):
            return "what the function writes depends on what the padding rows contain"
        if not _is_close(one[touched], eager[touched]):
            return "what the function writes depends on how many rows there are"
        first, second = (_differs(after, before) & ~touched for after in (one, other))
        apart, together = int((first ^ second).sum()), int((first | second).sum())
        if apart * _BY_CHANCE > together:
            return "the contents of padding rows say where the function writes"
    return None


def _differs(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    differs: torch.Tensor = one != other
    if one.is_floating_point() or one.is_complex():
        differs &= ~(one.isnan() & other.isnan())
    return differs


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return not bool(_differs(one, other).any())


def _is_close(one: torch.Tensor, right: torch.Tensor) -> bool:
    if one.numel() == 0:
        return True
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, right)
    one, right = _precise(one), _precise(right)
    scale = right.abs().nan_to_num(0, 0, 0).max().item()
    return torch.allclose(one, right, _TOLERANCE, _TOLERANCE * scale, equal_nan=True)


def _precise(tensor: torch.Tensor) -> torch.Tensor:
    """Small floating-point types have few operators."""
    return tensor if tensor.is_complex() else tensor.double()
