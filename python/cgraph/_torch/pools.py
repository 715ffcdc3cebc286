"""Pools of torch's allocators."""

from __future__ import annotations

import ctypes
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch

from cgraph import _core
from cgraph._driver import Handle
from cgraph._torch.allocator_use import is_quiet
from cgraph._torch.host import HostGraph, beginning, on_stream, quiet, release_hosts
from cgraph.errors import ForeignError, OutOfMemoryError

__all__ = [
    "PoolKeeper",
    "PoolLease",
    "allocated",
    "allocating_in",
    "allocator",
    "clear_workspaces",
    "empty_cache",
    "end_routing",
    "explain_refusals",
    "leave_to_process",
    "make_handles",
    "new_pool_handle",
    "outlive",
    "pool_segments",
    "release_outliving",
    "takes_allocators",
]


def new_pool_handle() -> Handle:
    """Return the token of a new memory pool."""
    first, second = torch._C._graph_pool_handle()
    return first, second


def empty_cache() -> None:
    """Give unused cached memory back, device and pinned.

    The pinned allocator keeps some 50 KiB for each pool that ever existed, until this is called.
    """
    if torch.cuda.is_initialized():
        torch._C._cuda_emptyCache()
        _empty_host_cache()


_empty_host_cache: Callable[[], None] = getattr(torch._C, "_host_emptyCache", lambda: None)


def takes_allocators() -> bool:
    """Return whether torch's pools can have segments of another allocator."""
    return torch.cuda.get_allocator_backend() == "native"


@functools.cache
def allocator(number: int, allocate: int, free: int) -> Any:
    """Return the allocator from which a ``torch.cuda.MemPool`` takes segments.

    It is never released: torch 2.8 calls it without keeping it, as long as tensors are alive.

    Args:
        number: A number for each pair of functions.
        allocate: The address of ``void* (ssize_t bytes, int device, cudaStream_t)``.
        free: The address of ``void (void*, size_t bytes, int device, cudaStream_t)``.
    """
    return torch._C._cuda_customAllocator(allocate, free)


@functools.cache
def explain_refusals() -> None:
    """Let torch raise the reason for which a pool of cgraph refuses an allocation.

    An allocator can only refuse, and torch would report that the device is full.
    """
    torch._C._cuda_attach_out_of_memory_observer(_explain_refusal)  # type: ignore[attr-defined]


def _explain_refusal(device: int, asked: int, total: int, free: int) -> None:
    refused = _core.take_refusal(asked)
    if isinstance(refused, OutOfMemoryError):
        raise _of_both(str(refused)) from None
    if refused is not None:
        raise refused


@functools.cache
def _out_of_memory_class() -> type[OutOfMemoryError]:
    """Return a class of errors that callers catch as torch's or as cgraph's."""

    class OfPool(OutOfMemoryError, torch.OutOfMemoryError):
        __doc__ = OutOfMemoryError.__doc__

    OfPool.__name__ = OfPool.__qualname__ = OutOfMemoryError.__name__
    OfPool.__module__ = OutOfMemoryError.__module__
    return OfPool


def _of_both(text: str) -> OutOfMemoryError:
    return _out_of_memory_class()(text)


def make_handles(ordinal: int) -> None:
    """Make the handle of cuBLAS that this thread uses on a device, which no capture can."""
    made: set[int] = vars(_handles_of_thread).setdefault("made", set())
    if ordinal not in made:
        torch.cuda.current_blas_handle()
        made.add(ordinal)


_handles_of_thread = threading.local()


def clear_workspaces() -> None:
    """Release the workspaces that torch keeps for each cuBLAS handle and stream.

    A capture that finds none takes one from its own pool.
    """
    torch._C._cuda_clearCublasWorkspaces()


def allocated(ordinal: int) -> tuple[int, int]:
    """Return a device's reserved bytes and its bytes in blocks in use."""
    stats: dict[str, Any] = torch._C._cuda_memoryStats(ordinal)
    reserved, in_use = (stats[name]["all"]["current"] for name in _SIZES)
    return reserved, in_use


_SIZES = "reserved_bytes", "allocated_bytes"


@functools.cache
def _snapshots_have_a_choice() -> bool:
    return "include_traces" in inspect.signature(torch.cuda.memory_snapshot).parameters


@functools.cache
def _stolen_references() -> tuple[int, ...]:
    """Return the references to each item of its argument that a snapshot of one pool takes away.

    torch 2.11 treats borrowed items as its own: after some thousand snapshots it frees numbers in
    use, and the process crashes.
    """
    key = _snapshot_key((1 << 40, 1 << 41))
    for item in key:
        _give_references(item, 2)
    before = [sys.getrefcount(item) for item in key]
    torch._C._cuda_memorySnapshot(key)  # type: ignore[arg-type]
    after = [sys.getrefcount(item) for item in key]
    return tuple(one - other for one, other in zip(before, after, strict=True))


def _give_references(item: object, count: int) -> None:
    for _ in range(count):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(item))


def _snapshot_key(handle: Handle) -> tuple[int, ...]:
    return (handle[0], handle[1], False) if _snapshots_have_a_choice() else (handle[0], handle[1])


def pool_segments(handle: Handle) -> list[dict[str, Any]]:
    """Return the segments of a pool as torch's allocator knows them, with their blocks."""
    key = _snapshot_key(handle)
    for item, count in zip(key, _stolen_references(), strict=True):
        _give_references(item, count)
    snapshot: dict[str, Any] = torch._C._cuda_memorySnapshot(key)  # type: ignore[arg-type]
    segments: list[dict[str, Any]] = snapshot["segments"]
    return [one for one in segments if tuple(one["segment_pool_id"]) == tuple(handle)]


# A part of the error of torch's allocators for a pool that a capture or use_mem_pool routes to.
_IS_ROUTED = "already recording"


class PoolKeeper:
    """A user of a pool that torch's allocators, device and pinned, count like a captured graph.

    It is a graph that was captured into the pool, by default an empty one: both allocators count it
    as a user until it is reset. Without a user a pool can be freed, and can never be captured into
    again.

    Args:
        handle: The pool's token.
        side: A stream that does not capture.
        owner: An object to keep alive too, such as the ``MemPool`` of the token.
        graph: A graph of torch's that was captured into the pool, to be the user.

    Attributes:
        graph: The user.
    """

    def __init__(
        self,
        handle: Handle,
        side: torch.cuda.Stream,
        owner: object = None,
        graph: Any = None,
    ) -> None:
        self.handle = handle
        self._ordinal = side.device_index
        self._owner = owner
        self.graph = graph
        if graph is not None:
            return
        try:
            self.graph = self._begun(side)
        except RuntimeError:
            # The pinned allocator may still have its part of the pool, whose last user is gone.
            _empty_host_cache()
            self.graph = self._begun_again(side)

    def _begun(self, side: torch.cuda.Stream) -> Any:
        try:
            return _empty_graph(self.handle, side)
        except RuntimeError as error:
            # If it was the pinned allocator that refused, the device's one routes to the pool now.
            # Otherwise that is somebody else's routing.
            if _IS_ROUTED not in str(error):
                with suppress(RuntimeError):
                    end_routing(self._ordinal, self.handle)
                    torch._C._cuda_releasePool(self._ordinal, self.handle)
            raise

    def _begun_again(self, side: torch.cuda.Stream) -> Any:
        try:
            return self._begun(side)
        except RuntimeError as error:
            # A capture that failed to begin leaves the random state capturing; a good one ends
            # that.
            _empty_graph(None, side)
            raise ForeignError(
                f"pool {tuple(self.handle)} cannot be captured into: its last user is gone, or"
                " another capture or use_mem_pool is using it. Keep a graph of the pool alive, or"
                " take the handle from cgraph.graph_pool_handle(), which keeps its pool; begin the"
                " capture outside of use_mem_pool"
            ) from error

    def __del__(self) -> None:
        """Release the graph and the owner in an order that torch tolerates."""
        # At once, as another thread may look for a keeper.
        graph, self.graph = self.graph, None
        is_over = sys.is_finalizing() or _core.is_forked()
        with nullcontext() if is_over else beginning:
            if graph is not None and not is_over and is_quiet(self._ordinal):
                # The owner is then the last user, and gives the memory back at once.
                graph.reset()
            self._owner = None


def _empty_graph(handle: Handle | None, side: torch.cuda.Stream) -> Any:
    graph = HostGraph()
    with beginning, on_stream(side), quiet():
        graph.capture_begin(handle, "relaxed")
        graph.capture_end()
    return graph


def outlive(ordinal: int, handle: Handle, *also: object) -> None:
    """Keep a pool in use beyond its ``MemPool`` object, which is about to die.

    torch's destructor ends the process if it finds itself the last user while :func:`is_quiet` is
    false: it then waits for events, and nothing can catch its exception.

    Args:
        ordinal: The device's number.
        handle: The pool's token.
        *also: Objects to keep alive as long.
    """
    _outliving.append((PoolLease(ordinal, handle), also))


def leave_to_process(one: object) -> None:
    """Keep an object alive to the end of the process, whatever else lets it go."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))


def release_outliving() -> None:
    """Release the pools whose objects are gone; torch's next emptying gives them back.

    So are graphs of torch that are gone.
    """
    release_hosts()
    while _outliving:
        with suppress(IndexError):  # another thread may have released it
            _outliving.pop()[0].release()


_outliving: list[tuple[PoolLease, object]] = []


class PoolLease:
    """A user of a pool to which torch's device allocator already routes.

    Args:
        ordinal: The device's number.
        handle: The pool's token.
    """

    def __init__(self, ordinal: int, handle: Handle) -> None:
        self.ordinal = ordinal
        self.handle = handle
        self._held = False
        # Beginning counts the pool as used once more; only releasing takes that back. The filter is
        # this thread's, and nothing is allocated in between.
        torch._C._cuda_beginAllocateCurrentThreadToPool(ordinal, handle)
        torch._C._cuda_endAllocateToPool(ordinal, handle)
        self._held = True

    def release(self) -> None:
        """Release the pool; a second call does nothing."""
        if self._held:
            self._held = False
            torch._C._cuda_releasePool(self.ordinal, self.handle)

    def __del__(self) -> None:
        is_over = torch is None or getattr(torch, "_C", None) is None
        if not is_over and not _core.is_forked():
            self.release()


@contextmanager
def allocating_in(ordinal: int, handle: Handle) -> Iterator[None]:
    """Let this thread allocate from a pool inside a ``with`` block, outside of captures."""
    torch._C._cuda_beginAllocateCurrentThreadToPool(ordinal, handle)
    try:
        yield
    finally:
        torch._C._cuda_endAllocateToPool(ordinal, handle)
        torch._C._cuda_releasePool(ordinal, handle)


def end_routing(ordinal: int, handle: Handle) -> None:
    """End the allocator's routing to a pool after a failed capture has left it on."""
    torch._C._cuda_endAllocateToPool(ordinal, handle)
