"""How far apart equal replays come, as some kernels add up in any order."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["Noise", "is_near", "same_rows"]

# How much further apart than equal replays others may be and still count as equal.
_FACTOR = 3


class Noise:
    """The distances of equal replays, which say whether that of another one is more.

    Each row has its own: that of its elements which differ most, and the mean of all, by which
    something that shifts them all by little is told. The distance of an element is in units of its
    size and the usual size in the row, so that large and small ones can be compared.

    Args:
        one: What a replay has left.
        sames: What others have left that were given the same.
        dim: The dimension of the rows; None if there are none.
    """

    def __init__(self, one: torch.Tensor, sames: Sequence[torch.Tensor], dim: int | None) -> None:
        self._one = one
        self._dim = dim
        self._most: torch.Tensor | None = None
        if not sames or not one.numel() or not (one.is_floating_point() or one.is_complex()):
            return
        most = torch.stack([self._distances(same) for same in sames]).amax(0)
        # Where equal replays come infinitely far apart, nothing is noise.
        self._most = most.masked_fill(~most.isfinite(), -1.0)

    def explains(self, other: torch.Tensor) -> torch.Tensor:
        """Whether another result is no further from the first one than equal replays come.

        Returns:
            It for each row: [rows].
        """
        if self._most is None:
            return torch.zeros_like(same_rows(self._one, other, self._dim))
        return (self._distances(other) <= self._most * _FACTOR).all(0)

    def _distances(self, other: torch.Tensor) -> torch.Tensor:
        """For each row the largest distance and the mean one: [2, rows]."""
        # Exact enough for means.
        both = (_real(part).double() for part in (self._one, other))
        one, other = (_rows(part, self._dim) for part in both)
        is_finite = one.isfinite()
        is_same = (one == other) | (one.isnan() & other.isnan())
        is_apart = (~is_finite & ~is_same) | (is_finite & ~other.isfinite())
        one, other = (part.masked_fill(~is_finite | is_apart, 0.0) for part in (one, other))
        size = one.abs()
        least = torch.finfo(size.dtype).tiny
        largest = size.amax(1, keepdim=True).clamp_min(least)
        usual = largest * (size / largest).square().mean(1, keepdim=True).sqrt()
        apart = (one - other).abs() / (size + usual).clamp_min(least)
        apart = apart.masked_fill(is_apart, torch.inf)
        return torch.stack([apart.amax(1), apart.mean(1)])


def is_near(one: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors are equal but for rounding: sums of more rows have another order."""
    if right.numel() == 0:
        return one.shape == right.shape
    if not (right.is_floating_point() or right.is_complex()):
        return torch.equal(one, right)
    within = float(torch.finfo(right.dtype).eps ** 0.5)
    if right.dtype.itemsize < 4:
        one, right = one.float(), right.float()
    size = float(right.abs().nan_to_num(0.0, 0.0, 0.0).max())
    return torch.allclose(one, right, rtol=within, atol=within * size, equal_nan=True)


def same_rows(one: torch.Tensor, other: torch.Tensor, dim: int | None) -> torch.Tensor:
    """Whether two results are equal, NaN where NaN is, for each row: [rows].

    Args:
        one: A result.
        other: Another one of the same shape.
        dim: The dimension of the rows; None for one row.
    """
    one, other = _real(one), _real(other)
    is_same = one == other
    if one.is_floating_point():
        is_same |= one.isnan() & other.isnan()
    return _rows(is_same, dim).all(1)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs, in one dimension more."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _rows(tensor: torch.Tensor, dim: int | None) -> torch.Tensor:
    """The elements of each row: [rows, elements]."""
    if dim is None:
        return tensor.reshape(1, -1)
    return tensor.movedim(dim, 0).reshape(tensor.shape[dim], -1)
