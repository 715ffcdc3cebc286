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
from cgraph._torch.private_names import lacks, of_torch, torch_version
from cgraph._torch.tensors import WeakStorage, copy_each, without_modes

__all__ = [
    "allocator_state",
    "copied_memory",
    "count_uses",
    "counts_uses_natively",
    "exchange",
    "exchanges_natively",
    "hand_over",
    "make_stale",
    "no_memory",
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


set_stale = of_torch.function("_set_storage_data_ptr_access_error_msg")
"""Let each access to the memory of a storage, by the address of the object, raise a text."""


def make_stale(storage: WeakStorage, message: str) -> None:
    """Let each access to the memory of a living storage raise a RuntimeError."""
    set_stale(storage.pointer, message)


def copied_memory(storages: Sequence[torch.UntypedStorage]) -> list[torch.UntypedStorage]:
    """Return storages with the same contents, copied in as few launches as possible."""
    with without_modes(), torch.no_grad(), torch.inference_mode(False):
        rows = [_bytes_of(one) for one in storages]
        copies = [torch.empty_like(one) for one in rows]
        if copies:
            copy_each(copies, rows)
    return [one.untyped_storage() for one in copies]


def no_memory(device: torch.device) -> torch.UntypedStorage:
    """Return a storage without bytes, which may be resized."""
    with without_modes(), torch.inference_mode(False):
        return torch.empty(0, dtype=torch.uint8, device=device).untyped_storage()


def exchange(one: torch.UntypedStorage, other: torch.UntypedStorage) -> Callable[[], None]:
    """Return what lets two storages exchange their memory, in one call of native code.

    Tensors over them do not notice.

    Raises:
        TorchError: That cannot be done in this torch.
    """
    if hasattr(one, "_swap_data_ptr_"):
        return functools.partial(one._swap_data_ptr_, other)
    if not exchanges_natively():
        raise lacks("torch.UntypedStorage._swap_data_ptr_")
    return functools.partial(_core.exchange_memory, one._cdata, other._cdata)


def hand_over(one: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    """Give a storage the memory of another one, and free its own; an interrupt finds both done.

    Otherwise the traceback of the interrupt would keep a block that nobody knows of.
    """
    _core.call_in_a_row([exchange(one, other), functools.partial(other.resize_, 0)])


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    made = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return made.set_(storage, 0, (storage.nbytes(),), (1,))


@functools.cache
def exchanges_natively() -> bool:
    """Return whether the memory of storages is where known versions have it."""
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
