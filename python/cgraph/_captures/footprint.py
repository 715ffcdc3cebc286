"""The effects of one capture on the memory of its pool."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from cgraph._source import user_line
from cgraph._text import short_place

if TYPE_CHECKING:
    from cgraph.mempool import MemPool
    from cgraph.timeline import Event, Timeline

__all__ = [
    "Footprint",
    "Meter",
    "PoolSizes",
    "PoolState",
    "in_blocks",
    "is_recording",
    "is_weighing",
    "record_memory",
]


class PoolSizes(NamedTuple):
    """A pool in numbers, at one moment.

    If only the sums of a device are cheap to get, they are those: only changes of the numbers
    count.

    Attributes:
        reserved: Bytes in segments.
        in_use: Bytes in blocks that are in use.
    """

    reserved: int
    in_use: int


class PoolState(NamedTuple):
    """A pool at one moment.

    Attributes:
        segments: Start and bytes of each segment.
        blocks: Start and bytes of each block that is in use.
    """

    segments: list[tuple[int, int]]
    blocks: list[tuple[int, int]]

    @property
    def reserved(self) -> int:
        """Bytes of all segments."""
        return sum(size for _, size in self.segments)

    @property
    def in_use(self) -> int:
        """Bytes of all blocks that are in use."""
        return sum(size for _, size in self.blocks)

    def free(self) -> list[tuple[int, int]]:
        """Return start and bytes of each part of a segment without a block in use."""
        found = []
        blocks = sorted(self.blocks)
        for start, size in self.segments:
            here = start
            for block, taken in blocks:
                if not start <= block < start + size:
                    continue
                if block > here:
                    found.append((here, block - here))
                here = block + taken
            if here < start + size:
                found.append((here, start + size - here))
        return found


class Footprint(NamedTuple):
    """The effects of one capture on its pool, and its seconds.

    Attributes:
        reserved: Bytes by which its pool's segments grew.
        held: Bytes of the blocks that it allocated and that were in use at its end. On CUDA blocks
            that other threads allocated meanwhile count too, unless :func:`record_memory` was on.
        workspace: Bytes of library workspaces that it took from the pool and gave back at its end.
        timeline: Its blocks in order, if :func:`record_memory` was on.
        where: The line that began it.
        seconds: From its begin to its end.

    The bytes are None if it was not weighed, but those reserved in a pool of cgraph's.
    """

    reserved: int | None
    held: int | None
    workspace: int | None
    timeline: Timeline | None
    where: str
    seconds: float

    @property
    def is_weighed(self) -> bool:
        """True if bytes of it were measured."""
        return self.held is not None

    @property
    def peak(self) -> int | None:
        """The most bytes in blocks at once, including earlier blocks; None if not recorded."""
        return None if self.timeline is None else self.timeline.peak


class Meter:
    """A meter of a capture, or of several in a row, from construction to :meth:`finish`.

    Args:
        mem_pool: The pool, if it is cgraph's.
        weigh: Returns the pool in numbers, at a cost that does not grow with the pool.
        look: Returns the pool's state; called only if the blocks are recorded.
        is_on: Measure bytes whether or not :func:`is_weighing`.
    """

    def __init__(
        self,
        mem_pool: MemPool | None,
        weigh: Callable[[], PoolSizes],
        look: Callable[[], PoolState],
        *,
        is_on: bool = False,
    ) -> None:
        self._mem_pool = mem_pool
        self._look = look
        self._weigh = weigh
        self._where = user_line() or "?"
        self._blocks: list[tuple[int, int]] = []
        if is_recording():
            self._weigh = functools.partial(_weighed_closely, look)
            self._blocks = look().blocks
        self._before = self._weigh() if is_on or is_weighing() else None
        self._reserved = self._reserved_now()
        self._began = time.perf_counter()

    def restart(self) -> None:
        """Go on with the next capture of several in a row; the last one sums up."""
        self._began = time.perf_counter()

    def finish(
        self,
        release_workspaces: Callable[[], None],
        events: Callable[[], list[Event] | None],
        *,
        goes_on: bool = False,
    ) -> Footprint:
        """Return the footprint of the capture, which has ended.

        Args:
            release_workspaces: Releases library workspaces.
            events: Returns the events of the pool since the begin, if they were recorded.
            goes_on: Another capture resumes this one, and has the bytes of both.
        """
        seconds = time.perf_counter() - self._began
        if self._before is None:
            release_workspaces()
            now = self._reserved_now()
            grown = None if now is None or self._reserved is None else now - self._reserved
            return Footprint(grown, None, None, None, self._where, seconds)
        if goes_on and not is_recording():
            release_workspaces()
            return Footprint(0, 0, 0, None, self._where, seconds)
        with_workspaces = self._weigh()
        release_workspaces()
        after = self._weigh()
        recorded = events()
        return Footprint(
            reserved=max(0, after.reserved - self._before.reserved),
            held=max(0, after.in_use - self._before.in_use),
            workspace=max(0, with_workspaces.in_use - after.in_use),
            timeline=None if recorded is None else self._timeline(self._look(), recorded),
            where=self._where,
            seconds=seconds,
        )

    def _reserved_now(self) -> int | None:
        return None if self._mem_pool is None else self._mem_pool._core.reserved

    def _timeline(self, after: PoolState, events: list[Event]) -> Timeline:
        """Return the blocks of this capture; the pool's timeline goes on with them."""
        from cgraph.timeline import Event, Timeline

        marks, before = ((0, short_place(self._where)),), self._blocks
        title = "pool" if self._mem_pool is None else self._mem_pool.name
        timeline = Timeline.of(title, after.segments, events, before, marks)
        if self._mem_pool is not None:
            earlier = self._mem_pool._timeline
            if earlier is not None:
                # Blocks that ended since then are known only by their absence.
                here = {address for address, _ in before}
                ended = [
                    Event("free", span.address, span.bytes)
                    for span in earlier.spans
                    if span.end is None and span.address not in here
                ]
                between = Timeline.of(title, after.segments, ended)
                earlier = earlier.joined(between).joined(timeline)
            self._mem_pool._timeline = earlier or timeline
        return timeline


def in_blocks(size: int) -> int:
    """Return the bytes of a block for a request. The rest of a larger block may come on top."""
    return -(-size // _BLOCK_BYTES) * _BLOCK_BYTES


_BLOCK_BYTES = 512
# The open blocks of :func:`record_memory`: all, and those that record each block of memory.
_weighers = _recorders = 0
_counting = threading.Lock()


def is_recording() -> bool:
    """Return whether :func:`record_memory` records blocks."""
    return _recorders > 0


def is_weighing() -> bool:
    """Return whether :func:`record_memory` is on."""
    return _weighers > 0


@contextmanager
def record_memory(*, blocks: bool = True) -> Iterator[None]:
    """Measure the bytes of all captures that begin inside the ``with`` block, in all threads.

    ``graph.memory()`` has ``held``, ``workspace`` and ``exec`` of graphs captured there. Those of
    other graphs are None: to measure them takes as long as a small capture. Captures inside of
    :func:`cgraph.capture_scope` are measured, too, and those that cgraph makes by itself, as of a
    graphed function.

    Args:
        blocks: Also record each block of memory, so that graphs know the most bytes that were in
            blocks at once, and can draw them: ``graph.memory().plot("pool.svg")``. On CUDA this
            turns on torch's own record of its allocator, without stacks, during each capture; a
            record that is already on is left alone and used.
    """
    global _weighers, _recorders
    with _counting:
        _weighers += 1
        _recorders += blocks
    try:
        yield
    finally:
        with _counting:
            _weighers -= 1
            _recorders -= blocks


# No method: a meter that referred to itself would keep the pool.
def _weighed_closely(look: Callable[[], PoolState]) -> PoolSizes:
    state = look()
    return PoolSizes(state.reserved, state.in_use)
