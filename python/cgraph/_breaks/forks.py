"""The streams that join an open capture, found by watching which stream waits for which."""

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
        self._joined: list[Any] = []
        self._segment = 0
        self._recorded: dict[int, tuple[Any, int]] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the waits of this thread in the ``with`` block."""
        _install()
        before = getattr(_local, "forks", None)
        _local.forks = self
        try:
            yield
        finally:
            _local.forks = before
            _uninstall()

    def begin(self) -> None:
        """Begin a segment: the streams of the previous one belong to it as well.

        In eager their work could go on where it was.
        """
        self._segment += 1
        joined, self._joined = self._joined, []
        for side in joined:
            side.wait_stream(self._stream)
        self._joined = joined

    def end(self, is_last: bool) -> None:
        """Let the capturing stream wait for the others, except those that the user must join."""
        sides = self._joined if is_last else self.streams
        self._joined = [side for side in sides if captures(side)]
        for side in self._joined:
            self._stream.wait_stream(side)

    def note(self, stream: Any) -> None:
        """Note that a stream has waited for another one, and may be in the capture therefore."""
        if stream == self._stream or not captures(stream):
            return
        if stream not in self.streams:
            self.streams.append(stream)
        if stream in self._joined:
            self._joined.remove(stream)

    def note_record(self, stream: Any, event: Any) -> None:
        """Note that an event was recorded."""
        self._recorded.pop(id(event), None)
        if stream == self._stream or stream in self.streams:
            # Kept with the event, whose id is unique only while it lives.
            self._recorded[id(event)] = (event, self._segment)

    def is_past(self, stream: Any, event: Any) -> bool:
        """Return whether a stream was to wait for an event of an earlier segment.

        CUDA would refuse. A stream that does not capture joins this segment instead.
        """
        if self._recorded.get(id(event), (event, self._segment))[1] == self._segment:
            return False
        if captures(stream):
            return True
        if not captures(self._stream):
            return False
        stream.wait_stream(self._stream)
        return True


def captures(stream: Any) -> bool:
    """Return whether a stream captures, without making it current."""
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
    """Restore the methods, after the last user."""
    global _users
    with _lock:
        _users -= 1
        if _users == 0:
            while _originals:
                setattr(*_originals.pop())


def _wait_stream(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wait_stream(self: Any, stream: Any) -> None:
        original(self, stream)
        forks = _forks()
        if forks is not None:
            forks.note(self)

    return wait_stream


def _wait_event(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wait_event(self: Any, event: Any) -> None:
        _wait(original, self, event, (self, event))

    return wait_event


def _event_wait(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wait(self: Any, stream: Any = None) -> None:
        stream = torch.cuda.current_stream() if stream is None else stream
        _wait(original, stream, self, (self, stream))

    return wait


def _wait(original: Callable[..., Any], stream: Any, event: Any, args: tuple[Any, Any]) -> None:
    """Let a stream wait for an event, with the arguments of the method in their order."""
    forks = _forks()
    if forks is None:
        original(*args)
    elif not forks.is_past(stream, event):
        original(*args)
        forks.note(stream)


def _record_event(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def record_event(self: Any, event: Any) -> None:
        original(self, event)
        forks = _forks()
        if forks is not None:
            forks.note_record(self, event)

    return record_event


def _event_record(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def record(self: Any, stream: Any = None) -> None:
        stream = torch.cuda.current_stream() if stream is None else stream
        original(self, stream)
        forks = _forks()
        if forks is not None:
            forks.note_record(stream, self)

    return record


def _forks() -> Forks | None:
    forks: Forks | None = getattr(_local, "forks", None)
    return forks


# Torch's streams wait through the methods of events.
_WATCHED: list[tuple[type[Any], str, Callable[..., Any]]] = [
    (_core.Stream, "wait_stream", _wait_stream),
    (_core.Stream, "wait_event", _wait_event),
    (_core.Stream, "record_event", _record_event),
    (torch.cuda.Event, "wait", _event_wait),
    (torch.cuda.Event, "record", _event_record),
]
