"""Torch's own graph object, and torch's state during captures."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import CodeType
from typing import Any

import torch

from cgraph import _core

__all__ = [
    "HostGraph",
    "beginning",
    "captured_draw",
    "code_of_capture_check",
    "current_graph_lookup",
    "current_ordinal",
    "current_raw_stream",
    "current_stream",
    "current_stream_source",
    "device_of",
    "end_draws",
    "has_gpu",
    "is_capturing",
    "is_own_stream",
    "is_torch_graph",
    "keep_from_tracing",
    "on_stream",
    "quiet",
    "release_hosts",
    "share_tracing_rules",
    "synchronize",
]


@functools.cache
def code_of_capture_check() -> CodeType | None:
    """Return the code by which an optimizer refuses captures; None if this torch has none."""
    kind: Any = torch.optim.Optimizer
    for name in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"):
        if (found := getattr(kind, name, None)) is not None:
            code: CodeType = inspect.unwrap(found).__code__
            return code
    return None


beginning = threading.RLock()
"""Held while a capture begins, and while a pool may go.

torch ends the process if it destroys a pool while a capture is open, also one of another thread.
"""


def HostGraph() -> Any:
    """Create torch's own graph object, which opens the captures that torch work is part of."""
    graph = _host_class()(True)
    graph._ordinal = current_ordinal()
    return graph


@functools.cache
def _host_class() -> Any:
    base: Any = torch._C._CUDAGraph

    class Host(base):  # type: ignore[misc]
        """A graph whose end waits for that of a capture: torch would break it."""

        _ordinal = 0

        def __del__(self) -> None:
            """Stay until :func:`release_hosts` while the device captures."""
            is_over = sys.is_finalizing() or _core.is_forked()
            if not is_over and device_of(self._ordinal).has_captures():
                _late.append(self)

    if hasattr(base, "_retain_pool"):
        # While it captures, ``use_mem_pool`` gives a pool, not its token.
        def retain(self: Any, pool: Any) -> None:
            base._retain_pool(self, getattr(pool, "id", pool))

        Host._retain_pool = retain
    return Host


_late: list[Any] = []


def release_hosts() -> None:
    """Let torch's graphs go that waited for the end of a capture."""
    for one in list(_late) if _late else ():
        if not device_of(one._ordinal).has_captures():
            with suppress(ValueError):  # another thread may have let it go
                _late.remove(one)


def is_torch_graph(graph: object) -> bool:
    """Return whether a graph is of torch's own class."""
    return isinstance(graph, torch._C._CUDAGraph)


def current_graph_lookup() -> dict[str, Any]:
    """Return the method by which torch newer than 2.11 finds the graph under capture, if any.

    The method returns the host of that capture, on which ``use_mem_pool`` and control flow then
    act.
    """
    name = "get_currently_capturing_graph"
    lookup = getattr(torch._C._CUDAGraph, name, None)
    return {} if lookup is None else {name: staticmethod(lookup)}


def share_tracing_rules(pairs: Iterable[tuple[Any, Any]]) -> None:
    """Let Dynamo trace both functions of each pair by the rule that it has for one of them.

    Dynamo knows some functions of torch by the meaning of their names when it was imported.
    """
    tracing = sys.modules.get("torch._dynamo.trace_rules")
    rules: dict[Any, Any] = getattr(tracing, "get_torch_obj_rule_map", dict)()
    for first, second in pairs:
        rule = rules.get(first) or rules.get(second)
        if rule is not None:
            rules[first] = rules[second] = rule


def keep_from_tracing() -> None:
    """Keep Dynamo, once it is imported, from tracing cgraph, but not the code around it."""
    tracing = sys.modules.get("torch._dynamo.trace_rules")
    if tracing is not None and tracing not in _told:
        _told.append(tracing)
        getattr(tracing, "add", bool)("cgraph")


_told: list[object] = []


_quiet_lock = threading.RLock()


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress torch's warning about an empty graph: cgraph gives its own.

    One thread at a time can do so: Python's warning filters belong to the process.
    """
    with _quiet_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def captured_draw(generator: torch.Generator, out: torch.Tensor) -> Any:
    """Return a graph of one kernel that draws from a generator into a tensor, for inspection.

    The current stream must not capture.
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


def end_draws(generators: Iterable[torch.Generator]) -> None:
    """Let generators draw outside of captures again if a capture that drew from them cannot end.

    The current stream must not capture.
    """
    graph = HostGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    with quiet():
        graph.capture_begin(None, "relaxed")
        graph.capture_end()


def has_gpu() -> bool:
    """Return whether torch finds a GPU. torch asks the system at each call; a found GPU stays."""
    global _has_gpu
    _has_gpu = _has_gpu or torch.cuda.is_available()
    return _has_gpu


_has_gpu = False


class on_stream:
    """A block with a stream and its device current, at a tenth of ``torch.cuda.stream``'s cost.

    It is not a generator: one that was entered and forgotten would set a stream when collected.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        """Note the current stream and device, and make this stream current."""
        stream = self._stream
        self._device = current_ordinal()
        self._before = torch._C._cuda_getCurrentStream(stream.device_index)
        _set_stream(stream.stream_id, stream.device_index, stream.device_type)

    def __exit__(self, *_: object) -> None:
        """Make the earlier stream and device current again."""
        # Setting a stream also sets its device, which may not be the earlier one.
        _set_stream(*self._before)
        if self._device != self._stream.device_index:
            torch.cuda.set_device(self._device)


def _set_stream(number: int, device_index: int, device_type: int) -> None:
    torch._C._cuda_setStream(stream_id=number, device_index=device_index, device_type=device_type)


@functools.cache
def device_of(ordinal: int) -> _core.Device:
    """Return the core's device of a number."""
    return _core.Device.cuda(ordinal)


def current_ordinal() -> int:
    """Return the number of the current device, at a tenth of ``torch.cuda.current_device``'s cost.

    torch must have initialised CUDA.
    """
    return int(torch._C._cuda_getDevice())


def synchronize() -> None:
    """Wait for the work of the current device; torch must have initialised CUDA."""
    torch._C._cuda_synchronize()


def is_capturing() -> bool:
    """Return whether torch's current stream captures, without creating a context."""
    return torch.cuda.is_initialized() and bool(torch._C._cuda_isCurrentStreamCapturing())


def current_stream_source() -> tuple[object, Callable[[int], bool]]:
    """Return the native half's source of torch's current stream, and a function that tells of it.

    The source is DLPack's table or a function. The other function tells whether the current stream
    of a device is torch's own; torch destroys none of these.
    """
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    return torch._C._cuda_getCurrentRawStream if capsule is None else capsule, is_own_stream


def is_own_stream(ordinal: int) -> bool:
    """Return whether a device's current stream is torch's own: the default one, or of its pool.

    The number of a stream of somebody else is its raw handle, which is even.
    """
    number: int = torch._C._cuda_getCurrentStream(ordinal)[0]
    return number == 0 or number % 2 == 1


def current_stream(ordinal: int) -> torch.cuda.Stream:
    """Return torch's current stream of a device in use, at a tenth of the cost."""
    return _stream(*torch._C._cuda_getCurrentStream(ordinal))


@functools.lru_cache(maxsize=64)
def _stream(number: int, device_index: int, device_type: int) -> torch.cuda.Stream:
    """Return the stream of a number, which always stands for the same raw handle."""
    return torch.cuda.Stream(stream_id=number, device_index=device_index, device_type=device_type)


def current_raw_stream(ordinal: int) -> int:
    """Return torch's current stream of a device as a raw handle."""
    return int(torch._C._cuda_getCurrentRawStream(ordinal))
