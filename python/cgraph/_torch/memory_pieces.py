"""Pieces of memory that several tensors lie in, and clones of these tensors together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cgraph._torch.tensors import lazy_view, memory_of, span_of, storage_id

__all__ = ["clone_together", "piece_of"]

# For tensors that share memory: no element of any dtype begins between two multiples of it.
_LARGEST_ELEMENT = 16


def piece_of(group: Sequence[torch.Tensor]) -> tuple[int, int]:
    """Return address and bytes of the memory that some tensors of one storage lie in."""
    spans = [span_of(tensor) for tensor in group if tensor.numel()]
    if not spans:
        return 0, 0
    begin, end = min(one[0] for one in spans), max(one[1] for one in spans)
    if len(group) > 1:
        storage = group[0].untyped_storage().data_ptr()
        begin -= (begin - storage) % _LARGEST_ELEMENT
    return begin, end - begin


def clone_together(values: Sequence[Any]) -> list[Any]:
    """Return clones of tensors, which share memory as these do, and other values as they are.

    Strides stay. Memory between the elements of all is cloned, too, but none before and behind.

    Args:
        values: The tensors and other values.
    """
    found = list(values)
    groups: dict[int, list[int]] = {}
    for place, one in enumerate(values):
        if not isinstance(one, torch.Tensor):
            continue
        memory = memory_of(one)
        if memory is None or one.numel() == 0:
            found[place] = one.clone()
        else:
            groups.setdefault(storage_id(memory), []).append(place)
    for places in groups.values():
        clones = _clones([values[place] for place in places])
        for place, one in zip(places, clones, strict=True):
            found[place] = one
    return found


def _clones(group: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return clones of tensors of one storage."""
    first = group[0]
    begin, nbytes = piece_of(group)
    if len(group) == 1 and nbytes == first.numel() * first.element_size():
        return [first.clone()]
    begin -= first.untyped_storage().data_ptr()
    flat = torch.empty(0, dtype=torch.uint8, device=first.device)
    copy = flat.set_(first.untyped_storage(), begin, (nbytes,), (1,)).clone().untyped_storage()
    clones = []
    for one in group:
        made = torch.empty(0, dtype=one.dtype, device=one.device)
        offset = one.storage_offset() - begin // one.element_size()
        made.set_(copy, offset, one.shape, one.stride())
        clones.append(lazy_view(made, one.is_conj(), one.is_neg()))
    return clones
