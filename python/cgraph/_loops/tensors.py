"""The tensors of a loop: its state, what ends it, and what each step publishes to the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cgraph import _driver, _torch
from cgraph.errors import ArgumentError

__all__ = ["Emitted", "Flags", "in_place", "require_state"]

_MOST_EMITTED = 8


def require_state(state: Sequence[torch.Tensor]) -> None:
    """Raise unless all are tensors that a graph can work on where they lie."""
    driver = _driver.current()
    for place, one in enumerate(state):
        if not isinstance(one, torch.Tensor) or one.device.type != driver.device_type:
            where = one.device if isinstance(one, torch.Tensor) else type(one).__name__
            raise ArgumentError(
                f"state {place} is on {where}, expected a tensor on {driver.device_type}: what is"
                " no tensor belongs into the step's closure"
            )
        if one.device.type == "cuda" and one.device.index != torch.cuda.current_device():
            raise ArgumentError(
                f"state {place} is on {one.device}, expected the current device,"
                f" cuda:{torch.cuda.current_device()}: make it current with torch.cuda.device()"
            )
        if one.requires_grad:
            raise ArgumentError(f"state {place} requires a gradient, expected none: detach it")


def in_place(step: Callable[..., Any]) -> Callable[..., None]:
    """Return a step whose results become the state."""

    def stepped(*state: torch.Tensor) -> None:
        found = step(*state)
        if found is None:
            return
        new = [found] if isinstance(found, torch.Tensor) else list(found)
        if len(new) != len(state):
            raise ArgumentError(
                f"the step returned {len(new)} tensors, expected None or the next {len(state)}"
            )
        own = {_torch.storage_id(one.untyped_storage()) for one in state}
        pairs = [(one, other) for one, other in zip(state, new, strict=True) if one is not other]
        # Of results that lie in the state, another one may be written first.
        pairs = [
            (one, other.clone() if _torch.storage_id(other.untyped_storage()) in own else other)
            for one, other in pairs
        ]
        for one, other in pairs:
            one.copy_(other)

    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(stepped, name, getattr(step, name, getattr(type(step), name, None)))
    stepped.__wrapped__ = step  # type: ignore[attr-defined]
    return stepped


class Flags:
    """A tensor that counts once all of its elements are other than zero.

    Attributes:
        tensor: The tensor.
        address: Its address, the number of its elements, and the bytes of each.
    """

    def __init__(self, tensor: torch.Tensor, *, name: str = "until") -> None:
        if tensor.is_floating_point() or tensor.is_complex() or not tensor.is_contiguous():
            raise ArgumentError(
                f"{name} is {tensor.dtype}, expected contiguous booleans or integers: compare in"
                " the step"
            )
        if tensor.numel() == 0:
            raise ArgumentError(f"{name} has no elements, expected at least one")
        self.tensor = tensor
        self.address = tensor.data_ptr(), tensor.numel(), tensor.element_size()


class Emitted:
    """The tensors that steps publish, and the memory of the host for all steps.

    Attributes:
        tensors: What is published.
        header: Two words: how many steps are there, and whether the loop is to stop; then four of
            eight bytes, for the offsets of random states after the last step.
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
        self.header = torch.zeros(10, dtype=torch.int32, pin_memory=pins)
        size = max(1, sum(one.nbytes for one in tensors))
        self.ring = torch.empty(steps, size, dtype=torch.uint8, pin_memory=pins)

    @property
    def offsets(self) -> list[int]:
        """The offsets of random states after the last step."""
        return [int(one) for one in self.header[2:].view(torch.int64)]

    def pieces(self) -> list[tuple[int, int]]:
        """Return address and bytes of each tensor."""
        return [(one.data_ptr(), one.nbytes) for one in self.tensors]

    def values(self, begin: int, end: int) -> list[tuple[torch.Tensor, ...]]:
        """Return what each of some steps has published, in memory of the caller's own."""
        at, found = 0, []
        for one in self.tensors:
            part = self.ring[begin:end, at : at + one.nbytes].clone(
                memory_format=torch.contiguous_format
            )
            found.append(part.view(-1).view(one.dtype).view(end - begin, *one.shape).unbind())
            at += one.nbytes
        return [*zip(*found, strict=True)]
