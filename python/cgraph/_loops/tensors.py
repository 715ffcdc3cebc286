"""The tensors of a loop: its state, and what each step publishes to the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cgraph import _driver
from cgraph.errors import ArgumentError

__all__ = ["Emitted", "require_state", "until_of"]

_MOST_EMITTED = 8


def require_state(state: Sequence[torch.Tensor], device_type: str) -> None:
    """Raise unless all are tensors that a graph can work on where they lie."""
    for place, one in enumerate(state):
        if not isinstance(one, torch.Tensor) or one.device.type != device_type:
            where = one.device if isinstance(one, torch.Tensor) else type(one).__name__
            raise ArgumentError(
                f"state {place} is on {where}, expected a tensor on {device_type}: what is no"
                " tensor belongs into the step's closure"
            )
        if one.requires_grad:
            raise ArgumentError(f"state {place} requires a gradient, expected none: detach it")


def until_of(tensor: torch.Tensor | None) -> tuple[int, int, int] | None:
    """Return address, elements and bytes of each of the tensor that ends a loop."""
    if tensor is None:
        return None
    if tensor.is_floating_point() or tensor.is_complex() or not tensor.is_contiguous():
        raise ArgumentError(
            f"until is {tensor.dtype}, expected contiguous booleans or integers: compare in the"
            " step"
        )
    if tensor.numel() == 0:
        raise ArgumentError("until has no elements, expected at least one")
    return tensor.data_ptr(), tensor.numel(), tensor.element_size()


class Emitted:
    """The tensors that steps publish, and the memory of the host for all steps.

    Attributes:
        tensors: What is published.
        header: Two words: how many steps are there, and whether the loop is to stop.
        ring: The bytes of each step, one after the other.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], steps: int) -> None:
        if len(tensors) > _MOST_EMITTED:
            raise ArgumentError(f"emit has {len(tensors)} tensors, expected at most 8: join some")
        for one in tensors:
            if not one.is_contiguous():
                raise ArgumentError(f"emit has a tensor with strides {one.stride()}, expected none")
        self.tensors = list(tensors)
        pins = _driver.current().device_type == "cuda"
        self.header = torch.zeros(2, dtype=torch.int32, pin_memory=pins)
        self._bytes = sum(one.nbytes for one in tensors)
        self.ring = torch.empty(max(1, steps * self._bytes), dtype=torch.uint8, pin_memory=pins)

    def pieces(self) -> list[tuple[int, int]]:
        """Return address and bytes of each tensor."""
        return [(one.data_ptr(), one.nbytes) for one in self.tensors]

    def values(self, step: int) -> list[torch.Tensor]:
        """Return what a step has published, in memory of the caller's own."""
        begin, found = step * self._bytes, []
        for one in self.tensors:
            part = self.ring[begin : begin + one.nbytes].clone()
            found.append(part.view(one.dtype).view(one.shape))
            begin += one.nbytes
        return found
