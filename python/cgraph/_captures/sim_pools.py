"""Pools of the simulator, whose blocks are CPU tensors."""

from __future__ import annotations

import bisect
import ctypes
import functools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from cgraph import _core, _driver, _torch
from cgraph._captures.footprint import PoolSizes, PoolState, in_blocks
from cgraph._driver import Handle, Pool
from cgraph._source import user_frames
from cgraph.errors import ArgumentError, ForeignError, StateError
from cgraph.mempool import MemPool, require_options
from cgraph.timeline import Action, Event

if TYPE_CHECKING:
    from cgraph.sim import Simulator

__all__ = ["Pools", "SimHandle", "SimMemPool"]


class SimHandle(tuple[int, int]):
    """A token of a simulated pool.

    Attributes:
        mem_pool: The pool, kept alive.
    """

    mem_pool: SimMemPool
    simulated = True


class SimMemPool(MemPool):
    """A pool of the current simulator.

    Attributes:
        is_open: True if a capture allocates from it.
        keeps_contents: True if new blocks hold earlier contents, as on a GPU: a segment that is
            being captured may still read data that the previous one has left. Otherwise they hold
            poison.
    """

    simulated = True
    is_open = False
    keeps_contents = False

    def __init__(
        self,
        limit: int | None = None,
        base: int | None = None,
        *,
        use_on_oom: bool = False,
        no_split: bool = False,
    ) -> None:
        require_options(limit, base)
        simulator: Simulator = _driver.current()  # type: ignore[assignment]
        sim, device = simulator.core, simulator.device
        self._core = _core.Pool(device, sim=sim, limit=limit, base=base)
        self._starts: list[int] = []
        self._segments: list[torch.Tensor] = []
        self._blocks: dict[int, int] = {}
        # What keeps each block, and torch's object of its storage, by the address of tensors.
        self._owners: dict[int, tuple[list[_core.Block], int]] = {}
        self._events: list[Event] | None = None
        simulator.pools.known[self.id] = self

    @property
    def id(self) -> Handle:
        """Its token, which does not keep it alive."""
        return 0, self._core.id

    def tensor(self, stream: _core.Stream, like: torch.Tensor, origin: object = "") -> torch.Tensor:
        """Return a tensor of the given layout in a new block, which an operator makes."""
        if like.numel() == 0:
            return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        last = sum((size - 1) * step for size, step in zip(like.shape, like.stride(), strict=True))
        block = self._core.allocate(stream, (last + 1) * like.element_size())
        if not self.keeps_contents:
            block.poison()
        self._begins(block, origin)
        made = _over(block, like.dtype, 0, tuple(like.shape), like.stride())
        self._owners[block.host_address] = _owner_of(block, made.untyped_storage())
        return made

    def empty_like(self, stream: _core.Stream, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor in a new block, as ``torch.empty_like`` would lay it out."""
        return self.tensor(stream, torch.empty_like(tensor, device="meta"))

    def find(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the tensor over its whole segment instead of its block; None outside the pool."""
        address = tensor.untyped_storage().data_ptr()
        segment = self._segment(address)
        if segment is None:
            return None
        offset = address - segment.data_ptr() + tensor.storage_offset() * tensor.element_size()
        # Replays write to it outside of the mode that the capture may be in.
        with torch.inference_mode(False):
            return torch.empty(0, dtype=tensor.dtype).set_(
                segment.untyped_storage(),
                offset // tensor.element_size(),
                tensor.shape,
                tensor.stride(),
            )

    def covers(self, address: int) -> bool:
        """Return whether an address of the host lies in a segment of the pool."""
        return self._segment(address) is not None

    def has(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies in a segment."""
        memory = _torch.memory_of(tensor)
        return memory is not None and self.covers(memory.data_ptr())

    def sizes(self) -> PoolSizes:
        """Return its segments and blocks in numbers."""
        state = self.state()
        return PoolSizes(state.reserved, state.in_use)

    def trim(self) -> int:
        """Give back segments that nothing uses and no graph knows; return their bytes."""
        # These lists keep every segment; remaining segments are found again.
        self._starts, self._segments = [], []
        return super().trim()

    def state(self) -> PoolState:
        """Return its segments and the blocks in use."""
        return PoolState(self.segments(), list(self._blocks.items()))

    def block_starts(self) -> set[int]:
        """Return where its blocks in use are for tensors."""
        self._drop_dead()
        # Garbage may free some meanwhile.
        starts = list(self._blocks)
        return {
            segment.host_address + start - segment.address
            for segment in self._core.segments()
            for start in starts
            if 0 <= start - segment.address < segment.nbytes
        }

    def poison(self) -> None:
        """Set all bytes that no block uses to 0xFF."""
        if self.is_paused:
            return
        free = self.state().free()
        for segment in self._core.segments():
            for start, size in free:
                offset = start - segment.address
                if 0 <= offset < segment.nbytes:
                    ctypes.memset(segment.host_address + offset, 0xFF, size)

    def record(self) -> None:
        """Record the events of blocks from here on, until :meth:`recorded`."""
        self._events = []

    def recorded(self) -> list[Event] | None:
        """Return the recorded events; None if the record was off."""
        events, self._events = self._events, None
        return events

    def checkpoint(self) -> _core.Checkpoint:
        """Return which blocks are in use."""
        self._drop_dead()
        return self._core.checkpoint()

    def restore(
        self,
        state: _core.Checkpoint,
        live: Sequence[_torch.WeakStorage],
        dead: Sequence[int],
    ) -> None:
        """Make the blocks in use those of a checkpoint again; see ``Driver.restore``."""
        storages = {one.address: one.get() for one in live}
        for block in self._core.restore(state):
            storage = storages.get(block.host_address)
            if storage is None:
                assert block.host_address in dead, "a block of the checkpoint that nobody knows"
                continue
            self._begins(block)
            self._owners[block.host_address] = _owner_of(block, storage)

    def give_up(self, starts: Sequence[int]) -> None:
        """Make blocks free whose storages have other memory now."""
        for start in starts:
            owner, _ = self._owners.pop(start, ([], 0))
            owner.clear()

    def _drop_dead(self) -> None:
        """Free the blocks of storages that are gone and have weak references still.

        In torch 2.8, these keep Python's object of the storage.
        """
        for owner, storage in list(self._owners.values()):
            if owner and _torch.count_uses(storage) == 0:
                owner.clear()

    def _begins(self, block: _core.Block, origin: object = "") -> None:
        """Note a block from its begin to its end."""
        self._note("alloc", block.address, block.nbytes, origin)
        end = weakref.finalize(block, self._note, "free", block.address, block.nbytes)
        end.atexit = False

    def _note(self, action: Action, address: int, size: int, origin: object = "") -> None:
        size = in_blocks(size)
        if action == "alloc":
            self._blocks[address] = size
        else:
            del self._blocks[address]
        if self._events is not None:
            # Only a record pays for the walk through the frames.
            frames = user_frames() if action == "alloc" else ()
            self._events.append(Event(action, address, size, 0, str(origin), frames))

    def _segment(self, address: int) -> torch.Tensor | None:
        found = self._known_segment(address)
        if found is None:
            self._refresh()
            found = self._known_segment(address)
        return found

    def _known_segment(self, address: int) -> torch.Tensor | None:
        place = bisect.bisect_right(self._starts, address) - 1
        if place < 0:
            return None
        segment = self._segments[place]
        return segment if address < segment.data_ptr() + segment.numel() else None

    def _refresh(self) -> None:
        known = set(self._starts)
        for block in self._core.segments():
            if block.host_address not in known:
                whole = _over(block, torch.uint8, 0, (block.nbytes,), (1,), keeps=True)
                self._segments.append(whole)
        self._segments.sort(key=torch.Tensor.data_ptr)
        self._starts = [segment.data_ptr() for segment in self._segments]


class Pools:
    """The pools of a simulated device.

    Attributes:
        known: The living pools, by token.
    """

    def __init__(self, device: _core.Device) -> None:
        self._device = device
        self.known: weakref.WeakValueDictionary[Handle, SimMemPool] = weakref.WeakValueDictionary()

    def new_handle(self) -> SimHandle:
        """Return the token of a new pool."""
        return _token(SimMemPool())

    def resolve(self, pool: Pool | None) -> SimHandle:
        """Return the token of a ``pool`` argument."""
        if pool is None:
            return self.new_handle()
        handle = pool.id if isinstance(pool, SimMemPool) else pool
        is_token = isinstance(handle, tuple) and len(handle) == 2
        if not is_token or not all(isinstance(half, int) for half in handle):
            raise ArgumentError(
                f"pool is {pool!r}, expected a cgraph.MemPool, graph_pool_handle() or other.pool()"
            )
        found = self.known.get((handle[0], handle[1]))
        if found is None or getattr(handle, "mem_pool", found) is not found:
            raise ForeignError(
                f"pool {tuple(handle)} is of another device or its last user is gone, expected a"
                f" living pool of {self._device.name}"
            )
        if found.is_open:
            raise ForeignError(
                f"pool {tuple(handle)} cannot be captured into: another capture is using it"
            )
        if found.is_paused:
            raise StateError(f"{found!r} has no memory: call its resume() first")
        return _token(found)


def _token(mem_pool: SimMemPool) -> SimHandle:
    handle = SimHandle(mem_pool.id)
    handle.mem_pool = mem_pool
    return handle


@functools.lru_cache(maxsize=512)
def _bytes_type(nbytes: int) -> type[Any]:
    """Return a type of ctypes array whose instances can keep a block alive."""
    return type("Bytes", (ctypes.c_ubyte * nbytes,), {})


def _owner_of(block: _core.Block, storage: torch.UntypedStorage) -> tuple[list[_core.Block], int]:
    """Return a list that keeps a block as long as the storage lives, or until it is cleared.

    With it comes the address of torch's object of the storage, which lives while the list has one.
    """
    owner = [block]
    # torch keeps Python's object of a storage as long as the storage.
    end = weakref.finalize(storage, owner.clear)
    end.atexit = False
    return owner, storage._cdata


def _over(
    block: _core.Block,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    *,
    keeps: bool = False,
) -> torch.Tensor:
    """Return a tensor over a block; with ``keeps``, its storage keeps the block."""
    memory = _bytes_type(block.nbytes).from_address(block.host_address)
    if keeps:
        memory.block = block
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return torch.empty(0, dtype=dtype).set_(whole.untyped_storage(), offset, shape, stride)
