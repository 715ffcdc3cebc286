"""Graphs that are captured one after the other and instantiated at the same time."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from cgraph import _core
from cgraph._functions.keys import Key
from cgraph._functions.limits import Limits
from cgraph._recording.recorded import Recorded
from cgraph.errors import add_note

__all__ = ["Together", "instantiated_together"]

# 51 graphs of 390 nodes took 85 ms in one thread, 32 in four and 36 in eight.
_THREADS = 4


class Together:
    """Graphs that are captured, and are to be instantiated and held by their keys.

    Args:
        limits: What knows the keys, and lets their graphs go.

    Attributes:
        holds: Whether the graphs are held only then. What is held of a call's own stays until then.
    """

    def __init__(self, limits: Limits) -> None:
        self.holds = False
        self._limits = limits
        self._waiting: list[_Waiting] = []

    def add(self, key: Key, recorded: Recorded, hold: Callable[[], None]) -> None:
        """Let a graph wait for :meth:`finish`.

        Args:
            key: Its key.
            recorded: The graph.
            hold: Lets the key have it, at once or in the end. All are held one after the other
                then, while threads instantiate: right after a capture, none of what that takes is
                in the processor's cache.
        """
        if not self.holds:
            self._limits.hold_unless_gone(key, recorded, hold)
        key.is_awaited = self.holds
        self._waiting.append(_Waiting(key, recorded, hold if self.holds else None))

    def finish(self) -> None:
        """Instantiate all. Those for which that fails are let go, and the first error comes out."""
        # Some that were held may have been let go meanwhile, by hooks.
        waiting = [one for one in self._waiting if one.hold or one.key.recorded is one.recorded]
        self._waiting = []
        failures: list[Exception] = []
        done = 0
        try:
            began = time.perf_counter()
            graphs = [one.recorded.whole for one in waiting]
            hold = functools.partial(self._hold, waiting)
            errors = _core.instantiate_all(graphs, _THREADS, hold)
            seconds = (time.perf_counter() - began) / max(1, len(waiting))
            for one, error in zip(waiting, errors, strict=True):
                one.key.capture_seconds += seconds
                try:
                    self._go_on(one, error)
                except Exception as failure:
                    self._let_go(one)
                    add_note(failure, f"cgraph: the graph was that of the key ({one.key.text})")
                    failures.append(failure)
                done += 1
        finally:
            for one in waiting:
                one.key.is_awaited = False
            for one in waiting[done:]:
                self._let_go(one)
        if failures:
            raise failures[0]

    def _hold(self, waiting: list[_Waiting]) -> None:
        for one in waiting:
            if one.hold is not None:
                try:
                    self._limits.hold_unless_gone(one.key, one.recorded, one.hold)
                except Exception as error:
                    one.error = error

    def _go_on(self, one: _Waiting, error: Exception | None) -> None:
        if one.error is not None:
            raise one.error
        # Hooks may have captured its key, or let it be forgotten.
        if one.key.recorded is one.recorded:
            if error is not None:
                raise error
            one.recorded.was_instantiated()

    def _let_go(self, one: _Waiting) -> None:
        if one.key.recorded is one.recorded:
            self._limits.drop(one.key, "eager")
        else:
            one.recorded.reset()


@dataclass
class _Waiting:
    """A graph without an exec; ``error`` is what its key was not given it for."""

    key: Key
    recorded: Recorded
    hold: Callable[[], None] | None
    error: Exception | None = None


@contextmanager
def instantiated_together(limits: Limits, count: int) -> Iterator[Together | None]:
    """What collects the graphs of so many keys, and instantiates them at the end of the block.

    Until then the keys do not hold them.

    None if some of them might have to go before. What the block raises comes out, and what it has
    captured until then is instantiated all the same.
    """
    if not limits.have_room(count):
        yield None
        return
    together = Together(limits)
    try:
        yield together
    except BaseException:
        with suppress(Exception):
            together.finish()
        raise
    together.finish()
