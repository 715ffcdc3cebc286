"""The timeline of a memory pool: the life of its blocks, over the order of a capture.

A pool's memory is laid out once, while a graph is captured, and stays so for all replays. The order
of allocations and frees therefore counts, not the clock.

>>> events = [Event("alloc", 0, 512), Event("alloc", 512, 1024), Event("free", 0, 512)]
>>> timeline = Timeline.of("pool", [(0, 2048)], events)
>>> timeline.peak, timeline.held, timeline.reserved
(1536, 1024, 2048)
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate
from os import PathLike, fspath
from pathlib import Path
from typing import Literal

from cgraph.errors import ArgumentError

__all__ = ["Action", "Event", "Segment", "Span", "Timeline"]


Action = Literal["alloc", "free"]
"""The possible actions on a block."""


@dataclass(frozen=True)
class Event:
    """One action on a pool, in order.

    Attributes:
        action: The action on the block.
        address: The start of the block.
        bytes: The size of the block.
        stream: The stream that it was allocated for.
        label: The origin, as in ``captured at model.py:33``, or an operator; may be empty.
        frames: The lines of the user's Python, the innermost last, as ``file:line function``.
    """

    action: Action
    address: int
    bytes: int
    stream: int = 0
    label: str = ""
    frames: tuple[str, ...] = ()


@dataclass(frozen=True)
class Span:
    """A block from its allocation to its end.

    Attributes:
        address: Its start.
        bytes: Its size.
        begin: The index of the event that allocated it; for an earlier block, of the first event.
        end: The index of the event that ended it; None if it is alive at the end (held).
        stream: The stream that it was allocated for.
        label: Its origin; may be empty.
        before: True if it was there before the event ``begin``.
        frames: The lines of the user's Python that allocated it, the innermost last.
    """

    address: int
    bytes: int
    begin: int
    end: int | None
    stream: int
    label: str
    before: bool = False
    frames: tuple[str, ...] = ()


@dataclass(frozen=True)
class Segment:
    """A region of device memory that a pool's blocks lie in.

    Attributes:
        address: Its start.
        bytes: Its size.
    """

    address: int
    bytes: int


@dataclass(frozen=True)
class Timeline:
    """The blocks of one pool over the order of events.

    Attributes:
        title: The pool's name in the drawing.
        segments: The pool's memory by address, without overlaps.
        spans: The blocks by their begin; earlier blocks come first.
        length: Number of events.
        marks: Beginnings, such as that of a capture: index of the event, and a text.
    """

    title: str
    segments: tuple[Segment, ...]
    spans: tuple[Span, ...]
    length: int
    marks: tuple[tuple[int, str], ...] = ()

    @classmethod
    def of(
        cls,
        title: str,
        segments: Iterable[tuple[int, int]],
        events: Iterable[Event],
        before: Iterable[tuple[int, int]] = (),
        marks: Iterable[tuple[int, str]] = (),
    ) -> Timeline:
        """Find the blocks in a pool's events.

        A block that is freed and was never allocated here was there before. Events outside all
        segments, and a second free of the same block, count as events but belong to no block.

        Args:
            title: The pool's name in the drawing.
            segments: Address and bytes of each of the pool's segments.
            events: The events, in order.
            before: Address and bytes of each block that was alive before the first event.
            marks: Index of an event, and a text to write there.
        """
        memory = _merged(Segment(*segment) for segment in segments)
        alive, spans = _Alive(), list[Span]()
        seen = set()
        for address, count in dict(before).items():
            if _inside(memory, address, count):
                alive.add(Span(address, count, 0, None, 0, "", before=True))
        length = 0
        for index, event in enumerate(events):
            length += 1
            where = (event.address, event.bytes)
            first = event.address not in seen
            seen.add(event.address)
            if event.action == "free" and (known := alive.pop(event.address)):
                spans.append(replace(known, end=index))
            elif not _inside(memory, *where):
                continue
            elif event.action == "alloc":
                # Memory is in one block at a time: an overlapping block was freed without an event,
                # for example between two recordings.
                spans += [replace(old, end=index) for old in alive.take(*where)]
                made = Span(*where, index, None, event.stream, event.label, frames=event.frames)
                alive.add(made)
            elif first:
                spans.append(Span(*where, 0, index, event.stream, event.label, before=True))
        return cls(title, memory, _in_order([*spans, *alive.all()]), length, tuple(marks))

    @property
    def peak(self) -> int:
        """The most bytes in blocks at once."""
        return max(self.in_use())

    @property
    def held(self) -> int:
        """The bytes of the blocks that are alive at the end."""
        return sum(span.bytes for span in self.spans if span.end is None)

    @property
    def reserved(self) -> int:
        """The bytes of all segments."""
        return sum(segment.bytes for segment in self.segments)

    def in_use(self) -> list[int]:
        """Return bytes in blocks, before the first event and after each: one more than events."""
        changes = [0] * (self.length + 2)
        for span in self.spans:
            begin, end = self.steps(span)
            changes[begin] += span.bytes
            changes[end] -= span.bytes
        return list(accumulate(changes[:-1]))

    def steps(self, span: Span) -> tuple[int, int]:
        """Return the first step in which a block lives, and the first in which it no longer does.

        Step 0 is before the first event, step ``i + 1`` after the event ``i``. Every block lives
        for at least one step.
        """
        begin = span.begin if span.before else span.begin + 1
        return begin, self.length + 1 if span.end is None else span.end + 1

    def joined(self, other: Timeline) -> Timeline:
        """Return the timeline of this and, after it, of a later capture into the same pool.

        Blocks that are alive at the end of this one continue until the other frees them. A block
        that the other found there, and this one does not know, was there before both, or came
        between them if this one knows another block at its address.

        Args:
            other: The later one; its title is dropped.
        """
        alive = _Alive()
        spans = [span for span in self.spans if span.end is not None]
        for span in self.spans:
            if span.end is None:
                alive.add(span)
        mine = {span.address for span in self.spans}
        for span in other.spans:
            begin = self.length + span.begin
            end = None if span.end is None else self.length + span.end
            if span.before and (known := alive.pop(span.address)):
                spans.append(replace(known, end=end))
                continue
            spans += [replace(old, end=begin) for old in alive.take(span.address, span.bytes)]
            if span.before and span.begin == 0 and span.address not in mine:
                begin = 0
            spans.append(replace(span, begin=begin, end=end))
        return Timeline(
            self.title,
            _merged([*self.segments, *other.segments]),
            _in_order([*spans, *alive.all()]),
            self.length + other.length,
            (*self.marks, *((self.length + index, text) for index, text in other.marks)),
        )

    def draw(self, path: str | PathLike[str]) -> None:
        """Draw the blocks as a map of the memory over the events, and the bytes in use below it.

        Args:
            path: The file to write: ``.svg``, where each block has a tooltip with all its data, or
                ``.png`` or ``.pdf``, which need matplotlib.

        Raises:
            ArgumentError: The name ends in something else, or matplotlib is missing.
        """
        from cgraph._timeline import page, shapes

        suffix = Path(path).suffix.lower()
        if suffix not in (".svg", ".png", ".pdf"):
            raise ArgumentError(
                f"path is {fspath(path)!r} and ends in {suffix!r}, expected .svg, .png or .pdf"
            )
        save = shapes.save_svg if suffix == ".svg" else shapes.save_with_matplotlib
        save(page.page(self), path)


class _Alive:
    """The blocks that are alive at one moment, without overlaps."""

    def __init__(self) -> None:
        self._spans: dict[int, Span] = {}
        self._addresses: list[int] = []

    def all(self) -> Iterable[Span]:
        return self._spans.values()

    def add(self, span: Span) -> None:
        bisect.insort(self._addresses, span.address)
        self._spans[span.address] = span

    def pop(self, address: int) -> Span | None:
        """Take out the block that starts at an address, if there is one."""
        span = self._spans.pop(address, None)
        if span is not None:
            del self._addresses[bisect.bisect_left(self._addresses, address)]
        return span

    def take(self, address: int, count: int) -> list[Span]:
        """Take out all blocks that have some of these bytes, or start where they start."""
        first = bisect.bisect_left(self._addresses, address)
        if first > 0:
            previous = self._spans[self._addresses[first - 1]]
            first -= previous.address + previous.bytes > address
        past = bisect.bisect_left(self._addresses, address + max(count, 1))
        found = self._addresses[first:past]
        del self._addresses[first:past]
        return [self._spans.pop(each) for each in found]


def _inside(segments: tuple[Segment, ...], address: int, count: int) -> bool:
    """Return whether all of a block lies in one of the segments, which are in order."""
    place = bisect.bisect_right(segments, address, key=lambda segment: segment.address) - 1
    return place >= 0 and address + count <= segments[place].address + segments[place].bytes


def _merged(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """Return segments in order; segments that share bytes, as after growth, become one."""
    found: list[Segment] = []
    for segment in sorted(segments, key=lambda segment: segment.address):
        last = found[-1] if found else None
        if last is not None and segment.address < last.address + last.bytes:
            end = max(last.address + last.bytes, segment.address + segment.bytes)
            found[-1] = replace(last, bytes=end - last.address)
        else:
            found.append(segment)
    return tuple(found)


def _in_order(spans: Iterable[Span]) -> tuple[Span, ...]:
    return tuple(sorted(spans, key=lambda span: (span.begin, not span.before, span.address)))
