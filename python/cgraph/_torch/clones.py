"""Clones of tensors that share memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cgraph._torch.tensors import lazy_view, memory_of, span_of

__all__ = ["clone_together"]

# No element of any dtype begins between two multiples of it, in bytes.
_LARGEST_ELEMENT = 16


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
            groups.setdefault(memory.data_ptr(), []).append(place)
    for start, places in groups.items():
        tensors = [values[place] for place in places]
        if len(places) == 1 and _is_dense(tensors[0]):
            found[places[0]] = tensors[0].clone()
            continue
        begin = min(span_of(one)[0] for one in tensors) - start
        begin -= begin % _LARGEST_ELEMENT
        end = max(span_of(one)[1] for one in tensors) - start
        flat = torch.empty(0, dtype=torch.uint8, device=tensors[0].device)
        flat.set_(tensors[0].untyped_storage(), begin, (end - begin,), (1,))
        copy = flat.clone().untyped_storage()
        for place, one in zip(places, tensors, strict=True):
            offset = one.storage_offset() - begin // one.element_size()
            made = torch.empty(0, dtype=one.dtype, device=one.device)
            made.set_(copy, offset, one.shape, one.stride())
            found[place] = lazy_view(made, one.is_conj(), one.is_neg())
    return found


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether elements fill memory without gaps, each with a place of its own."""
    end = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != end:
            return False
        end *= size
    return True
