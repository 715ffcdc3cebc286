"""Where torch's tensors keep what they are, which takes least time to look at in each call."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["tensor_fields"]

# The versions whose tensors have been looked at.
_FIRST, _BEYOND = (2, 8), (2, 12)

# So many words of a ``c10::TensorImpl`` are searched for its extents, and of a storage for its
# data: both are larger in all these versions.
_WORDS_OF_TENSOR, _WORDS_OF_STORAGE = 16, 6
_WORD = 8
# Extents of up to so many dimensions are in the tensor itself.
_MOST_DIMENSIONS = 5


@functools.cache
def tensor_fields() -> dict[str, int]:
    """The offsets in bytes of fields of ``c10::TensorImpl`` and of its storage, and its vtable.

    Each was found by comparing with what torch says of several tensors. Empty for other versions of
    torch, or if one is elsewhere: then torch's own functions are asked, which takes longer. To be
    called outside of all modes.
    """
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if not _FIRST <= version < _BEYOND:
        return {}
    with torch.no_grad():
        samples = list(_samples())
        fields = _fields_of(samples[0])
        agree = bool(fields) and all(_agree(fields, sample) for sample in samples)
    return fields if agree else {}


def _samples() -> Iterator[torch.Tensor]:
    """Tensors that differ in all that is looked at; the first one has no number twice."""
    floats = torch.empty(100, device="cpu")
    yield floats.as_strided((2, 3), (17, 5), 11)
    yield floats
    yield floats[3]
    yield torch.empty(2, 1, 3, 4, 5, dtype=torch.int64, device="cpu").transpose(1, 3)
    # A storage whose memory is somebody else's.
    yield torch.frombuffer(bytearray(8), dtype=torch.uint8)[2:]
    yield torch.nn.Parameter(floats[7:])
    yield torch.empty(4, dtype=torch.complex64, device="cpu").conj()


def _fields_of(tensor: torch.Tensor) -> dict[str, int]:
    """Where the fields of a tensor seem to be."""
    words = _words(tensor._cdata, _WORDS_OF_TENSOR)
    storage = tensor.untyped_storage()
    extents = [tensor.dim(), *tensor.shape]
    places = [i for i in range(len(words)) if words[i : i + len(extents)] == extents]
    owners = [i for i, word in enumerate(words) if word == storage._cdata]
    data = [
        i
        for i, word in enumerate(_words(storage._cdata, _WORDS_OF_STORAGE))
        if word == storage.data_ptr()
    ]
    if len(places) != 1 or len(owners) != 1 or not data:
        return {}
    [dimensions], [owner] = places, owners
    sizes = dimensions + 1
    offset = sizes + 2 * _MOST_DIMENSIONS
    fields = {
        "storage": owner,
        "autograd": owner + 1,
        "extra": owner + 2,
        "dim": dimensions,
        "sizes": sizes,
        "strides": sizes + _MOST_DIMENSIONS,
        "offset": offset,
        "kind": offset + 2,
        "keys": offset + 3,
        # The first one: the next may be what frees the memory.
        "data": data[0],
    }
    found = {name: place * _WORD for name, place in fields.items()}
    return {**found, "vtable": words[0]}


def _agree(fields: dict[str, int], tensor: torch.Tensor) -> bool:
    """Whether the fields of a tensor say of it what torch says."""

    def at(name: str) -> int:
        return _word(tensor._cdata + fields[name])

    def many(name: str) -> list[int]:
        first = tensor._cdata + fields[name]
        return _words(first, tensor.dim())

    storage = tensor.untyped_storage()
    # c10::ScalarType, then c10::Device with its index, and whether there is one.
    kind = _NUMBERS[tensor.dtype] | 0xFF << 24 | 1 << 32
    return (
        _word(tensor._cdata) == fields["vtable"]
        and at("storage") == storage._cdata
        and _word(storage._cdata + fields["data"]) == storage.data_ptr()
        and (at("autograd") != 0) == (tensor.requires_grad or tensor._is_view())
        and at("extra") == 0
        and at("dim") == tensor.dim()
        and many("sizes") == list(tensor.shape)
        and many("strides") == list(tensor.stride())
        and at("offset") == tensor.storage_offset()
        and at("kind") & 0xFF_FFFF_FFFF == kind
        and at("keys") == _keys_of(tensor)
    )


_NUMBERS = {torch.uint8: 0, torch.int64: 4, torch.float32: 6, torch.complex64: 9}


def _keys_of(tensor: torch.Tensor) -> int:
    """The dispatch keys of a tensor, a bit for each."""
    keys: Any = torch._C._dispatch_keys(tensor)
    return int(keys.raw_repr())


def _words(address: int, count: int) -> list[int]:
    """So many words of memory."""
    return list((ctypes.c_uint64 * count).from_address(address))


def _word(address: int) -> int:
    return _words(address, 1)[0]
