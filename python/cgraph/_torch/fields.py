"""The fields of torch's tensors in memory, which are fastest to read in each call."""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections.abc import Iterator

import torch

from cgraph import _core
from cgraph._torch.private_names import of_torch, torch_version

__all__ = ["tensor_fields"]

# The headers of the first of these versions, and of the last one, 2.11, were read.
_FIRST, _BEYOND = (2, 8), (2, 12)


@functools.cache
def tensor_fields() -> dict[str, int]:
    """Return the offsets in bytes of fields of ``c10::TensorImpl`` and of its storage.

    They are those where the native half reads. The result also has ``vtable``, and ``guard``, a
    mask for the flag of storages whose memory torch must be asked for. All are compared with
    torch's answers for several tensors. The result is empty for other versions of torch, or if a
    field is elsewhere: then torch's own functions are called, which takes longer. Call it outside
    of all modes.
    """
    is_known = _FIRST <= torch_version() < _BEYOND and hasattr(torch, "_lazy_clone")
    if not (is_known and all(map(of_torch.has, ("_dispatch_keys", "_is_cow_tensor")))):
        return {}
    with torch.no_grad():
        samples = list(_samples())
        [vtable] = _words(samples[0]._cdata, 1)
        fields = {**_core.TensorReader.places(), "vtable": vtable, "guard": _GUARD}
        agree = all(_agree(fields, sample) for sample in samples)
    return fields if agree else {}


def _samples() -> Iterator[torch.Tensor]:
    """Yield tensors with different extents, offsets, dtypes, keys, storages and histories."""
    floats = torch.empty(100, dtype=torch.float32, device="cpu")
    yield floats.as_strided((2, 3), (17, 5), 11)
    yield floats
    yield floats[3]
    yield torch.empty(2, 1, 3, 4, 5, dtype=torch.int64, device="cpu").transpose(1, 3)
    # The memory of this storage belongs to another object.
    yield torch.frombuffer(bytearray(8), dtype=torch.uint8)[2:]
    yield torch.nn.Parameter(floats[7:])
    yield torch.empty(4, dtype=torch.complex64, device="cpu").conj()
    # It shares memory until torch is asked for its address.
    yield torch._lazy_clone(torch.empty_like(floats[:6]))
    with warnings.catch_warnings():
        # Named tensors are experimental, and warn.
        warnings.simplefilter("ignore")
        yield floats[:4].rename("rows")


# ``has_mutable_data_ptr_check_`` among the flags of a storage, each a byte.
_GUARD = 0xFF << 24


def _agree(fields: dict[str, int], tensor: torch.Tensor) -> bool:
    """Return whether the fields of a tensor agree with torch."""
    storage = tensor.untyped_storage()

    def at(name: str) -> int:
        return _words(tensor._cdata + fields[name], 1)[0]

    def many(name: str) -> list[int]:
        return _words(tensor._cdata + fields[name], tensor.dim())

    def in_storage(name: str) -> int:
        return _words(storage._cdata + fields[name], 1)[0]

    # c10::ScalarType, then c10::Device with its index, and a flag for whether there is a device.
    kind = _NUMBERS[tensor.dtype] | 0xFF << 24 | 1 << 32
    is_guarded = of_torch._is_cow_tensor(tensor)
    return (
        _words(tensor._cdata, 1) == [fields["vtable"]]
        and at("storage") == storage._cdata
        and (at("autograd") != 0) == (tensor.requires_grad or tensor._is_view())
        and (at("extra") != 0) == tensor.has_names()
        and at("dim") == tensor.dim()
        and many("sizes") == list(tensor.shape)
        and many("strides") == list(tensor.stride())
        and at("offset") == tensor.storage_offset()
        and at("kind") & 0xFF_FFFF_FFFF == kind
        and at("keys") == of_torch._dispatch_keys(tensor).raw_repr()
        and (in_storage("flags") & fields["guard"] != 0) == is_guarded
        # Asked for last: where the storage is guarded, asking changes it.
        and (is_guarded or in_storage("data") == storage.data_ptr())
    )


_NUMBERS = {torch.uint8: 0, torch.int64: 4, torch.float32: 6, torch.complex64: 9}


def _words(address: int, count: int) -> list[int]:
    """Return ``count`` words of memory."""
    return list((ctypes.c_uint64 * count).from_address(address))
