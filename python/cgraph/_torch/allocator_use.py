"""Others' use of torch's allocator: torch's own captures, and routing to pools."""

from __future__ import annotations

import functools
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from cgraph import _core
from cgraph._driver import Handle
from cgraph._torch.host import device_of, is_capturing
from cgraph.errors import TorchError

__all__ = [
    "is_broken",
    "is_quiet",
    "is_routed",
    "mark_captures_of_torch",
    "on_routing",
    "take_routed",
    "tell_routed_pools",
    "watch_routes",
]

_BEGIN = "_cuda_beginAllocateCurrentThreadToPool"
_END = "_cuda_endAllocateToPool"

_watchers: dict[tuple[int, int], Callable[[Handle], None]] = {}
_checks: list[Callable[[Handle], None]] = []
_routed: Counter[Handle] = Counter()
_were_routed: set[Handle] = set()
_notes_routes = threading.Event()
_broken: set[int] = set()
_marks: weakref.WeakKeyDictionary[Any, _core.CaptureMark] = weakref.WeakKeyDictionary()


def is_quiet(ordinal: int) -> bool:
    """True if a device has no open capture and routes nothing to a pool, as far as is known.

    Args:
        ordinal: The device's number; another one may be current.
    """
    device = device_of(ordinal)
    if ordinal in _broken:
        return False
    return not _routed and not device.has_captures() and not is_capturing()


def is_routed(handle: Handle) -> bool:
    """True if some thread now allocates from a pool through ``torch.cuda.use_mem_pool``."""
    return _routed[handle[0], handle[1]] > 0


def watch_routes() -> None:
    """Begin to note which pools threads allocate from outside of captures."""
    _notes_routes.set()
    _install()


def take_routed(handle: Handle) -> bool:
    """Return whether a thread has allocated from a pool outside of captures since the last call."""
    own = (handle[0], handle[1])
    found = own in _were_routed
    _were_routed.discard(own)
    return found


def is_broken(ordinal: int) -> bool:
    """Return whether a capture of torch's own class has failed on a device.

    torch's allocator counts it as open for good, and ends the process where a pool is destroyed.
    """
    return ordinal in _broken


@functools.cache
def on_routing(check: Callable[[Handle], None]) -> None:
    """Call ``check`` with the pool of each ``torch.cuda.use_mem_pool``, before it begins."""
    _install()
    _checks.append(check)


def tell_routed_pools(ordinal: int, seen: Callable[[Handle], None]) -> Callable[[], object]:
    """Report the pools of a device that ``torch.cuda.use_mem_pool`` routes this thread to.

    torch newer than 2.11 keeps such pools itself.

    Returns:
        A function that ends this.
    """
    _install()
    key = (threading.get_ident(), ordinal)
    _watchers[key] = seen
    return functools.partial(_watchers.pop, key, None)


@functools.cache
def mark_captures_of_torch(ended: Callable[[], None]) -> None:
    """Mark the captures of torch's own graph class as cgraph marks its own.

    Args:
        ended: Called when one of them has ended.
    """
    classes: list[Any] = torch._C._CUDAGraph.__subclasses__()
    of_torch = [one for one in classes if one.__module__.startswith("torch.")]
    for one in of_torch:
        one.capture_begin = _marking(one.capture_begin)
        one.capture_end = _unmarking(one.capture_end, ended, breaks=True)
        one.reset = _unmarking(one.reset, ended, breaks=False)


def _marking(begin: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(begin)
    def marked(graph: Any, *args: Any, **kwargs: Any) -> Any:
        mark = _core.Device.cuda(torch.cuda.current_device()).mark_capture()
        begun = begin(graph, *args, **kwargs)
        _marks[graph] = mark
        return begun

    return marked


def _unmarking(
    end: Callable[..., Any], ended: Callable[[], None], *, breaks: bool
) -> Callable[..., Any]:
    @functools.wraps(end)
    def unmarked(graph: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return end(graph, *args, **kwargs)
        except RuntimeError:
            if breaks and graph in _marks:
                _broken.add(torch.cuda.current_device())
            raise
        finally:
            if _marks.pop(graph, None) is not None:
                ended()

    return unmarked


@functools.cache
def _install() -> None:
    module: Any = torch.cuda.memory
    missing = [name for name in (_BEGIN, _END) if not hasattr(module, name)]
    if missing:
        raise TorchError(
            f"torch {torch.__version__} has no torch.cuda.memory.{missing[0]}, through which cgraph"
            " sees the pools of use_mem_pool: use a torch that this cgraph supports (2.8 to 2.15)"
        )

    def tell(device: int, handle: Handle) -> None:
        for check in _checks:
            check(handle)
        watcher = _watchers.get((threading.get_ident(), device))
        if watcher is not None:
            watcher(handle)

    _count_routes(module, tell)
    # Inductor's graph trees call these directly, and manage their pools themselves.
    _count_routes(torch._C, lambda device, handle: None)


def _count_routes(module: Any, before: Callable[[int, Handle], None]) -> None:
    """Count a module's routes to pools, and call ``before`` when one begins."""
    begin, end = getattr(module, _BEGIN), getattr(module, _END)

    def counted_begin(device: int, handle: Handle) -> None:
        before(device, handle)
        begin(device, handle)
        if _notes_routes.is_set():
            _were_routed.add((handle[0], handle[1]))
        _routed[handle[0], handle[1]] += 1

    def counted_end(device: int, handle: Handle) -> None:
        end(device, handle)
        _routed[handle[0], handle[1]] -= 1
        if _routed[handle[0], handle[1]] <= 0:
            del _routed[handle[0], handle[1]]

    setattr(module, _BEGIN, counted_begin)
    setattr(module, _END, counted_end)
