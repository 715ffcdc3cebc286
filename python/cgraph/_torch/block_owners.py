"""Storages and the blocks of torch's allocator that they own."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cgraph import _core
from cgraph._driver import Handle
from cgraph._torch.private_names import of_torch, torch_version
from cgraph._torch.tensors import WeakStorage, without_modes

__all__ = [
    "allocator_state",
    "count_uses",
    "counts_uses_natively",
    "give_memory",
    "give_up_block",
    "gives_memory",
    "make_stale",
    "restore_allocator_state",
    "set_stale",
]


def allocator_state(ordinal: int, handle: Handle) -> Any:
    """Return which blocks of a pool are in use, for :func:`restore_allocator_state`."""
    return of_torch._cuda_getCheckpointState(ordinal, (handle[0], handle[1]))


def restore_allocator_state(
    ordinal: int, state: Any, live: Sequence[WeakStorage], dead: Sequence[int]
) -> None:
    """Make the blocks in use of a pool those of a state again, where none is in use now.

    Args:
        ordinal: The device's number.
        state: The state.
        live: Storages over blocks of the state, which own these from here on.
        dead: Addresses of blocks of the state that nobody needs: they are free.
    """
    pointers = [storage.pointer for storage in live]
    of_torch._cuda_setCheckpointPoolState(ordinal, state, [], pointers)
    for address in dead:
        of_torch._cuda_cudaCachingAllocator_raw_delete(address)


def give_up_block(storage: WeakStorage) -> None:
    """Give the block of a living storage back to the allocator: others may get it."""
    of_torch._free_And_Remove_DeleterFn(storage.pointer)


set_stale = of_torch.function("_set_storage_data_ptr_access_error_msg")
"""Let each access to the memory of a storage, by the address of the object, raise a text."""


def make_stale(storage: WeakStorage, message: str) -> None:
    """Let each access to the memory of a living storage raise a RuntimeError."""
    set_stale(storage.pointer, message)


def gives_memory() -> bool:
    """Return whether :func:`give_memory` can give a storage other memory in this torch."""
    return hasattr(torch.UntypedStorage, "_swap_data_ptr_") or _exchanges_memory()


def give_memory(storage: WeakStorage) -> None:
    """Give a storage, if it lives, memory of its own with the same contents.

    Tensors over it do not notice. Its memory before goes.
    """
    living = storage.get()
    if living is None:
        return
    with without_modes(), torch.no_grad(), torch.inference_mode(False):
        nbytes, device = living.nbytes(), living.device
        before = torch.empty(0, dtype=torch.uint8, device=device).set_(living, 0, (nbytes,), (1,))
        copy = torch.empty(nbytes, dtype=torch.uint8, device=device)
        copy.copy_(before)
    _exchange(living, copy.untyped_storage())


def _exchange(one: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    if hasattr(one, "_swap_data_ptr_"):
        one._swap_data_ptr_(other)
    else:
        _core.exchange_memory(one._cdata, other._cdata)


@functools.cache
def _exchanges_memory() -> bool:
    """Return whether the memory of storages is where known versions have it."""
    if not counts_uses_natively():
        return False
    with without_modes(), torch.inference_mode(False):
        buffer = bytearray(b"12345678")
        lent, own = torch.frombuffer(buffer, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
        first, second = lent.untyped_storage(), own.untyped_storage()
        words = [(ctypes.c_uint64 * 7).from_address(one._cdata) for one in (first, second)]
        memory = [one.data_ptr() for one in (first, second)]
        # The words that say how memory is freed are between where it is, and its bytes and device.
        places = [(one[2], one[6]) for one in words]
        if places != [(address, 8) for address in memory] or words[0][3:5] == words[1][3:5]:
            return False
        _core.exchange_memory(first._cdata, second._cdata)
        agrees = own.tolist() == list(buffer) and lent.tolist() == [0] * 8
        held = sys.getrefcount(buffer)
        del own, second, words
        return agrees and sys.getrefcount(buffer) == held - 1


count_uses: Callable[[int], int] = of_torch.function("_storage_Use_Count")
"""Count the references to a storage, by the address of the object; 0 if the storage is gone.

The one of Python's object for it counts where torch keeps that.
"""


_FIRST, _BEYOND = (2, 8), (2, 12)
# ``c10::intrusive_ptr_target`` has the count behind the table of its class.
_COUNT = 8


@functools.cache
def counts_uses_natively() -> bool:
    """Return whether storages have the number of references where known versions have it."""
    if not _FIRST <= torch_version() < _BEYOND:
        return False
    with without_modes(), torch.inference_mode(False):
        sample = torch.empty(3, device="cpu")
        storage = WeakStorage(sample)
        aliases: list[torch.Tensor] = []
        for _ in range(3):
            if _count_at(storage) != count_uses(storage.pointer):
                return False
            aliases.append(sample.detach())
        aliases.clear()
        agrees = _count_at(storage) == count_uses(storage.pointer)
        del sample
        return agrees and _count_at(storage) == count_uses(storage.pointer) == 0


def _count_at(storage: WeakStorage) -> int:
    return ctypes.c_uint32.from_address(storage.pointer + _COUNT).value
