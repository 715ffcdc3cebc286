"""How far apart equal replays come, as some kernels add up in any order."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["Noise"]

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
        found = [self._distances(same) for same in sames]
        if all(one is not None for one in found):
            self._most = torch.stack([one for one in found if one is not None]).amax(0)

    def explains(self, other: torch.Tensor) -> bool:
        """Whether another result is no further from the first one than equal replays come."""
        if self._most is None or (found := self._distances(other)) is None:
            return False
        return bool((found <= self._most * _FACTOR).all())

    def _distances(self, other: torch.Tensor) -> torch.Tensor | None:
        """For each row the largest distance and the mean one: [2, rows]; None for infinity."""
        one, other = self._rows(self._one), self._rows(other)
        is_finite = one.isfinite()
        if not torch.equal(one.isnan(), other.isnan()) or not torch.equal(
            one[~is_finite].nan_to_num(0.0), other[~is_finite].nan_to_num(0.0)
        ):
            return None
        one, other = (part.masked_fill(~is_finite, 0.0) for part in (one, other))
        size = one.abs()
        least = torch.finfo(size.dtype).tiny
        largest = size.amax(1, keepdim=True).clamp_min(least)
        usual = largest * (size / largest).square().mean(1, keepdim=True).sqrt()
        apart = (one - other).abs() / (size + usual).clamp_min(least)
        if not apart.isfinite().all():
            return None
        return torch.stack([apart.amax(1), apart.mean(1)])

    def _rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elements of each row, exact enough for means."""
        wide = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
        if self._dim is None:
            return wide.reshape(1, -1)
        return wide.movedim(self._dim, 0).reshape(wide.shape[self._dim], -1)
