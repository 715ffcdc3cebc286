"""Results of a capture that replays copy to new memory of the caller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from cgraph import _core, _torch
from cgraph.errors import ArgumentError, StateError

if TYPE_CHECKING:
    from cgraph._driver import Captured

__all__ = ["Results", "can_be_fresh", "fresh_of"]


class Results:
    """The memory of results that replays copy: one piece for all that share a storage.

    Args:
        tensors: The results of the capture, which :func:`can_be_fresh` accepts; not kept.

    Attributes:
        storages: Address and bytes of each piece, from the first to the last byte.
        fresh: Makes new tensors like the results.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        groups: dict[int, list[torch.Tensor]] = {}
        for tensor in tensors:
            number = _torch.storage_id(tensor.untyped_storage())
            groups.setdefault(number, []).append(tensor)
        self.storages = [_torch.piece_of(group) for group in groups.values()]
        places = {number: place for place, number in enumerate(groups)}
        numbers = [_torch.storage_id(one.untyped_storage()) for one in tensors]
        pairs = zip(numbers, tensors, strict=True)
        self.fresh = self._fresh([(places[number], one) for number, one in pairs])

    def cut(self, tensors: Sequence[torch.Tensor]) -> _core.Fresh:
        """Return a maker of tensors like others in the same memory, as the first rows of results.

        Raises:
            ArgumentError: A tensor lies elsewhere.
        """
        return self._fresh([(self._place(tensor), tensor) for tensor in tensors])

    def _fresh(self, results: list[tuple[int, torch.Tensor]]) -> _core.Fresh:
        reader, empty = _torch.tensor_reader(), torch.empty_strided
        # The core makes some tensors to examine them.
        with _torch.without_modes():
            functions = _torch.fresh_functions()
            return _core.Fresh(self.storages, results, reader, empty, functions)

    def _place(self, tensor: torch.Tensor) -> int:
        begin, end = _torch.span_of(tensor)
        for place, (address, nbytes) in enumerate(self.storages):
            if begin == end or (address <= begin and end <= address + nbytes):
                return place
        raise ArgumentError(
            f"a tensor of {end - begin} bytes at {begin:#x} lies in no result of the capture"
        )


def fresh_of(captured: Captured | None) -> _core.Fresh:
    """Return what makes new tensors like the results of a capture.

    Raises:
        StateError: The capture was given no results.
    """
    if captured is None or captured.results is None:
        raise StateError("a replay with new results of a graph that was captured without results")
    return captured.results.fresh


def can_be_fresh(tensor: torch.Tensor) -> bool:
    """Return whether dtype, device, sizes and strides suffice to make a tensor like this one."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return False
    if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
        return False
    return _torch.memory_of(tensor) is not None
