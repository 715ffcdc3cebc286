"""The memory of a pool as it is drawn: only what blocks use, with the rest cut out."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from cgraph import picture
from cgraph._text import in_units, plural, short_place
from cgraph._viewer.nodes import FAMILIES
from cgraph.timeline import Segment, Span, Timeline

__all__ = ["Used", "as_drawn", "kind_of", "used_ranges"]

# What is unused and smaller stays where it is: a mark would take as much room.
_LEAST_CUT = 1 / 64


class Used(NamedTuple):
    """A range of a segment that is drawn.

    Attributes:
        address: Its start.
        bytes: Its size.
        cut: The unused bytes behind it that are left out, up to the next one or the segment's end.
    """

    address: int
    bytes: int
    cut: int


def used_ranges(segment: Segment, spans: Iterable[Span]) -> tuple[int, list[Used]]:
    """Return the ranges of a segment that blocks ever lie in.

    Small unused ranges between blocks stay in: a 64th of what is used.

    Args:
        segment: The segment.
        spans: The blocks of the pool.

    Returns:
        The unused bytes before the first range, and the ranges by address.
    """
    end = segment.address + segment.bytes
    here = sorted(
        (one.address, one.address + one.bytes)
        for one in spans
        if segment.address <= one.address and one.address + one.bytes <= end and one.bytes
    )
    joined: list[tuple[int, int]] = []
    for start, stop in here:
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], stop)
        else:
            joined.append((start, stop))
    least = max(sum(stop - start for start, stop in joined) * _LEAST_CUT, 512)
    kept: list[tuple[int, int]] = []
    for start, stop in joined:
        if kept and start - kept[-1][1] < least:
            kept[-1] = kept[-1][0], stop
        else:
            kept.append((start, stop))
    if not kept:
        return segment.bytes, []
    nexts = [start for start, _ in kept[1:]] + [end]
    ranges = [
        Used(start, stop - start, following - stop)
        for (start, stop), following in zip(kept, nexts, strict=True)
    ]
    return kept[0][0] - segment.address, ranges


def kind_of(span: Span) -> str:
    """Return what becomes of a block, as a word of the legend."""
    if span.before:
        return "there before"
    return "held at the end" if span.end is None else "temporary"


def as_drawn(timeline: Timeline) -> dict[str, Any]:
    """Return what the page needs of a timeline, as plain values.

    Addresses are relative to the first one, as JavaScript's numbers end at 2**53.
    """
    base = timeline.segments[0].address if timeline.segments else 0
    segments = []
    for number, segment in enumerate(timeline.segments):
        before, ranges = used_ranges(segment, timeline.spans)
        segments.append(
            {
                "name": f"segment {number}: {in_units(segment.bytes)} at {segment.address:#x}",
                "cut": before,
                "ranges": [[one.address - base, one.bytes, one.cut] for one in ranges],
            }
        )
    in_use = timeline.in_use()
    found = [_family(span) for span in timeline.spans]
    families = [name for name in FAMILIES if name in found]
    numbers = [("peak", timeline.peak), ("held", timeline.held), ("reserved", timeline.reserved)]
    words = ", ".join(f"{name} {in_units(count)}" for name, count in numbers)
    counts = f"{plural(len(timeline.spans), 'block')}, {plural(timeline.length, 'event')}"
    return {
        "title": timeline.title,
        "about": f"{words}; {counts}",
        "segments": segments,
        "families": [[name, *FAMILIES[name]] for name in families],
        "blocks": [
            _block(timeline, span, base, families.index(family) if family else -1)
            for span, family in zip(timeline.spans, found, strict=True)
        ],
        "inUse": in_use,
        "peak": [timeline.peak, in_use.index(timeline.peak)],
        "marks": sorted([index, text] for index, text in timeline.marks),
    }


def _block(timeline: Timeline, span: Span, base: int, family: int) -> dict[str, Any]:
    begin, end = timeline.steps(span)
    facts = [
        ("owner", span.label or "unknown: no label was recorded"),
        ("size", f"{span.bytes:,} bytes ({in_units(span.bytes)})"),
        ("address", f"{span.address:#x}"),
        ("kind", kind_of(span)),
        ("from", "before the first event" if span.before else f"event {span.begin}"),
        ("to", "the end" if span.end is None else f"event {span.end}"),
    ]
    if span.stream:
        facts.append(("stream", f"{span.stream:#x}"))
    if span.frames:
        lines = [short_place(one.rpartition(" ")[0]) for one in reversed(span.frames)]
        names = [one.rpartition(" ")[2] for one in reversed(span.frames)]
        stack = "\n".join(f"{line} {name}" for line, name in zip(lines, names, strict=True))
        facts.append(("stack, innermost first", stack))
    place = [span.address - base, span.bytes, begin, end]
    return {"p": place, "k": kind_of(span), "f": family, "n": _name(span), "x": facts}


def _is_of_operator(span: Span) -> bool:
    return re.fullmatch(r"\w+\.\w+\.\w+", span.label) is not None


def _family(span: Span) -> str | None:
    """Return the family of the operator that made a block; None if it is not known."""
    return picture.family({"name": span.label}) if _is_of_operator(span) else None


def _name(span: Span) -> str:
    """Return a short origin of a block: operator and line, as far as they are known."""
    name = picture.short_name(span.label) if _is_of_operator(span) else span.label
    line = span.frames[-1].rpartition(" ")[0].rpartition("/")[2] if span.frames else ""
    return f"{name}\n{line}" if line else name
