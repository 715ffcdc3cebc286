"""The streams that join an open capture, seen by watching who waits for whom."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from cgraph import _core

__all__ = ["Forks", "captures"]


class Forks:
    """The side streams of a capture in several segments, on the thread that captures.

    Args:
        stream: The stream that captures.

    Attributes:
        streams: The side streams that have joined a segment so far.
    """

    def __init__(self, stream: Any) -> None:
        self.streams: list[Any] = []
        self._stream = stream

    @contextmanager
    def watched(self) -> Iterator[None]:
        """See the waits of this thread in the ``with`` block."""
        _install()
        before = getattr(_local, "forks", None)
        _local.forks = self
        try:
            yield
        finally:
            _local.forks = before
            _uninstall()

    def join(self) -> None:
        """Let the capturing stream wait for the side streams that capture now."""
        for side in self.streams:
            if captures(side):
                self._stream.wait_stream(side)

    def note(self, stream: Any) -> None:
        """A stream has waited for another one, and may be in the capture therefore."""
        if stream != self._stream and stream not in self.streams and captures(stream):
            self.streams.append(stream)

    def is_joined(self, stream: Any, other: Any) -> bool:
        """Whether a stream that captures was to wait for one that a break has joined.

        CUDA would refuse: what the other one does is not part of the capture any more. The break
        has waited for it.
        """
        return other in self.streams and captures(stream) and not captures(other)


def captures(stream: Any) -> bool:
    """Whether a stream captures, without making it current."""
    if isinstance(stream, _core.Stream):
        return stream.is_capturing()
    device = _core.Device.cuda(stream.device_index)
    return _core.Stream(device, handle=stream.cuda_stream).is_capturing()


_local = threading.local()
_lock = threading.Lock()
_originals: list[tuple[type[Any], str, Any]] = []
_users = 0


def _install() -> None:
    """Watch the methods by which streams wait, for the first user."""
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            for owner, name, watched in _WATCHED:
                original = getattr(owner, name)
                _originals.append((owner, name, original))
                setattr(owner, name, watched(original))


def _uninstall() -> None:
    """Put the methods back, after the last user."""
    global _users
    with _lock:
        _users -= 1
        if _users == 0:
            while _originals:
                setattr(*_originals.pop())


def _wait_stream(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wait_stream(self: Any, stream: Any) -> None:
        forks: Forks | None = getattr(_local, "forks", None)
        if forks is None:
            original(self, stream)
        elif not forks.is_joined(self, stream):
            original(self, stream)
            forks.note(self)

    return wait_stream


def _wait_event(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wait_event(self: Any, event: Any) -> None:
        original(self, event)
        forks: Forks | None = getattr(_local, "forks", None)
        if forks is not None:
            forks.note(self)

    return wait_event


def _wait(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wait(self: Any, stream: Any = None) -> None:
        original(self, stream)
        forks: Forks | None = getattr(_local, "forks", None)
        if forks is not None:
            forks.note(torch.cuda.current_stream() if stream is None else stream)

    return wait


# All ways of torch end in the wait of an event.
_WATCHED: list[tuple[type[Any], str, Callable[..., Any]]] = [
    (_core.Stream, "wait_stream", _wait_stream),
    (_core.Stream, "wait_event", _wait_event),
    (torch.cuda.Stream, "wait_stream", _wait_stream),
    (torch.cuda.Event, "wait", _wait),
]
