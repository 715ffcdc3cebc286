"""A function's use of streams and waits, seen through its calls in Python.

Each stream has a clock: for every stream, the amount of that stream's work that comes before its
own next work. A wait merges the clock of the other stream. So it is known at the end which forked
work nothing has waited for.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from cgraph import _core
from cgraph._driver import Driver
from cgraph._explanation.findings import Log
from cgraph._source import Place
from cgraph.causes import Cause

__all__ = ["Streams"]

_Clock = dict[Any, int]


class Streams:
    """The streams of one thread, with their clocks.

    Args:
        driver: The driver of the streams.
        log: Receives the findings.
        here: Returns the user's line.
    """

    def __init__(self, driver: Driver, log: Log, here: Callable[[], Place]) -> None:
        self._driver = driver
        self._log = log
        self._here = here
        self._origin = driver.current_stream()
        self._default = _default_stream(driver)
        self._clocks: dict[Any, _Clock] = {self._origin: {self._origin: 1}}
        self._events: dict[int, tuple[object, _Clock]] = {}  # events keep their ids
        self._forked: dict[Any, tuple[str, Place]] = {}

    def work(self, operator: str, place: Place) -> None:
        """Note work on the current stream."""
        stream = self._driver.current_stream()
        if stream == self._origin:
            return
        clock = self._clock(stream)
        clock[stream] = clock.get(stream, 0) + 1
        if self._is_of_capture(clock):
            self._forked[stream] = (operator, place)
        else:
            self._log.add(Cause.OUTSIDE_STREAM, operator, place)

    def record(self, event: object, stream: Any) -> None:
        """Note that an event is recorded on a stream."""
        self._events[id(event)] = (event, dict(self._clock(stream)))

    def wait_event(self, event: object, stream: Any) -> None:
        """Note that a stream waits for an event; an event recorded earlier is not known."""
        if id(event) in self._events:
            self._wait(stream, self._events[id(event)][1])

    def wait_stream(self, other: Any, stream: Any) -> None:
        """Note that a stream waits for another."""
        self._wait(stream, self._clock(other))

    def finish(self) -> None:
        """Note the forked work that the first stream has not waited for."""
        seen = self._clock(self._origin)
        for stream, (operator, place) in self._forked.items():
            if seen.get(stream, 0) < self._clock(stream)[stream]:
                self._log.add(Cause.UNJOINED_STREAM, operator, place)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note waits and the calls that order streams, on this thread."""
        thread, inside = threading.get_ident(), [False]

        def watch(owner: Any, name: str, note: Callable[..., None]) -> None:
            original = vars(owner)[name]

            @functools.wraps(original)
            def watched(*args: Any, **kwargs: Any) -> Any:
                if inside[0] or threading.get_ident() != thread:
                    return original(*args, **kwargs)
                inside[0] = True
                try:
                    result = original(*args, **kwargs)
                finally:
                    inside[0] = False
                note(result, *args, **kwargs)
                return result

            setattr(owner, name, watched)
            stack.callback(setattr, owner, name, original)

        with ExitStack() as stack:
            for owner, owner_name, names in _waits(self._driver):
                for name in names:
                    watch(owner, name, functools.partial(self._waited, f"{owner_name}.{name}"))
            if self._driver.device_type == "cuda":
                watch(torch.cuda.Event, "record", self._event_recorded)
                watch(torch.cuda.Event, "wait", self._event_waited)
            else:
                watch(_core.Stream, "record_event", lambda _, s, event: self.record(event, s))
                watch(_core.Stream, "wait_event", lambda _, s, event: self.wait_event(event, s))
                watch(_core.Stream, "wait_stream", lambda _, s, other: self.wait_stream(other, s))
            yield

    def _waited(self, operator: str, *_args: object, **_kwargs: object) -> None:
        self._log.add(Cause.WAIT, operator, self._here())

    def _event_recorded(self, _result: object, event: object, stream: Any = None) -> None:
        self.record(event, stream or torch.cuda.current_stream())

    def _event_waited(self, _result: object, event: object, stream: Any = None) -> None:
        self.wait_event(event, stream or torch.cuda.current_stream())

    def _wait(self, stream: Any, other: _Clock) -> None:
        clock = self._clock(stream)
        if stream == self._default and self._is_of_capture(other):
            self._log.add(Cause.DEFAULT_STREAM, "Stream.wait", self._here())
            return
        if self._is_of_capture(clock) and not self._is_of_capture(other):
            self._log.add(Cause.OUTSIDE_WAIT, "Stream.wait", self._here())
            return
        for one, time in other.items():
            clock[one] = max(clock.get(one, 0), time)

    def _clock(self, stream: Any) -> _Clock:
        return self._clocks.setdefault(stream, {})

    def _is_of_capture(self, clock: _Clock) -> bool:
        """Return whether work with this clock comes after the beginning of the capture."""
        return self._origin in clock


def _default_stream(driver: Any) -> Any:
    return torch.cuda.default_stream() if driver.device_type == "cuda" else driver.default_stream


def _waits(driver: Driver) -> list[tuple[Any, str, tuple[str, ...]]]:
    """Return owners of methods that wait for the device or ask it, their names, and the methods."""
    of_both = ("synchronize", "query")
    if driver.device_type != "cuda":
        return [
            (type(driver), "Simulator", ("synchronize",)),
            (_core.Stream, "Stream", of_both),
            (_core.Event, "Event", of_both),
        ]
    return [
        (torch.cuda, "torch.cuda", ("synchronize",)),
        (torch.accelerator, "torch.accelerator", ("synchronize",)),
        (torch.cuda.Stream, "Stream", of_both),
        (torch.cuda.Event, "Event", (*of_both, "elapsed_time")),
    ]
