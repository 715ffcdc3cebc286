"""Whether padding shows in memory that a function writes and that outlives its calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from cgraph import _torch
from cgraph._recording.noise import is_near
from cgraph._state.rollback import Buffer

__all__ = ["Writes"]

# An element that was written holds by chance what it held before, less often than one in so many.
_BY_CHANCE = 4
# Buffers are compared in parts of so many elements, as that takes many times their bytes.
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
        is_free: Whether padding may write anywhere else.
    """

    def __init__(self, buffers: Sequence[Buffer], is_free: bool) -> None:
        # Whether what to expect of random numbers comes with the first call.
        self._expects_other = False
        self._is_free = is_free
        self._are_spoilt = _have_other_sizes(buffers)
        self._buffers: list[list[_Part]] = []
        if not self._are_spoilt:
            with _torch.without_modes():
                self._buffers = [[_Part(*part) for part in _parts(*one)] for one in buffers]

    def see_again(self, buffers: Sequence[Buffer]) -> None:
        """Look at what the same call writes with other random numbers.

        To a buffer where that differs, calls with padding must write the same with each padding.
        """
        self._are_spoilt |= _have_other_sizes(buffers)
        if self._are_spoilt:
            return
        self._expects_other = True
        with _torch.without_modes():
            for known, buffer in zip(self._buffers, buffers, strict=True):
                pairs = list(zip(known, _parts(*buffer), strict=True))
                # One element may come out alike by chance.
                if any(part.is_other(now) for part, (_, now) in pairs):
                    for part in known:
                        part.is_random = True

    def see(self, buffers: Sequence[Buffer]) -> None:
        """Look at the same buffers after a call with padding.

        The last two calls differ in numbers that may say where rows are written, and in nothing
        that may write zeros over zeros.
        """
        self._are_spoilt |= _have_other_sizes(buffers)
        if self._are_spoilt:
            return
        with _torch.without_modes():
            for known, buffer in zip(self._buffers, buffers, strict=True):
                for part, (before, now) in zip(known, _parts(*buffer), strict=True):
                    if self._expects_other:
                        part.expect(now)
                    if not part.is_right(now):
                        self._are_spoilt = True
                    if not self._is_free:
                        part.note_elsewhere(before, now)
        self._expects_other = False

    def are_spoilt(self) -> bool:
        """Whether padding shows in one of the buffers."""
        with _torch.without_modes():
            return self._are_spoilt or any(map(_wander, self._buffers))


class _Part:
    """A part of a buffer, before a call and after it."""

    def __init__(self, before: torch.Tensor, now: torch.Tensor) -> None:
        self._touched = _differs(now, before)
        self._right = _chosen(now, self._touched)
        self.is_random = False
        # For each call with padding what it wrote elsewhere: a mask, or places if these are less.
        self._elsewhere: list[torch.Tensor] = []

    def is_other(self, now: torch.Tensor) -> bool:
        """Whether the call without padding has written something else with other numbers."""
        return bool(_differs(_chosen(now, self._touched), self._right).any())

    def expect(self, now: torch.Tensor) -> None:
        """Take what is there for right, if it is random."""
        if self.is_random:
            self._right = _chosen(now, self._touched)

    def is_right(self, now: torch.Tensor) -> bool:
        """Whether what the call without padding has written is there."""
        return is_near(_chosen(now, self._touched), self._right)

    def note_elsewhere(self, before: torch.Tensor, now: torch.Tensor) -> None:
        """Note what a call with padding has written elsewhere."""
        mask = _differs(now, before).masked_fill_(self._touched, False)
        is_sparse = int(mask.sum()) * 8 < mask.numel()
        self._elsewhere.append(mask.nonzero().flatten() if is_sparse else mask)

    def counts(self) -> torch.Tensor:
        """How many elements each call with padding wrote elsewhere, and how many with the last."""
        masks = [self._mask(noted) for noted in self._elsewhere]
        counts = [[mask.sum(), (mask & masks[-1]).sum()] for mask in masks]
        return torch.tensor([list(map(int, pair)) for pair in counts]).view(-1, 2)

    def _mask(self, noted: torch.Tensor) -> torch.Tensor:
        if noted.dtype is torch.bool:
            return noted
        return torch.zeros_like(self._touched).index_fill_(0, noted, True)


def _wander(parts: list[_Part]) -> bool:
    """Whether the places that padding rows write to depend on what they contain."""
    if not parts:
        return False
    written, with_last = sum(part.counts() for part in parts).unbind(1)  # type: ignore[union-attr]
    if len(written) < 2:
        return bool(written.any())
    apart = written - with_last
    # The last two differ in what may say where to; both ways count.
    apart[-1] = apart[-2] + written[-1] - with_last[-2]
    return bool(apart.max() > written[-2:].max() // _BY_CHANCE)


def _have_other_sizes(buffers: Sequence[Buffer]) -> bool:
    return any(before.shape != now.shape for before, now in buffers)


def _parts(before: torch.Tensor, now: torch.Tensor) -> Iterator[Buffer]:
    yield from zip(before.split(_PART), now.split(_PART), strict=True)


def _chosen(tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The elements that a mask names. torch does not choose from all dtypes on a GPU."""
    whole = _WHOLE.get(tensor.dtype.itemsize, tensor.dtype)
    return tensor.view(whole)[mask].view(tensor.dtype)


def _differs(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Where two tensors of one dimension differ in their bits."""
    whole = _WHOLE.get(one.dtype.itemsize)
    if whole is not None:
        return one.view(whole) != other.view(whole)
    size = one.dtype.itemsize
    rows = (part.view(torch.uint8).view(part.numel(), size) for part in (one, other))
    return torch.ne(*rows).any(1)
