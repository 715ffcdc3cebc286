"""Memory by its name: the storages of named tensors, and the segments of pools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeAlias

import torch

from cgraph._saved.notes import TensorNote
from cgraph._text import shown
from cgraph.errors import ArgumentError

__all__ = [
    "OFFSET",
    "SEED",
    "WORD",
    "Given",
    "Memory",
    "Named",
    "Place",
    "named_tensors",
    "note_of",
    "require_like",
    "tensor_over",
]

Given: TypeAlias = "Mapping[str, torch.Tensor | torch.nn.Module]"
"""Tensors and modules by their names."""

Named: TypeAlias = "tuple[str, int, int]"
"""A name, an address and bytes."""

Place: TypeAlias = "tuple[str, int]"
"""The name of memory, and an offset there in bytes."""


WORD = 8
"""Bytes of the seed and of the offset of a random state, which are memory as well."""
SEED, OFFSET = "<seed>", "<offset>"


class Memory:
    """Ranges of device memory by their names, and what keeps them alive."""

    def __init__(self) -> None:
        self.ranges: list[Named] = []
        self.owners: list[object] = []

    def add(self, name: str, address: int, size: int, owner: object) -> None:
        """Add a range, unless it is empty."""
        if size:
            self.ranges.append((name, address, size))
        self.owners.append(owner)

    def find(self, address: int) -> tuple[str, int] | None:
        """Return the name of the range that an address lies in, and the offset there."""
        for name, start, size in self.ranges:
            if start <= address < start + size:
                return name, address - start
        return None


def named_tensors(names: Given, ordinal: int) -> dict[str, torch.Tensor]:
    """Return all tensors of a GPU by name: a module's parameters and buffers as ``module.name``.

    Those of a module that lie elsewhere are left out: no kernel reads them.

    Raises:
        ArgumentError: A value is neither a tensor nor a module, or a tensor has no memory there.
    """
    found: dict[str, torch.Tensor] = {}
    for name, value in names.items():
        if isinstance(value, torch.nn.Module):
            inner = [*value.named_parameters(), *value.named_buffers()]
            on_gpu = {f"{name}.{key}": one for key, one in inner if one.device.type == "cuda"}
            found.update(on_gpu)
        elif isinstance(value, torch.Tensor):
            found[name] = value
        else:
            raise ArgumentError(f"names[{name!r}] is {shown(value)}, expected a tensor or a module")
    for name, tensor in found.items():
        if tensor.device != torch.device("cuda", ordinal) or tensor.layout != torch.strided:
            raise ArgumentError(
                f"{name} is a {tensor.layout} tensor on {tensor.device}, expected a strided one on"
                f" cuda:{ordinal}, where the graphs are"
            )
        try:
            tensor.untyped_storage().data_ptr()
        except RuntimeError as error:
            raise ArgumentError(
                f"{name} is a {type(tensor).__name__} without memory of its own, expected the"
                " tensors that it is made of, each with a name"
            ) from error
    return found


def note_of(tensor: torch.Tensor, place: Place, *, is_given: bool) -> TensorNote:
    """Describe a tensor whose storage begins at a place in named memory."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    size, (memory, begin) = tensor.untyped_storage().nbytes(), place
    offset = begin + int(tensor.storage_offset()) * tensor.element_size()
    return TensorNote(memory, offset, begin, is_given, dtype, shape, strides, size)


def require_like(name: str, tensor: torch.Tensor, note: TensorNote) -> None:
    """Raise unless a tensor is like the one that was saved; its storage may be larger."""
    now = note_of(tensor, (note.memory, 0), is_given=True)
    if now.size < note.size or replace(now, size=note.size) != note:
        raise ArgumentError(f"{name} is {_in_words(now)}, expected {_in_words(note)}, as saved")


def tensor_over(storage: torch.UntypedStorage, note: TensorNote) -> torch.Tensor:
    """Return a tensor over a storage like its own."""
    dtype: torch.dtype = getattr(torch, note.dtype)
    tensor = torch.empty(0, dtype=dtype, device=storage.device)
    offset = (note.offset - note.begin) // dtype.itemsize
    return tensor.set_(storage, offset, note.shape, note.strides)


def _in_words(note: TensorNote) -> str:
    place = f"byte {note.offset} of a storage of {note.size} bytes"
    return f"{note.dtype}{list(note.shape)} with strides {list(note.strides)} at {place}"
