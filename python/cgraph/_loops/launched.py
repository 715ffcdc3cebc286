"""Runs that one launch makes."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from cgraph._loops.capture import CapturedLoop

__all__ = ["Launched"]

# Seconds between two looks, at least and at most; between, a part of the time since the launch.
_SHORTEST, _LONGEST, _PART = 20e-6, 1e-3, 1 / 16

_living: weakref.WeakSet[Launched] = weakref.WeakSet()


class Launched:
    """The steps of a run that one launch makes; they are under way from the beginning.

    Args:
        loop: The loop, of which no run is under way.
        keeps: What must stay until the run has ended, besides the memory of the loop's own.
    """

    def __init__(self, loop: CapturedLoop, keeps: object) -> None:
        self._loop, self._header = loop, loop.emitted.header
        # The number of steps, once it is final.
        self._last: int | None = None
        self._lock = threading.Lock()
        self._header.steps = self._header.stop = 0
        loop.runs += 1
        self._number = loop.runs
        loop.keep(keeps)
        try:
            # Graphs of the pool that were replayed on other streams have the same memory.
            loop.use.last_stream.follow()
            loop.use.lent.overwrite()
            self._begin = time.perf_counter()
            loop.graph.replay()
        except BaseException:
            loop.keep(None)
            raise
        try:
            # So that whoever draws meanwhile gets other numbers.
            self._reserved = [one.get_offset() + most for one, most in loop.draws]
            for (generator, _), offset in zip(loop.draws, self._reserved, strict=True):
                generator.set_offset(offset)
        finally:
            if loop.event is not None:
                loop.event.record()
        _living.add(self)

    @property
    def steps(self) -> int:
        """The number of steps that were made so far."""
        return self._header.steps if self._last is None else self._last

    def has_ended(self) -> bool:
        """Return whether the run has ended."""
        # Threads may ask at a time, and the first one that hears of the end makes it known.
        with self._lock:
            if self._last is None and self._loop.has_passed():
                self._end()
            return self._last is not None

    def go_on(self) -> bool:
        """Return whether the run has ended."""
        return self.has_ended()

    def wait(self) -> None:
        """Return when the run has ended."""
        if self._last is None:
            self._loop.wait()
        self.has_ended()

    def stop(self) -> None:
        """Let the run end after the present iteration."""
        # A finalizer may come late, when a later run is under way.
        if self._last is None and self._number == self._loop.runs:
            self._header.stop = 1

    def values(self, begin: int, end: int) -> Sequence[Any]:
        """Return what each of some steps has published."""
        return self._loop.emitted.values(begin, end)

    def pause(self) -> float:
        """Return the seconds until the next look."""
        return min(_LONGEST, max(_SHORTEST, (time.perf_counter() - self._begin) * _PART))

    def _end(self) -> None:
        """Let the generators stand behind the steps that were made, unless others have drawn."""
        found = zip(self._loop.draws, self._reserved, self._header.offsets, strict=False)
        for (generator, _), reserved, offset in found:
            if generator.get_offset() == reserved:
                generator.set_offset(offset)
        self._last = self._header.steps
        self._loop.keep(None)


@atexit.register
def _end_all() -> None:
    """Let all runs end, and wait for them, before the interpreter destroys their memory."""
    for one in list(_living):
        one.stop()
    for one in list(_living):
        with suppress(RuntimeError):  # there is nobody to tell
            one.wait()
