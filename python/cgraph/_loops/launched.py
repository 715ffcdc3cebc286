"""Runs that one launch makes."""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from cgraph import _driver
from cgraph._loops.capture import CapturedLoop

__all__ = ["Launched"]

# Seconds between two looks, at least and at most; between, a part of the time since the launch.
_SHORTEST, _LONGEST, _PART = 20e-6, 1e-3, 1 / 16

_living: weakref.WeakSet[Launched] = weakref.WeakSet()
# Dropped runs that may not have ended: the device writes to their memory.
_dropped: list[Launched] = []


class Launched:
    """The steps of a run that one launch makes; they are under way from the beginning."""

    def __init__(self, loop: CapturedLoop) -> None:
        self._loop = loop
        self._driver = _driver.current()
        self._header = loop.emitted.header
        self._header.zero_()
        # The number of steps, once it is final.
        self._last: int | None = None
        self._begin = time.perf_counter()
        loop.graph.replay()
        # Nobody else draws these numbers meanwhile.
        self._reserved = [one.get_offset() + most for one, most in loop.draws]
        for (generator, _), offset in zip(loop.draws, self._reserved, strict=True):
            generator.set_offset(offset)
        self._event: Any = None
        if self._driver.device_type == "cuda":
            self._event = torch.cuda.Event(blocking=True)
            self._event.record()
        _living.add(self)

    @property
    def steps(self) -> int:
        """The number of steps that were made so far."""
        return int(self._header[0]) if self._last is None else self._last

    def look(self) -> bool:
        """Return whether the run has ended."""
        if self._last is None:
            if self._event is None:
                self._driver.synchronize()
            elif not self._event.query():
                return False
            self._end()
        return True

    def wait(self) -> None:
        """Return when the run has ended."""
        if self._event is not None:
            self._event.synchronize()
        self.look()

    def stop(self) -> None:
        """Let the run end after the present iteration."""
        if self._last is None:
            self._header[1] = 1

    def drop(self) -> None:
        """End a run that nobody waits for; its memory stays until it has."""
        if self._last is None:
            self.stop()
            _dropped.append(self)
        _dropped[:] = [one for one in _dropped if not one._has_ended()]

    def values(self, begin: int, end: int) -> Sequence[Any]:
        """Return what each of some steps has published."""
        return self._loop.emitted.values(begin, end)

    def pause(self) -> float:
        """Return the seconds until the next look."""
        return min(_LONGEST, max(_SHORTEST, (time.perf_counter() - self._begin) * _PART))

    def _has_ended(self) -> bool:
        with suppress(RuntimeError):  # whoever works on the device next is told
            return self.look()
        return False

    def _end(self) -> None:
        """Let the generators stand behind the steps that were made, unless others have drawn."""
        self._last = self.steps
        found = zip(self._loop.draws, self._reserved, self._loop.emitted.offsets, strict=False)
        for (generator, _), reserved, offset in found:
            if generator.get_offset() == reserved:
                generator.set_offset(offset)


@atexit.register
def _end_all() -> None:
    """Let all runs end, and wait for them, before the interpreter destroys their memory."""
    for one in list(_living):
        one.stop()
    for one in list(_living):
        one.wait()
    _dropped.clear()
