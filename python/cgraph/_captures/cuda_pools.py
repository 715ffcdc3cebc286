"""Pools of torch's CUDA allocator: those whose segments are cgraph's, and torch's own."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch

from cgraph import _core, _torch
from cgraph._captures.blocks import addressed
from cgraph._captures.footprint import PoolState, in_blocks
from cgraph._driver import Handle, Pool
from cgraph._reason import Reason
from cgraph.causes import Cause
from cgraph.errors import ArgumentError, CgraphWarning, ForeignError, StateError, TorchError
from cgraph.mempool import MemPool, require_options

__all__ = [
    "CudaMemPool",
    "PoolHandle",
    "all_known",
    "count",
    "has",
    "known",
    "new_handle",
    "poison",
    "resolve",
    "state",
]

# Addresses that the pool of one capture reserves at once. There may be thousands of captures, and a
# process has no more than 128 TiB of addresses.
_RANGE_OF_A_CAPTURE = 4 << 30

_keepers: weakref.WeakValueDictionary[tuple[int, ...], _torch.PoolKeeper]
_keepers = weakref.WeakValueDictionary()
_known: weakref.WeakValueDictionary[Handle, CudaMemPool] = weakref.WeakValueDictionary()


class CudaMemPool(MemPool, torch.cuda.MemPool):
    """A ``torch.cuda.MemPool`` whose segments are cgraph's.

    Attributes:
        ordinal: The number of its device.
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
        if not _torch.takes_allocators():
            raise TorchError(
                "torch's allocator is not its native one, and its pools cannot have segments of"
                " others: do not change torch's allocator (change_current_allocator)"
            )
        _torch.release_outliving()
        _torch.explain_refusals()
        _torch.on_routing(_refuse_paused)
        _torch.mark_captures_of_torch(_torch.release_outliving)
        allocator = _torch.allocator(*self._core.functions())
        torch.cuda.MemPool.__init__(self, allocator, use_on_oom, no_split)
        _known[self.id] = self
        self._is_last_resort = use_on_oom
        self._is_made = True

    def __del__(self) -> None:
        """Make the pool's death safe for torch; the memory goes back at once, or when it can."""
        if not self._is_made:
            return
        if _core.is_forked() or _torch.is_broken(self.ordinal):
            _torch.leave_to_process(self)
            return
        if sys.is_finalizing() or _torch.is_quiet(self.ordinal):
            return
        # Its other users may die before it does: the collector calls all finalizers first.
        _torch.outlive(self.ordinal, self.id, self._core)

    def pause(self, keep: str = "discard") -> None:
        """Pause the pool, as :meth:`cgraph.MemPool.pause` does."""
        if self._is_last_resort:
            raise ArgumentError(
                "pause() of a pool with use_on_oom=True, whose blocks torch would give out when"
                " memory is short: create it without that"
            )
        if _torch.is_routed(self.id):
            raise StateError(f"pause() of {self!r} while use_mem_pool allocates from it: leave it")
        super().pause(keep)

    def snapshot(self, include_traces: bool = True) -> list[dict[str, Any]]:
        """Return the pool's segments and blocks as torch's allocator knows them.

        Args:
            include_traces: Ignored: the result of ``torch.cuda.MemPool`` has none.
        """
        return _torch.pool_segments(self.id)


class PoolHandle(tuple[int, int]):
    """A token that keeps its pool alive, so that it can be captured into again and again.

    Attributes:
        keeper: The keeper of the pool, from the first capture on.
        ordinal: The number of the device where the pool has memory, from then on.
        mem_pool: The pool, if its segments are cgraph's.
    """

    keeper: _torch.PoolKeeper | None = None
    ordinal: int | None = None
    mem_pool: CudaMemPool | None = None

    def __del__(self) -> None:
        """Release the pool before its keeper, which knows how to end it."""
        self.mem_pool = None


def known(handle: Handle) -> CudaMemPool | None:
    """Return the living pool of a token, if its segments are cgraph's."""
    return _known.get((handle[0], handle[1]))


def all_known() -> list[CudaMemPool]:
    """Return the living pools whose segments are cgraph's."""
    return list(_known.values())


def count() -> int:
    """Return the number of these pools, or a little more."""
    return len(_known)


def state(handle: Handle) -> PoolState:
    """Return the segments of a pool and its blocks in use, as torch's allocator knows them."""
    segments = _torch.pool_segments(handle)
    blocks = [
        (start, in_blocks(block["requested_size"]))
        for segment in segments
        for start, block in addressed(segment)
        if block["state"].startswith("active")
    ]
    return PoolState([(one["address"], one["total_size"]) for one in segments], blocks)


def has(handle: Handle, address: int) -> bool:
    """Return whether an address lies in a segment of a pool."""
    mem_pool = known(handle)
    if mem_pool is not None:
        return mem_pool._core.covers(address)
    segments = _torch.pool_segments(handle)
    return any(0 <= address - one["address"] < one["total_size"] for one in segments)


def poison(handle: Handle) -> None:
    """Set all bytes of a pool that no block uses to 0xFF, as work on the current stream."""
    mem_pool = known(handle)
    if mem_pool is not None and mem_pool.is_paused:
        return
    for start, size in state(handle).free():
        torch.as_tensor(_Bytes(start, size), device="cuda").fill_(0xFF)


class _Bytes:
    """Memory of the device, in the form that torch takes from other libraries."""

    def __init__(self, start: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (start, False),
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
        }


def new_handle() -> PoolHandle:
    """Return the token of a new pool: one of cgraph's, wherever torch can have them."""
    if _torch.takes_allocators():
        try:
            return _handle_of(CudaMemPool(range_bytes=_RANGE_OF_A_CAPTURE))
        except StateError as error:
            text = f"the capture uses a pool of torch's own, which cannot be paused: {error}"
            Reason(Cause.TORCHS_POOL, text).warn(kind=CgraphWarning)
    return PoolHandle(_torch.new_pool_handle())


def resolve(pool: Pool | None, ordinal: int, side: torch.cuda.Stream) -> PoolHandle:
    """Return the token of a ``pool`` argument, whose pool is kept from here on.

    Args:
        pool: The user's argument.
        ordinal: The device on which the capture begins.
        side: A stream that does not capture.
    """
    handle = _handle(pool)
    mem_pool = handle.mem_pool
    home = handle.ordinal if mem_pool is None else mem_pool.ordinal
    if handle is pool and handle.keeper is None and home != ordinal:
        # The token was made on another device, but is first used here: torch gives it memory here.
        handle.mem_pool = mem_pool = home = None
    if home not in (None, ordinal):
        raise ForeignError(
            f"pool {tuple(handle)} is of cuda:{home}, expected one of cuda:{ordinal}, where the"
            " capture begins"
        )
    _refuse_paused(handle)
    handle.ordinal = ordinal
    # The host of its first capture will keep a pool that nobody else has.
    if handle.keeper is None and pool is not None:
        handle.keeper = _keeper((handle[0], handle[1]), side, _owner(pool, mem_pool))
    return handle


def _keeper(token: Handle, side: torch.cuda.Stream, owner: object) -> _torch.PoolKeeper:
    """Return the keeper of a pool and its owner, which captures that are alive share."""
    key = (*token, side.device_index, id(owner))
    found = _keepers.get(key)
    if found is None or found.graph is None:  # one that is dying has lost it
        found = _keepers[key] = _torch.PoolKeeper(token, side, owner)
    return found


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
            return handle_of(pool)
    raise ArgumentError(
        f"pool is {pool!r}, expected a cgraph.MemPool, a torch.cuda.MemPool, graph_pool_handle() or"
        " other.pool()"
    )


def handle_of(token: Handle) -> PoolHandle:
    """Return a token that keeps the pool, if its segments are cgraph's."""
    mem_pool = known(token)
    return PoolHandle(token) if mem_pool is None else _handle_of(mem_pool)


def _handle_of(pool: torch.cuda.MemPool) -> PoolHandle:
    handle = PoolHandle(pool.id)
    handle.mem_pool = pool if isinstance(pool, CudaMemPool) else None
    return handle


def _owner(pool: Pool | None, mem_pool: CudaMemPool | None) -> object:
    return pool if isinstance(pool, torch.cuda.MemPool) else mem_pool


def _refuse_paused(handle: Handle) -> None:
    """Raise if a pool has no memory: torch would give out blocks without memory."""
    mem_pool = known(handle)
    if mem_pool is not None and mem_pool.is_paused:
        raise StateError(f"{mem_pool!r} has no memory: call its resume() first")
