"""The tensors of a loop: its state, what ends it, and what each step publishes to the host."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cgraph import _driver, _torch
from cgraph._text import plural
from cgraph.errors import ArgumentError, OutOfMemoryError

__all__ = ["Emitted", "Flags", "in_place", "require_state"]

_MOST_EMITTED = 8
# A multiple of what kernels write at once.
_HEADER_BYTES = 64


def require_state(state: Sequence[torch.Tensor]) -> None:
    """Raise unless all are tensors that a graph can work on where they lie."""
    for place, one in enumerate(state):
        _require_on_device(one, f"state {place}")
        if one.requires_grad:
            raise ArgumentError(f"state {place} requires a gradient, expected none: detach it")


def in_place(step: Callable[..., Any]) -> Callable[..., None]:
    """Return a step whose results become the state."""

    def stepped(*state: torch.Tensor) -> None:
        found = step(*state)
        if found is None:
            return
        new = [found] if isinstance(found, torch.Tensor) else found
        if not isinstance(new, tuple | list) or len(new) != len(state):
            what = (
                plural(len(new), "value") if isinstance(new, tuple | list) else type(new).__name__
            )
            raise ArgumentError(
                f"the step returned {what}, expected None or the next"
                f" {plural(len(state), 'tensor')} of the state"
            )
        for place, pair in enumerate(zip(new, state, strict=True)):
            if _form(pair[0]) != _form(pair[1]):
                raise ArgumentError(
                    f"the step returned {_form(pair[0])} for state {place}, expected"
                    f" {_form(pair[1])}"
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


def _require_on_device(one: object, name: str) -> None:
    """Raise unless it is a tensor on the current device of the driver."""
    kind = _driver.current().device_type
    if not isinstance(one, torch.Tensor):
        raise ArgumentError(
            f"{name} is of {type(one).__name__}, expected a tensor on {kind}: give the tensors of a"
            " list one by one; what is no tensor belongs into the step's closure"
        )
    if one.device.type != kind:
        raise ArgumentError(f"{name} is on {one.device}, expected a tensor on {kind}")
    if kind == "cuda" and one.device.index != torch.cuda.current_device():
        raise ArgumentError(
            f"{name} is on {one.device}, expected the current device,"
            f" cuda:{torch.cuda.current_device()}: make it current with torch.cuda.device()"
        )


def _form(one: object) -> str:
    """Return what must be alike in a tensor of the state and the next one."""
    if not isinstance(one, torch.Tensor):
        return type(one).__name__
    return f"{one.dtype}{list(one.shape)} on {one.device}"


class Flags:
    """A tensor that counts once all of its elements are other than zero.

    Attributes:
        tensor: The tensor.
        address: Its address, the number of its elements, and the bytes of each.
    """

    def __init__(self, tensor: torch.Tensor, name: str) -> None:
        _require_on_device(tensor, name)
        if tensor.is_floating_point() or tensor.is_complex():
            raise ArgumentError(
                f"{name} is of {tensor.dtype}, expected booleans or integers: compare in the step"
            )
        _require_contiguous(tensor, name)
        if tensor.numel() == 0:
            raise ArgumentError(f"{name} has no elements, expected at least one")
        self.tensor = tensor
        self.address = tensor.data_ptr(), tensor.numel(), tensor.element_size()


class Header(ctypes.Structure):
    """The words of the host beside a loop, as in ``looped/loop.cu``.

    Attributes:
        steps: How many steps are there.
        stop: Other than zero if the loop is to end after the present iteration.
        offsets: Of the random states, after the last step.
    """

    steps: int
    stop: int
    offsets: Sequence[int]
    _fields_ = (
        ("steps", ctypes.c_uint32),
        ("stop", ctypes.c_uint32),
        ("offsets", ctypes.c_uint64 * 4),
    )


class Emitted:
    """The memory of the host for what steps publish.

    Args:
        tensors: The tensors that each step publishes; no reference to them is kept.
        steps: The most steps.

    Attributes:
        memory: The header, and then the bytes of each step, one after the other.
        header: The header.
        pieces: Address and bytes of each tensor.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], steps: int) -> None:
        if len(tensors) > _MOST_EMITTED:
            raise ArgumentError(f"emit has {len(tensors)} tensors, expected at most 8: join some")
        for place, one in enumerate(tensors):
            name = f"the published tensor {place}"
            _require_on_device(one, name)
            _require_contiguous(one, name)
            if one.is_conj() or one.is_neg():
                raise ArgumentError(
                    f"{name} is a conjugate or negative view, whose memory has other values: copy"
                    " it in the step"
                )
        self.pieces = [(one.data_ptr(), one.nbytes) for one in tensors]
        self._forms = [(one.dtype, one.shape, one.nbytes) for one in tensors]
        size = sum(one.nbytes for one in tensors)
        pins = _driver.current().device_type == "cuda"
        try:
            # Whatever the modes of the first run, later ones write to it.
            with torch.inference_mode(False):
                self.memory = torch.empty(
                    _HEADER_BYTES + steps * size, dtype=torch.uint8, device="cpu", pin_memory=pins
                )
        except RuntimeError as error:
            raise OutOfMemoryError(
                f"a run publishes {size} bytes in each of {steps} steps, for which the host has no"
                f" memory: publish less, or take fewer steps a run ({error})"
            ) from error
        self.header = Header.from_address(self.memory.data_ptr())
        self._ring = self.memory[_HEADER_BYTES:].view(steps, size)

    @property
    def addresses(self) -> tuple[int, int]:
        """The addresses of the header, and of what the first step publishes."""
        begin = self.memory.data_ptr()
        return begin, begin + _HEADER_BYTES

    def values(self, begin: int, end: int) -> list[tuple[torch.Tensor, ...]]:
        """Return what each of some steps has published, in memory of the caller's own."""
        at, found = 0, []
        for dtype, shape, size in self._forms:
            part = self._ring[begin:end, at : at + size].clone(
                memory_format=torch.contiguous_format
            )
            found.append(part.view(-1).view(dtype).view(end - begin, *shape).unbind())
            at += size
        return [*zip(*found, strict=True)]


def _require_contiguous(one: torch.Tensor, name: str) -> None:
    if not one.is_contiguous():
        raise ArgumentError(
            f"{name} has the strides {one.stride()}, expected a contiguous tensor: copy it in the"
            " step"
        )
