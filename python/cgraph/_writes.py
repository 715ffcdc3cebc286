"""Whether padding shows in memory that a function writes and that outlives its calls."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cgraph import _torch
from cgraph._noise import is_near
from cgraph._rollback import Buffer

__all__ = ["Writes"]

# An element that was written holds by chance what it held before, less often than one in so many.
_BY_CHANCE = 4
_PART = 1 << 22
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Writes:
    """What calls with padding write, beside what the call without padding has written.

    Where that one writes, padding must not change it. Elsewhere padding rows may write, as to the
    rows of a cache behind those of the call, unless their contents say where: a call could then hit
    what belongs to others.

    Caches may be most of a device's memory, so no copies are kept: of each buffer a truth value for
    each element, and of what was written the elements and their places.

    Args:
        buffers: What the call without padding has just written.
        is_random: Whether what the call writes may be other numbers.
        is_free: Whether padding may write anywhere else.
    """

    def __init__(self, buffers: Sequence[Buffer], is_random: bool, is_free: bool) -> None:
        self._is_random = is_random
        self._is_free = is_free
        self._are_spoilt = False
        with _torch.without_modes():
            self._touched = [
                None if before.shape != now.shape else _differs(now, before)
                for before, now in buffers
            ]
            self._right = [
                None if touched is None else now[touched]
                for touched, (_, now) in zip(self._touched, buffers, strict=True)
            ]
        self._elsewhere: list[list[torch.Tensor]] = [[] for _ in self._touched]

    def see(self, buffers: Sequence[Buffer]) -> None:
        """Look at the same buffers after a call with padding.

        The last two calls differ in numbers that may say where rows are written, and in nothing
        that may write zeros over zeros.
        """
        with _torch.without_modes():
            for place, (before, now) in enumerate(buffers):
                touched, right = self._touched[place], self._right[place]
                if touched is None or right is None or before.shape != now.shape:
                    self._are_spoilt = True
                    continue
                if not self._is_random and not is_near(now[touched], right):
                    self._are_spoilt = True
                if not self._is_free:
                    elsewhere = _differs(now, before).masked_fill_(touched, False)
                    self._elsewhere[place].append(_packed(elsewhere))

    def are_spoilt(self) -> bool:
        """Whether padding shows in one of the buffers."""
        with _torch.without_modes():
            return self._are_spoilt or any(map(_wanders, self._elsewhere))


def _packed(mask: torch.Tensor) -> torch.Tensor:
    """A mask, or its places if they are fewer bytes."""
    # torch sums truth values as whole numbers, which are eight times the bytes.
    count = sum(int(part.sum()) for part in mask.split(_PART))
    return mask if count * 8 > mask.numel() else _places(mask)


def _places(packed: torch.Tensor) -> torch.Tensor:
    return packed.nonzero().flatten() if packed.dtype is torch.bool else packed


def _wanders(found: list[torch.Tensor]) -> bool:
    """Whether the places that padding rows write to depend on what they contain."""
    elsewhere = list(map(_places, found))
    if len(elsewhere) < 2:
        return any(places.numel() for places in elsewhere)
    *earlier, one, other = elsewhere
    both = _in_both(one, other)
    apart = [one.numel() + other.numel() - 2 * both]
    apart += [places.numel() - _in_both(places, other) for places in earlier]
    return max(apart) > max(one.numel(), other.numel()) // _BY_CHANCE


def _in_both(one: torch.Tensor, other: torch.Tensor) -> int:
    return int(torch.isin(one, other, assume_unique=True).sum())


def _differs(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Where two tensors of one dimension differ in their bits."""
    whole = _WHOLE.get(one.dtype.itemsize)
    if whole is not None:
        return one.view(whole) != other.view(whole)
    size = one.dtype.itemsize
    rows = (part.view(torch.uint8).view(part.numel(), size) for part in (one, other))
    return torch.ne(*rows).any(1)
