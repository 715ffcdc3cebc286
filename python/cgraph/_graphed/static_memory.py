"""Pools and static memory for the captures of a graphed function."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from cgraph import _core, _driver, _torch
from cgraph._captures.last_stream import last_stream
from cgraph._driver import Driver, Handle, Pool
from cgraph._graphed.call import as_argument
from cgraph.graphs import graph_pool_handle

__all__ = ["PoolUse", "StaticMemory", "lock_of"]

# As many as torch has of each priority.
_STREAMS = 32


class PoolUse:
    """The use of one pool of a device, shared by all functions that capture into it.

    Attributes:
        stream: The stream of captures: torch's allocator gives a free block only to the stream that
            it was allocated on.
        last_stream: The stream of the last replay.
        lent: The static results that callers may have.
        users: The captures of these functions.
    """

    def __init__(self, driver: Driver, handle: Handle, stream: Any) -> None:
        self._driver, self._handle = driver, handle
        self.stream = stream
        self.lent = _core.LentResults(_torch.increment_versions)
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()
        self._streams = [self.stream]
        self.last_stream = last_stream(driver)

    def another_stream(self) -> Any:
        """Return a stream for captures that share memory with no other one.

        torch hands out some dozens of streams in turns.
        """
        for _ in range(_STREAMS):
            made = self._driver.new_stream()
            if made not in self._streams:
                break
        self._streams.append(made)
        return made

    def nbytes(self) -> int:
        """Return the device's bytes in the pool."""
        mem_pool = self._driver.mem_pool(self._handle)
        if mem_pool is not None:
            return mem_pool.stats()["mapped"]
        is_torch = self._driver.device_type == "cuda"
        return self._driver.pool_state(self._handle).reserved if is_torch else 0

    @classmethod
    def of(cls, driver: Driver, pool: Pool) -> PoolUse:
        """Return the use of a pool on the current device, made by the first function."""
        handle = _driver.token(pool)
        name = *_number(driver), *handle
        use = _uses.get(name)
        if use is None:
            owner = driver.mem_pool(handle) or pool
            streams = {} if isinstance(owner, tuple) else _streams.setdefault(owner, {})
            stream = streams.get(_number(driver)) or driver.new_stream()
            stream = streams.setdefault(_number(driver), stream)
            # Another thread may make one meanwhile.
            use = _uses.setdefault(name, cls(driver, handle, stream))
        return use


class StaticMemory:
    """Pools and static memory of one function.

    Args:
        pool: The pool of captures without gradients, if one is given.
    """

    def __init__(self, pool: Pool | None) -> None:
        self._given = pool
        # The pool of captures without gradients, by device or simulator.
        self._pools: dict[tuple[int, int], tuple[Any, PoolUse]] = {}
        self._own_streams: dict[tuple[int, int], Any] = {}
        self._buffers: dict[Hashable, _torch.WeakStorage] = {}

    def own_stream(self, driver: Driver, use: PoolUse) -> Any:
        """Return the function's stream for captures that share memory with no other function's."""
        number = _number(driver)
        if number not in self._own_streams:
            self._own_streams[number] = use.another_stream()
        return self._own_streams[number]

    def pool(self, driver: Driver, needs_grad: bool) -> tuple[Any, PoolUse]:
        """Return the pool for a capture, and the use of the pool that the function's calls share.

        Captures without gradients share it. One with gradients has a pool of its own: tensors saved
        by a forward pass must outlast the replays of other keys until the backward pass.
        """
        number = _number(driver)
        if number not in self._pools:
            pool = graph_pool_handle() if self._given is None else self._given
            self._pools[number] = pool, PoolUse.of(driver, pool)
        pool, use = self._pools[number]
        return (graph_pool_handle() if needs_grad else pool), use

    def statics(
        self, driver: Driver, tensors: Sequence[torch.Tensor], is_shared: bool
    ) -> list[torch.Tensor]:
        """Return the tensors that a graph reads instead of others, with the same contents.

        Graphs of fewer rows read the first rows of the same memory, except those with gradients: a
        backward pass may come after calls of other keys, and reads the forward pass's inputs.
        """
        number = _number(driver)
        is_inference = torch.is_inference_mode_enabled()
        found = []
        for place, tensor in enumerate(tensors):
            shares = is_shared and tensor.dim() > 0 and tensor.is_contiguous()
            form = (place, number, tensor.dtype, tensor.device, tensor.shape[1:], is_inference)
            static = self._first_rows(form, tensor) if shares else None
            if static is None:
                static = tensor.detach().clone()
                if shares:
                    self._share(form, static)
            else:
                static.copy_(tensor)
            needs_grad = tensor.requires_grad and (tensor.is_leaf or not is_shared)
            found.append(as_argument(static, tensor, needs_grad))
        return found

    def pool_bytes(self) -> int:
        """Return the device's bytes in the pool of captures without gradients."""
        return sum(use.nbytes() for _, use in list(self._pools.values()))

    def clear(self) -> None:
        """Forget memory, and pools that were not given: theirs goes."""
        self._buffers.clear()
        if self._given is None:
            self._pools.clear()
            self._own_streams.clear()

    def _first_rows(self, form: Hashable, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return as many rows of shared memory as a tensor has; None if there are fewer."""
        known = self._buffers.get(form)
        whole = None if known is None else known.get()
        if whole is None or whole.nbytes() < tensor.nbytes:
            return None
        return tensor.new_empty(0).set_(whole, 0, tensor.shape, tensor.stride())

    def _share(self, form: Hashable, static: torch.Tensor) -> None:
        """Share the memory with tensors of fewer rows as long as it is alive."""
        self._buffers = {name: one for name, one in self._buffers.items() if one.get() is not None}
        self._buffers[form] = _torch.WeakStorage(static)


def lock_of(pool: Pool | None) -> _core.FunctionLock:
    """Return the lock of a function's replays: one for all that share a pool, and so its memory.

    Raises:
        ArgumentError: It is none.
    """
    if pool is None:
        return _core.FunctionLock()
    return _locks.setdefault(_driver.token(pool), _core.FunctionLock())


_locks: weakref.WeakValueDictionary[Handle, _core.FunctionLock] = weakref.WeakValueDictionary()
_uses: weakref.WeakValueDictionary[tuple[int, ...], PoolUse] = weakref.WeakValueDictionary()
# The streams of living pools: a later function can have blocks of the same stream only.
_streams: weakref.WeakKeyDictionary[Any, dict[tuple[int, int], Any]] = weakref.WeakKeyDictionary()


def _number(driver: Driver) -> tuple[int, int]:
    """Return a number that identifies the current device of the driver, which is in force."""
    is_gpu = driver.device_type == "cuda"
    return _driver.number(), torch.cuda.current_device() if is_gpu else 0
