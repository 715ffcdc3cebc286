"""How far apart equal replays come, as some kernels add up in any order."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["Noise"]

# How much further apart than equal replays others may be and still count as equal.
_FACTOR = 3


class Noise:
    """The distances of equal replays, which say whether that of another one is more.

    All distances are in units of an element's size and the usual size of all, so that the few large
    ones of many elements tell what to expect of others. Something that shifts all elements of a row
    by little is told by the row's mean.

    Args:
        one: What a replay has left.
        sames: What others have left that were given the same.
        dim: The dimension of the rows; None if there are none.
    """

    def __init__(self, one: torch.Tensor, sames: Sequence[torch.Tensor], dim: int | None) -> None:
        self._one = one
        self._dim = dim
        self._most: tuple[float, float] | None = None
        if not sames or not one.numel() or not (one.is_floating_point() or one.is_complex()):
            return
        found = [self._distances(same) for same in sames]
        if None not in found:
            elements, rows = zip(*filter(None, found), strict=True)
            self._most = max(elements), max(rows)

    def explains(self, other: torch.Tensor) -> bool:
        """Whether another result is no further from the first one than equal replays come."""
        if self._most is None or (found := self._distances(other)) is None:
            return False
        return all(one <= most * _FACTOR for one, most in zip(found, self._most, strict=True))

    def _distances(self, other: torch.Tensor) -> tuple[float, float] | None:
        """The largest distance of an element, and the largest mean of a row; None for infinity."""
        one, other = _in_float(self._one), _in_float(other)
        is_finite = one.isfinite()
        if not torch.equal(one.isnan(), other.isnan()) or not torch.equal(
            one[~is_finite].nan_to_num(0.0), other[~is_finite].nan_to_num(0.0)
        ):
            return None
        one, other = (part.masked_fill(~is_finite, 0.0) for part in (one, other))
        size = one.abs()
        usual = size.square().mean().sqrt()
        apart = (one - other).abs() / (size + usual).clamp_min(torch.finfo(size.dtype).tiny)
        if not apart.isfinite().all():
            return None
        rows = apart if self._dim is None else apart.movedim(self._dim, 0).flatten(1).mean(1)
        return float(apart.max()), float(rows.mean() if self._dim is None else rows.max())


def _in_float(tensor: torch.Tensor) -> torch.Tensor:
    """Numbers of small types are too coarse for means."""
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor
