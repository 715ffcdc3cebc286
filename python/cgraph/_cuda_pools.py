"""Pools of torch's CUDA allocator: those whose segments are cgraph's, and torch's own."""

from __future__ import annotations

import sys
import warnings
import weakref
from typing import Any

import torch

from cgraph import _core, _torch
from cgraph._blocks import addressed
from cgraph._driver import Handle, Pool
from cgraph._footprint import PoolState
from cgraph._source import levels_to_user
from cgraph.errors import ArgumentError, ForeignError, StateError
from cgraph.mempool import MemPool, require_options

__all__ = ["CudaMemPool", "PoolHandle", "all_known", "known", "new_handle", "resolve", "state"]

# Addresses that the pool of one capture reserves at once. There may be thousands of captures, and a
# process has no more than 128 TiB of addresses.
_RANGE_OF_A_CAPTURE = 4 << 30

_known: weakref.WeakValueDictionary[Handle, CudaMemPool] = weakref.WeakValueDictionary()


class CudaMemPool(MemPool, torch.cuda.MemPool):
    """A ``torch.cuda.MemPool`` whose segments are cgraph's.

    Attributes:
        ordinal: The number of its device.
        keepers: What tokens keep it in use with, in torch's eyes.
    """

    _is_made = False

    def __init__(
        self,
        limit: int | None = None,
        base: int | None = None,
        *,
        use_on_oom: bool = False,
        no_split: bool = False,
        range_bytes: int | None = None,
    ) -> None:
        require_options(limit, base)
        if not _torch.has_gpu():
            _core.Device.cuda(0)
        torch.cuda.init()
        self.ordinal = torch.cuda.current_device()
        self._core = _core.Pool(
            _core.Device.cuda(self.ordinal), limit=limit, base=base, range_bytes=range_bytes
        )
        _torch.release_outliving()
        _torch.explain_refusals()
        _torch.watch_routing(_refuse_paused)
        allocator = _torch.allocator(*self._core.functions())
        torch.cuda.MemPool.__init__(self, allocator, use_on_oom, no_split)
        self.keepers: weakref.WeakSet[_torch.PoolKeeper] = weakref.WeakSet()
        _known[self.id] = self
        self._is_made = True

    def __del__(self) -> None:
        """Give back what nobody uses; torch forgets the pool when its cache is emptied."""
        if not self._is_made or sys.is_finalizing():
            return
        # A graph of torch's own may know the pool, and be shared with: then all stays.
        if self.use_count() == 1 + len(self.keepers):
            self._core.vacate([one["address"] for one in self.snapshot() if not _is_used(one)])
        if not self.keepers:
            _torch.outlive(self.ordinal, self.id)

    def snapshot(self, include_traces: bool = True) -> list[dict[str, Any]]:
        """The pool's segments and blocks as torch's allocator knows them.

        Args:
            include_traces: Without meaning: what ``torch.cuda.MemPool`` returns has none.
        """
        return _torch.pool_segments(self.id)


class PoolHandle(tuple[int, int]):
    """A token that keeps its pool alive, so that it can be captured into again and again.

    Attributes:
        keeper: What keeps the pool, from the first capture on.
        ordinal: The number of the device where the pool has memory, from then on.
        mem_pool: The pool, where its segments are cgraph's.
    """

    keeper: _torch.PoolKeeper | None = None
    ordinal: int | None = None
    mem_pool: CudaMemPool | None = None

    def __del__(self) -> None:
        """Let the pool go before its keeper: see :func:`cgraph._torch.outlive`."""
        self.mem_pool = None


def known(handle: Handle) -> CudaMemPool | None:
    """The living pool of a token, if its segments are cgraph's."""
    return _known.get((handle[0], handle[1]))


def _is_used(segment: dict[str, Any]) -> bool:
    return any(state.startswith("active") for _, _, state in addressed(segment))


def all_known() -> list[Handle]:
    """The tokens of the living pools whose segments are cgraph's."""
    return [(handle[0], handle[1]) for handle in _known]


def state(handle: Handle) -> PoolState:
    """The segments of a pool and its blocks in use, as torch's allocator knows them."""
    segments = _torch.pool_segments(handle)
    blocks = [
        (start, size)
        for segment in segments
        for start, size, state in addressed(segment)
        if state.startswith("active")
    ]
    return PoolState([(one["address"], one["total_size"]) for one in segments], blocks)


def new_handle() -> PoolHandle:
    """The token of a new pool: one of cgraph's, wherever torch can have them."""
    if _torch.takes_allocators():
        try:
            return _handle_of(CudaMemPool(range_bytes=_RANGE_OF_A_CAPTURE))
        except StateError as error:
            warnings.warn(
                f"a capture gets a pool of torch's own, which cannot be paused: {error}",
                stacklevel=levels_to_user(),
            )
    return PoolHandle(_torch.new_pool_handle())


def resolve(pool: Pool | None, ordinal: int, side: torch.cuda.Stream) -> PoolHandle:
    """The token of a ``pool`` argument, whose pool is kept from here on.

    Args:
        pool: What the user gave.
        ordinal: The device where the capture is to begin.
        side: A stream that does not capture.
    """
    handle = _handle(pool)
    mem_pool = handle.mem_pool
    home = handle.ordinal if mem_pool is None else mem_pool.ordinal
    if handle is pool and handle.keeper is None and home != ordinal:
        # A token that was asked for elsewhere and is used here first: torch gives it memory here.
        handle.mem_pool = mem_pool = home = None
    if home not in (None, ordinal):
        raise ForeignError(
            f"pool {tuple(handle)} is of cuda:{home}, expected one of cuda:{ordinal}, where the"
            " capture is to begin"
        )
    _refuse_paused(handle)
    if handle.keeper is None:
        handle.keeper = _torch.PoolKeeper((handle[0], handle[1]), side, _owner(pool, mem_pool))
        handle.ordinal = ordinal
        if mem_pool is not None:
            mem_pool.keepers.add(handle.keeper)
    return handle


def _handle(pool: Pool | None) -> PoolHandle:
    if pool is None:
        return new_handle()
    if isinstance(pool, PoolHandle):
        return pool
    if isinstance(pool, torch.cuda.MemPool):
        return _handle_of(pool)
    if getattr(pool, "simulated", False):
        raise ForeignError(f"pool {pool} is of the simulator, expected one of CUDA")
    if isinstance(pool, tuple) and len(pool) == 2 and all(isinstance(half, int) for half in pool):
        if bool(pool[0]) != bool(pool[1]):
            mem_pool = known(pool)
            return PoolHandle(pool) if mem_pool is None else _handle_of(mem_pool)
    raise ArgumentError(
        f"pool is {pool!r}, expected a cgraph.MemPool, a torch.cuda.MemPool, graph_pool_handle() or"
        " other.pool()"
    )


def _handle_of(pool: torch.cuda.MemPool) -> PoolHandle:
    handle = PoolHandle(pool.id)
    handle.mem_pool = pool if isinstance(pool, CudaMemPool) else None
    return handle


def _owner(pool: Pool | None, mem_pool: CudaMemPool | None) -> object:
    return pool if isinstance(pool, torch.cuda.MemPool) else mem_pool


def _refuse_paused(handle: Handle) -> None:
    """Raise if a pool has no memory: torch would give out blocks that lead nowhere."""
    mem_pool = known(handle)
    if mem_pool is not None and mem_pool.is_paused:
        raise StateError(f"{mem_pool!r} has no memory: call its resume() first")
