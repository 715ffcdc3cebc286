"""Graphs that are captured one after the other and instantiated at the same time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import NamedTuple

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

    def add(
        self,
        key: Key,
        recorded: Recorded,
        make: Callable[[], _core.Entry],
        keep: Callable[[_core.Entry], None],
    ) -> None:
        """Let a graph wait for :meth:`finish`.

        Args:
            key: Its key.
            recorded: The graph.
            make: Makes the entry of its calls, at once or in the end. All are made one after the
                other then, while threads instantiate: right after a capture, none of what that
                takes is in the processor's cache.
            keep: Lets the key have it, with such an entry.
        """
        if not self.holds:
            self._limits.hold_unless_gone(key, recorded, make, keep)
        key.is_awaited = self.holds
        self._waiting.append(_Waiting(key, recorded, make, keep, holds=self.holds))

    def finish(self) -> None:
        """Instantiate all. Those for which that fails are let go, and the first error comes out."""
        # Some that were held may have been let go meanwhile, by hooks.
        waiting = [one for one in self._waiting if one.holds or one.key.recorded is one.recorded]
        self._waiting = []
        failures: list[Exception] = []
        done = 0
        try:
            made, seconds = _made(waiting)
            for one, entry in zip(waiting, made, strict=True):
                one.key.capture_seconds += seconds
                try:
                    self._hold(one, entry)
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

    def _hold(self, one: _Waiting, entry: _core.Entry | Exception | None) -> None:
        if isinstance(entry, Exception):
            raise entry
        one.recorded.was_instantiated()
        if entry is not None:
            self._limits.hold_unless_gone(one.key, one.recorded, lambda: entry, one.keep)

    def _let_go(self, one: _Waiting) -> None:
        if one.key.recorded is one.recorded:
            self._limits.drop(one.key, "eager")
        else:
            one.recorded.reset()


class _Waiting(NamedTuple):
    key: Key
    recorded: Recorded
    make: Callable[[], _core.Entry]
    keep: Callable[[_core.Entry], None]
    holds: bool


def _made(waiting: Sequence[_Waiting]) -> tuple[list[_core.Entry | Exception | None], float]:
    """Instantiate graphs; for each its entry, None if it is held, or an error; seconds of each."""
    began = time.perf_counter()
    graphs = [one.recorded.whole for one in waiting]
    with ThreadPoolExecutor(1, "cgraph") as aside:
        instantiating = aside.submit(_core.instantiate_all, graphs, _THREADS)
        entries = [_entry(one) if one.holds else None for one in waiting]
        errors = instantiating.result()
    seconds = (time.perf_counter() - began) / max(1, len(waiting))
    return [error or entry for error, entry in zip(errors, entries, strict=True)], seconds


def _entry(one: _Waiting) -> _core.Entry | Exception:
    try:
        return one.make()
    except Exception as error:
        return error


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
