"""Everything that is private in torch: names, where they exist, and a message when one is gone.

The rest of cgraph uses only torch's public names and this file. The simulator's tests ran with
torch 2.8, 2.11 and 2.15, the GPU's with 2.11.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.optim
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils import _python_dispatch as python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import (
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_iter,
    tree_map,
    tree_unflatten,
)
from torch.utils.weak import TensorWeakRef

from cgraph import _core
from cgraph._driver import Handle
from cgraph.errors import ForeignError, NoDriverError, TorchError

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensorMode",
    "HostGraph",
    "PoolKeeper",
    "PoolLease",
    "TensorWeakRef",
    "TorchDispatchMode",
    "WeakStorage",
    "apply",
    "autograd_sequence",
    "base_of",
    "capturable_on_cpu",
    "captured_draw",
    "current_graph_lookup",
    "current_raw_stream",
    "current_stream_source",
    "demangled",
    "draws_from_companion",
    "enter_mode",
    "evaluating_node",
    "is_capturing",
    "is_same",
    "is_torch_graph",
    "lazy_view",
    "leaf_names",
    "leave_mode",
    "memory_of",
    "new_pool_handle",
    "quiet",
    "share_tracing_rules",
    "storage_id",
    "tensor_reader",
    "tree_flatten",
    "tree_iter",
    "tree_map",
    "tree_unflatten",
    "wants_gc",
    "watch_pools",
    "without_modes",
    "wrapped",
]

_NEEDED = (
    "_CUDAGraph",
    "_cuda_beginAllocateCurrentThreadToPool",
    "_cuda_endAllocateToPool",
    "_cuda_isCurrentStreamCapturing",
    "_cuda_releasePool",
    "_graph_pool_handle",
)


def require_cuda() -> None:
    """Raise unless this torch can host captures.

    Raises:
        NoDriverError: torch is built without CUDA.
        TorchError: torch lacks a name that cgraph uses.
    """
    if not hasattr(torch._C, "_CudaStreamBase"):
        raise NoDriverError(
            f"torch {torch.__version__} is built without CUDA: install a CUDA build of torch 2.8 or"
            " newer, or choose the simulator by name (CGRAPH_DRIVER=sim, cgraph.sim.use())"
        )
    missing = [name for name in _NEEDED if not hasattr(torch._C, name)]
    if missing:
        raise TorchError(
            f"torch {torch.__version__} has no torch._C.{missing[0]}, which cgraph needs: use a"
            " torch that this cgraph supports (2.8 to 2.15)"
        )


def HostGraph() -> Any:
    """Torch's own graph object, which opens and closes the captures that torch work is part of."""
    return _host_class()(True)


@functools.cache
def _host_class() -> Any:
    base: Any = torch._C._CUDAGraph
    if not hasattr(base, "_retain_pool"):
        return base

    class Host(base):  # type: ignore[misc]
        """Takes what ``use_mem_pool`` hands to the graph that captures: a pool, not its token."""

        def _retain_pool(self, pool: Any) -> None:
            super()._retain_pool(getattr(pool, "id", pool))

    return Host


def is_torch_graph(graph: object) -> bool:
    """Whether a graph is of torch's own class."""
    return isinstance(graph, torch._C._CUDAGraph)


def current_graph_lookup() -> dict[str, Any]:
    """What torch newer than 2.11 asks its ``CUDAGraph`` for the capture under way, if it does.

    The answer is the host of that capture, which ``use_mem_pool`` and control flow then act on.
    """
    name = "get_currently_capturing_graph"
    lookup = getattr(torch._C._CUDAGraph, name, None)
    return {} if lookup is None else {name: staticmethod(lookup)}


def share_tracing_rules(pairs: Iterable[tuple[Any, Any]]) -> None:
    """Let Dynamo trace the two functions of each pair alike, as it is told for one of them.

    It knows some functions of torch by what their names meant when it was imported.
    """
    tracing = sys.modules.get("torch._dynamo.trace_rules")
    rules: dict[Any, Any] = getattr(tracing, "get_torch_obj_rule_map", dict)()
    for first, second in pairs:
        rule = rules.get(first) or rules.get(second)
        if rule is not None:
            rules[first] = rules[second] = rule


_quiet_lock = threading.RLock()


@contextmanager
def quiet() -> Iterator[None]:
    """Without torch's warning about an empty graph: cgraph gives its own.

    One thread at a time: Python's filters of warnings are the process's.
    """
    with _quiet_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def captured_draw(generator: torch.Generator, out: torch.Tensor) -> Any:
    """A graph of one kernel that draws from a generator into a tensor, to be looked at.

    The current stream is one that does not capture.
    """
    graph = HostGraph()
    graph.register_generator_state(generator)
    with quiet():
        graph.capture_begin(None, "relaxed")
        try:
            out.uniform_(generator=generator)
        finally:
            graph.capture_end()
    return graph


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply(*args)``, without a search for what functorch left where it is not used."""
    if torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def leaf_names(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> list[str]:
    """How the leaves of positional and keyword arguments are found, as ``args[0]['x']``."""
    args, kwargs = arguments
    paths = [("args", path) for path, _ in tree_flatten_with_path(args)[0]]
    paths += [("kwargs", path) for path, _ in tree_flatten_with_path(kwargs)[0]]
    return [name + keystr(path) for name, path in paths]


def tensor_reader() -> _core.TensorReader:
    """What reads tensors natively, through DLPack's table where this torch has one."""
    api = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    return _core.TensorReader(torch.Tensor, api)


def draws_from_companion() -> bool:
    """Whether a second, empty capture around the first collects its random draws.

    Up to torch 2.11 a capture registers its generators when it begins, so an enclosing capture sees
    the draws. Newer ones keep a state for each capture, and only the capture's own object replays
    it; those have ``capture_end_pre``.
    """
    return not hasattr(torch._C._CUDAGraph, "capture_end_pre")


def is_capturing() -> bool:
    """Whether torch's current stream captures; creates no context."""
    return torch.cuda.is_initialized() and bool(torch._C._cuda_isCurrentStreamCapturing())


def new_pool_handle() -> Handle:
    """A token of a new memory pool."""
    first, second = torch._C._graph_pool_handle()
    return first, second


def empty_cache() -> None:
    """Give unused cached memory back, device and pinned.

    The pinned allocator keeps some 50 KiB for each pool that ever was, until this is called.
    """
    torch.cuda.empty_cache()
    host_empty_cache = getattr(torch._C, "_host_emptyCache", None)
    if host_empty_cache is not None:
        host_empty_cache()


def current_stream_source() -> object:
    """How the native half finds torch's current stream: DLPack's table, or a function."""
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    return torch._C._cuda_getCurrentRawStream if capsule is None else capsule


def current_raw_stream(ordinal: int) -> int:
    """Torch's current stream of a device, as a raw handle."""
    return int(torch._C._cuda_getCurrentRawStream(ordinal))


def autograd_sequence() -> int:
    """The number that the next autograd node of this thread gets."""
    return int(torch._C._autograd._get_sequence_nr())


def evaluating_node() -> Any:
    """The autograd node whose backward runs on this thread; None outside a backward pass."""
    return torch._C._current_autograd_node()


def demangled(name: str) -> str:
    """A C++ name as a person would write it; the name itself where torch cannot tell."""
    demangle = getattr(torch._C, "_demangle", None)
    return name if demangle is None else str(demangle(name))


class PoolKeeper:
    """Keeps a pool of torch's allocators, device and pinned, in use as a captured graph does.

    It is an empty graph, captured into the pool: both allocators count it as a user until it is
    reset. Without a user a pool can be freed, and can never be captured into again.

    Args:
        handle: The pool's token.
        side: A stream that does not capture.
        owner: Kept alive too, such as the ``MemPool`` of the token.
    """

    def __init__(self, handle: Handle, side: torch.cuda.Stream, owner: object = None) -> None:
        self.handle = handle
        self._owner = owner
        try:
            self._graph = _empty_graph(handle, side)
        except RuntimeError as error:
            # A capture that began badly leaves the random state capturing; one that goes well
            # ends that.
            _empty_graph(None, side)
            raise ForeignError(
                f"pool {tuple(handle)} cannot be captured into: its last user is gone, or another"
                " capture or use_mem_pool is using it. Keep a graph of the pool alive, or take the"
                " handle from cgraph.graph_pool_handle(), which keeps its pool; begin the capture"
                " outside of use_mem_pool"
            ) from error


def _empty_graph(handle: Handle | None, side: torch.cuda.Stream) -> Any:
    graph = HostGraph()
    with torch.cuda.stream(side), quiet():
        graph.capture_begin(handle, "relaxed")
        graph.capture_end()
    return graph


class PoolLease:
    """Keeps a pool in use that torch's device allocator routes to already.

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
        """Let the pool go; once is enough."""
        if self._held:
            self._held = False
            torch._C._cuda_releasePool(self.ordinal, self.handle)

    def __del__(self) -> None:
        if torch is not None and getattr(torch, "_C", None) is not None:
            self.release()


def end_routing(ordinal: int, handle: Handle) -> None:
    """End the allocator's routing to a pool where a failed capture has left it."""
    torch._C._cuda_endAllocateToPool(ordinal, handle)


_watchers: dict[tuple[int, int], Callable[[Handle], None]] = {}


@contextmanager
def watch_pools(ordinal: int, seen: Callable[[Handle], None]) -> Iterator[None]:
    """Report the pools of a device that ``torch.cuda.use_mem_pool`` routes this thread to.

    torch newer than 2.11 keeps such pools itself.
    """
    _install_pool_watch()
    key = (threading.get_ident(), ordinal)
    _watchers[key] = seen
    try:
        yield
    finally:
        _watchers.pop(key, None)


@functools.cache
def _install_pool_watch() -> None:
    module: Any = torch.cuda.memory
    name = "_cuda_beginAllocateCurrentThreadToPool"
    begin = getattr(module, name, None)
    if begin is None:
        raise TorchError(
            f"torch {torch.__version__} has no torch.cuda.memory.{name}, through which cgraph sees"
            " the pools of use_mem_pool: use a torch that this cgraph supports (2.8 to 2.15)"
        )

    def watched(device: int, handle: Handle) -> None:
        watcher = _watchers.get((threading.get_ident(), device))
        if watcher is not None:
            watcher(handle)
        begin(device, handle)

    setattr(module, name, watched)


_stranded: list[Any] = []


def enter_mode(mode: Any) -> None:
    """Enter a dispatch mode until :func:`leave_mode`."""
    for other in [m for m in _stranded if m in python_dispatch._get_current_dispatch_mode_stack()]:
        _stranded.remove(other)
        leave_mode(other)
    mode.__enter__()


def leave_mode(mode: Any) -> None:
    """Leave a dispatch mode, also where the user has entered others inside it and not left them.

    Only the thread that entered it can. In another one it stays, and goes when that thread enters
    the next mode; torch does not keep it alive until then.
    """
    inner = []
    if mode not in python_dispatch._get_current_dispatch_mode_stack():
        _stranded.append(mode)
        return
    while (top := python_dispatch._get_current_dispatch_mode_stack()[-1]) is not mode:
        inner.append(python_dispatch._pop_mode())
        assert inner[-1] is top
    mode.__exit__(None, None, None)
    for other in reversed(inner):
        python_dispatch._push_mode(other)


def without_modes() -> Any:
    """A context in which no dispatch mode is active."""
    return python_dispatch._disable_current_modes()


class WeakStorage:
    """A tensor's storage, not kept alive.

    Args:
        tensor: The tensor.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.address = storage.data_ptr()
        self._pointer = storage._weak_ref()

    def get(self) -> torch.UntypedStorage | None:
        """The storage, if it is alive."""
        storage: torch.UntypedStorage | None
        storage = torch.UntypedStorage._new_with_weak_ptr(self._pointer)
        return storage

    def __del__(self) -> None:
        torch.UntypedStorage._free_weak_ref(self._pointer)


def memory_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The storage of a tensor that has one with memory: not sparse, meta, fake or a wrapper."""
    if not torch._C._has_storage(tensor):
        return None
    storage = tensor.untyped_storage()
    if storage.device.type == "meta":
        return None
    try:
        storage.data_ptr()
    except RuntimeError:  # of a wrapper around other tensors
        return None
    return storage


def storage_id(storage: torch.UntypedStorage) -> int:
    """A number that no other living storage has; it stays where memory is resized."""
    return int(storage._cdata)


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that autograd knows this one as a view of; itself if it is none."""
    return tensor if tensor._base is None else tensor._base


def wrapped(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors inside a wrapper, however deep; a tensor itself if it is none."""
    if python_dispatch.is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from wrapped(getattr(tensor, name))
    else:
        yield tensor


def lazy_view(tensor: torch.Tensor, conjugate: bool, negative: bool) -> torch.Tensor:
    """A view whose elements are conjugated or negated when they are read."""
    if conjugate:
        tensor = tensor.conj()
    return torch._neg_view(tensor) if negative else tensor


def is_same(first: torch.Generator, second: torch.Generator) -> bool:
    """Whether two Python objects are one generator."""
    return int(first._cdata) == int(second._cdata)  # type: ignore[attr-defined]


def wants_gc() -> bool:
    """Whether a collection is asked for before each capture (``TORCH_CUDAGRAPH_GC``)."""
    config = getattr(torch.compiler, "config", None)
    default = os.environ.get("TORCH_CUDAGRAPH_GC", "0") == "1"
    return bool(getattr(config, "force_cudagraph_gc", default))


_capturable: dict[str, Any] = {"users": 0, "before": []}
_capturable_lock = threading.Lock()


@contextmanager
def capturable_on_cpu() -> Iterator[None]:
    """Let optimisers with ``capturable=True`` step on CPU tensors, which stand for a GPU's."""
    with _capturable_lock:
        _capturable["users"] += 1
        if _capturable["users"] == 1:
            _capturable["before"] = _allow_cpu()
    try:
        yield
    finally:
        with _capturable_lock:
            _capturable["users"] -= 1
            if _capturable["users"] == 0:
                for module, original in _capturable["before"]:
                    setattr(module, _SUPPORTED_DEVICES, original)


_SUPPORTED_DEVICES = "_get_capturable_supported_devices"


def _allow_cpu() -> list[tuple[Any, Any]]:
    """Add the CPU to the devices of every optimiser; returns what to put back."""
    modules = [m for key, m in sys.modules.items() if key.startswith("torch.optim.")]
    before = [
        (m, getattr(m, _SUPPORTED_DEVICES)) for m in modules if hasattr(m, _SUPPORTED_DEVICES)
    ]

    def supported(*args: Any, **kwargs: Any) -> list[str]:
        return [*before[0][1](*args, **kwargs), "cpu"]

    for module, _ in before:
        setattr(module, _SUPPORTED_DEVICES, supported)
    return before
