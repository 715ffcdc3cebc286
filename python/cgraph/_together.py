"""Graphs that are captured one after the other and instantiated at the same time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from cgraph import _core
from cgraph._keys import Key
from cgraph._limits import Limits
from cgraph._recorded import Recorded
from cgraph.cudagraph import CUDAGraph

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
        """Instantiate all; those for which that fails are let go, and the first error comes out."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        began = time.perf_counter()
        errors = _errors([recorded for _, recorded in waiting])
        seconds = (time.perf_counter() - began) / len(waiting)
        first: Exception | None = None
        for (key, recorded), error in zip(waiting, errors, strict=True):
            key.capture_seconds += seconds
            if error is None:
                recorded.was_instantiated()
                continue
            self._drop(key, "eager")
            first = first or error
        if first is not None:
            raise first


def _errors(waiting: list[Recorded]) -> list[Exception | None]:
    """Instantiate all; for each an error or None."""
    graphs = [one.graph for one in waiting if isinstance(one.graph, CUDAGraph)]
    try:
        return _core.instantiate_all(graphs, _THREADS)
    except Exception as error:
        return [error] * len(waiting)


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
