"""Graphs that are captured one after the other and instantiated at the same time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from cgraph import _core
from cgraph._keys import Key
from cgraph._limits import Limits
from cgraph._recorded import Recorded
from cgraph.errors import add_note

__all__ = ["Together", "instantiated_together"]

# 51 graphs of 390 nodes took 85 ms in one thread, 32 in four and 36 in eight.
_THREADS = 4


class Together:
    """Keys whose graphs are captured, and are to be instantiated.

    Args:
        drop: Lets the graph of a key go.
    """

    def __init__(self, drop: Callable[[Key, str], None]) -> None:
        self._drop = drop
        self._waiting: list[tuple[Key, Recorded]] = []

    def add(self, key: Key, recorded: Recorded) -> None:
        """Let a key wait for :meth:`finish`."""
        self._waiting.append((key, recorded))

    def finish(self) -> None:
        """Instantiate all. Those for which that fails are let go, and the first error comes out."""
        # Some may have been let go meanwhile, by hooks.
        waiting = deque(one for one in self._waiting if one[0].recorded is one[1])
        self._waiting = []
        failures: list[Exception] = []
        try:
            began = time.perf_counter()
            errors = _core.instantiate_all([one.whole for _, one in waiting], _THREADS)
            seconds = (time.perf_counter() - began) / max(1, len(waiting))
            for error in errors:
                key, recorded = waiting[0]
                key.capture_seconds += seconds
                try:
                    if error is not None:
                        raise error
                    recorded.was_instantiated()
                except Exception as failure:
                    self._drop(key, "eager")
                    add_note(failure, f"cgraph: the graph was that of the key ({key.text})")
                    failures.append(failure)
                waiting.popleft()
        finally:
            for key, _ in waiting:
                self._drop(key, "eager")
        if failures:
            raise failures[0]


@contextmanager
def instantiated_together(limits: Limits, count: int) -> Iterator[Together | None]:
    """What collects the graphs of so many keys, and instantiates them at the end of the block.

    None if some of them might have to go before. What the block raises comes out, and what it has
    captured until then is instantiated all the same.
    """
    if not limits.have_room(count):
        yield None
        return
    together = Together(limits.drop)
    try:
        yield together
    except BaseException:
        with suppress(Exception):
            together.finish()
        raise
    together.finish()
