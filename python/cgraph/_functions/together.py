"""Graphs that are captured one after the other and instantiated at the same time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from cgraph import _core
from cgraph._functions.failures import failure_of
from cgraph._functions.keys import Key
from cgraph._functions.limits import Limits
from cgraph._recording.recorded import Recorded
from cgraph.cudagraph import CUDAGraph
from cgraph.errors import add_note

__all__ = ["Together", "instantiated_together"]

# 51 graphs of 390 nodes took 85 ms in one thread, 32 in four and 36 in eight.
_THREADS = 4


class Together:
    """Graphs that are captured, and are to be instantiated and held by their keys.

    Args:
        limits: What knows the keys, and lets their graphs go.
        last: Ends what is left of them, whatever comes.

    Attributes:
        holds: Whether the graphs are held only then. What is held of a call's own stays until then.
    """

    def __init__(self, limits: Limits, last: ExitStack) -> None:
        self.holds = False
        self._limits = limits
        self._last = last
        self._makings: deque[Callable[[], None]] = deque()
        self._waiting: deque[_Waiting] = deque()
        # Those that were to be instantiated, and beside them errors of what could not be made.
        self._tried: list[_Waiting] = []
        self._order: list[_Waiting | Exception] = []

    def add(self, key: Key, recorded: Recorded, hold: Callable[[], None]) -> None:
        """Let a graph wait for :meth:`instantiate`.

        Args:
            key: Its key.
            recorded: The graph.
            hold: Lets the key have it, at once or in the end: right after a capture, none of what
                that takes is in the processor's cache. Then all are held one after the other, while
                threads instantiate.
        """
        one = _Waiting(key, recorded, hold if self.holds else None)
        self._last.callback(self._end, one)
        if not self.holds:
            self._limits.hold_unless_gone(key, recorded, hold)
        key.is_awaited = self.holds
        self._waiting.append(one)

    def make_later(self, make: Callable[[], None]) -> None:
        """Let a graph be made while threads instantiate others.

        Args:
            make: Makes it, and adds it.
        """
        self._makings.append(make)

    @property
    def keys(self) -> set[Key]:
        """Those whose graphs wait for an exec, or for :meth:`finish`."""
        return {one.key for one in (*self._waiting, *self._tried) if one.hold is not None}

    def instantiate(self) -> None:
        """Make and instantiate all. :meth:`finish` tells of errors, one by one.

        Raises:
            DriverError: The driver does not tell of its memory; no graph is instantiated then.
        """
        began, before = time.perf_counter(), len(self._tried)
        try:
            errors = _core.instantiate_all(self._graphs(), _THREADS)
        except BaseException:
            del self._tried[before:]
            # They cannot be made elsewhere than where their captures were.
            self._makings.clear()
            raise
        tried = self._tried[before:]
        seconds = (time.perf_counter() - began) / max(1, len(tried))
        for one, error in zip(tried, errors, strict=True):
            one.key.capture_seconds += seconds
            one.error = error or one.error

    def drop_failed(self) -> None:
        """Let the graphs go that have no exec, or that no key is to have any more.

        No hook of another one is to find them. It runs destroy callbacks.
        """
        for one in self._tried:
            if one.error is not None or one.key.recorded is not one.recorded:
                self._let_go(one)

    def finish(self) -> None:
        """Instantiate all that wait, and run hooks. Those for which that fails are let go.

        Raises:
            Exception: The first error.
        """
        self.instantiate()
        self.drop_failed()
        tried, self._tried = self._tried, []
        for one in tried:
            self._go_on(one)
        order, self._order = self._order, []
        found = (one.error if isinstance(one, _Waiting) else one for one in order)
        errors = [error for error in found if error is not None]
        order.clear()
        for one in tried:
            one.error = None
        if errors:
            try:
                raise errors[0]
            finally:
                # What it has come through is not to keep it, and arguments with it.
                errors.clear()

    def _graphs(self) -> Iterator[CUDAGraph]:
        """The graphs that are to be instantiated. All are held in the end."""
        before = len(self._tried)
        while self._waiting or self._makings:
            if self._waiting:
                one = self._waiting.popleft()
                if self._is_wanted(one):
                    self._tried.append(one)
                    self._order.append(one)
                    yield one.recorded.whole
                continue
            try:
                self._makings.popleft()()
            except Exception as error:
                self._order.append(error)
        for one in self._tried[before:]:
            # To let another one go may have run a callback that forgets all.
            if one.hold is not None and self._is_wanted(one):
                try:
                    one.hold()
                except Exception as error:
                    one.error = error

    def _is_wanted(self, one: _Waiting) -> bool:
        """Whether no callback has captured the key again, or let it be forgotten."""
        if one.hold is None:
            return one.key.recorded is one.recorded
        return one.key.recorded is None and self._limits.knows(one.key)

    def _go_on(self, one: _Waiting) -> None:
        """Run the hooks of a graph that is ready, which may let it go, or put it away."""
        graph = one.recorded.whole
        try:
            if one.error is None and one.key.has_exec_of(one.recorded):
                graph._run_hooks("instantiate")
            if one.error is None and one.key.recorded is one.recorded:
                graph.capture_end_post()
        except Exception as error:
            one.error = error
        if one.error is None:
            one.is_done = True
        else:
            if one.key.recorded is None or one.key.recorded is one.recorded:
                one.key.has_failed(failure_of(one.error))
            add_note(one.error, f"cgraph: the graph was that of the key ({one.key.text})")

    def _end(self, one: _Waiting) -> None:
        one.key.is_awaited = False
        if not one.is_done:
            self._let_go(one)

    def _let_go(self, one: _Waiting) -> None:
        if one.key.recorded is one.recorded:
            self._limits.drop(one.key, "eager")
        else:
            one.recorded.reset()


@dataclass
class _Waiting:
    """A graph without an exec.

    Attributes:
        key: Its key.
        recorded: The graph.
        hold: Lets the key have it; None if it has.
        error: Why the key cannot have it.
        is_done: Whether the key has it for good, or somebody has let it go.
    """

    key: Key
    recorded: Recorded
    hold: Callable[[], None] | None
    error: Exception | None = None
    is_done: bool = False


@contextmanager
def instantiated_together(limits: Limits, count: int) -> Iterator[Together | None]:
    """What collects the graphs of so many keys, and instantiates them at the end of the block.

    No call of another thread finds them before: the one that captures has the function's turn.

    None if some of them might have to go before. What the block raises comes out, and what it has
    captured until then is instantiated all the same.
    """
    if not limits.have_room(count):
        yield None
        return
    with ExitStack() as last:
        together = Together(limits, last)
        try:
            yield together
        except BaseException as error:
            try:
                together.finish()
            except Exception as earlier:
                add_note(error, f"cgraph: a graph that was captured before failed, too: {earlier}")
            raise
        together.finish()
