"""The drawing of a pool's timeline: a map of its memory over the events, bytes in use below."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from cgraph._text import in_units, plural
from cgraph._timeline.shapes import Box, Dot, Line, Page, Shape, Text

if TYPE_CHECKING:
    from cgraph.timeline import Segment, Span, Timeline

__all__ = ["page"]

# Neighbours alternate between the shades of their kind, so that thin boxes can be told apart.
_SHADES = {
    "temporary": ("#8dbbe8", "#76abe0", "#a5c9ee"),
    "held at the end": ("#f4b063", "#efa04a", "#f7c182"),
    "there before": ("#b7bfca", "#a8b1be", "#c5ccd5"),
}
_GREY, _INK, _AXIS, _FAINT = "#5b6573", "#222222", "#aab3bf", "#e3e7ed"
_GROUND, _AREA, _CURVE, _PEAK, _MARK = "#f4f6f9", "#dcebfa", "#3a7bbf", "#c0392b", "#7b5ea7"

_MARGIN, _LEFT, _RIGHT = 28, 96, 34
_NARROW, _WIDE, _PER_STEP = 640, 1240, 26
_HEAD, _MARKS, _GAP = 104, 20, 5
_MAP, _CHART, _BETWEEN, _FOOT = 440, 130, 26, 46
_LEAST_HEIGHT, _LETTER = 1.2, 6.2


class _Frame(NamedTuple):
    """The positions of the plots, and the width of a step."""

    left: float
    width: float
    top: float
    step: float

    def x(self, step: float) -> float:
        return self.left + step * self.step


def page(timeline: Timeline) -> Page:
    """Lay out the drawing of a timeline; each block is a box of the kind ``span``."""
    steps = timeline.length + 1
    width = min(max(steps * _PER_STEP, _NARROW), _WIDE)
    top = _HEAD + (_MARKS if timeline.marks else 0)
    frame = _Frame(_LEFT, width, top, width / steps)
    numbers = (
        f"peak {in_units(timeline.peak)}, held {in_units(timeline.held)},"
        f" reserved {in_units(timeline.reserved)}"
    )
    size = f"{plural(len(timeline.spans), 'block')}, {plural(timeline.length, 'event')}"
    rows = _rows(timeline.segments, top)
    bottom = max((y + height for _, y, height in rows), default=top)
    chart = bottom + _BETWEEN
    shapes: list[Shape] = [
        Text(_MARGIN, 38, timeline.title, 20, bold=True),
        Text(_MARGIN, 60, numbers, 13, _GREY),
        Text(_LEFT + width, 60, size, 13, _GREY, "end"),
        *_legend(timeline),
        *_map(timeline, rows, frame),
        *_chart(timeline, frame, chart),
        *_marks(timeline, frame, chart + _CHART),
    ]
    return Page(
        _LEFT + width + _RIGHT, chart + _CHART + _FOOT, f"{timeline.title}: {numbers}", shapes
    )


def _kind(span: Span) -> str:
    if span.before:
        return "there before"
    return "held at the end" if span.end is None else "temporary"


def _legend(timeline: Timeline) -> list[Shape]:
    """Return the kinds of blocks that occur, with their counts."""
    counts = Counter(map(_kind, timeline.spans))
    shapes: list[Shape] = []
    x: float = _MARGIN
    for kind, shades in _SHADES.items():
        if counts[kind]:
            label = f"{kind} {counts[kind]}"
            shapes += [
                Box(x, 74, 16, 14, shades[0], corner=3),
                Text(x + 22, 86, label, 13, _GREY),
            ]
            x += 46 + 7.4 * len(label)
    return shapes


def _rows(segments: tuple[Segment, ...], top: float) -> list[tuple[Segment, float, float]]:
    """Return each segment with its top and height, the highest address first.

    Heights are proportional to bytes, except for small segments, which would be too low to see.
    """
    least = min(max(800 / max(len(segments), 1) - _GAP, 4), 24)
    total = sum(segment.bytes for segment in segments)
    rows = []
    for segment in reversed(segments):
        height = max(_MAP * segment.bytes / max(total, 1), least)
        rows.append((segment, top, height))
        top += height + _GAP
    return rows


def _map(
    timeline: Timeline, rows: list[tuple[Segment, float, float]], frame: _Frame
) -> list[Shape]:
    """Return the segments with their sizes, and the blocks in them."""
    shapes: list[Shape] = []
    for segment, y, height in rows:
        tip = f"segment of {_exact(segment.bytes)} at {segment.address:#x}"
        shapes.append(Box(frame.left, y, frame.width, height, _GROUND, _FAINT, 2, tip=tip))
        if height >= 9:
            size = in_units(segment.bytes)
            shapes.append(Text(frame.left - 10, y + height / 2 + 4, size, 11, _GREY, "end"))
    names: list[Shape] = []
    for number, span in enumerate(timeline.spans):
        row = next(row for row in rows if row[0].address <= span.address)
        box = _block(timeline, span, number, row, frame)
        shapes.append(box)
        names += _name(span, box)
    return shapes + names


def _block(
    timeline: Timeline,
    span: Span,
    number: int,
    row: tuple[Segment, float, float],
    frame: _Frame,
) -> Box:
    segment, y, row_height = row
    scale = row_height / max(segment.bytes, 1)
    begin, end = timeline.steps(span)
    width = (end - begin) * frame.step
    height = max(span.bytes * scale, _LEAST_HEIGHT)
    above = segment.address + segment.bytes - span.address - span.bytes
    shades = _SHADES[_kind(span)]
    is_large = width > 5 and height > 5
    return Box(
        frame.x(begin),
        min(y + above * scale, y + row_height - height),
        width,
        height,
        shades[number % len(shades)],
        "#ffffff" if is_large else None,
        2 if is_large else 0,
        "span",
        _tip(span),
    )


def _name(span: Span, box: Box) -> list[Shape]:
    """Return the text in a box: its size, and its label below, if there is room."""
    letters = (box.width - 12) / _LETTER
    size = in_units(span.bytes)
    if box.height < 14 or letters < len(size):
        return []
    x, middle = box.x + 6, box.y + box.height / 2
    if box.height >= 32 and 0 < len(span.label) <= letters:
        return [Text(x, middle - 3, size, 11, _INK), Text(x, middle + 11, span.label, 10, _GREY)]
    return [Text(x, middle + 4, size, 11, _INK)]


def _tip(span: Span) -> str:
    """Return all data of a block, one line for each item."""
    lines = [
        f"{_exact(span.bytes)} at {span.address:#x}",
        f"from: {'before ' if span.before else ''}event {span.begin}",
        "to: the end (held)" if span.end is None else f"to: event {span.end}",
        f"stream: {span.stream:#x}",
    ]
    return "\n".join([span.label, *lines] if span.label else lines)


def _chart(timeline: Timeline, frame: _Frame, top: float) -> list[Shape]:
    """Return the bytes in use over the events, with the peak."""
    left, right, bottom = frame.left, frame.left + frame.width, top + _CHART
    if timeline.length == 0:
        nothing = "No events were recorded."
        return [Text((left + right) / 2, (top + bottom) / 2, nothing, 15, _GREY, "middle")]
    in_use, peak = timeline.in_use(), timeline.peak
    scale = (_CHART - 22) / max(peak, 1)
    corners = []
    for step, count in enumerate(in_use):
        y = bottom - count * scale
        corners += [(frame.x(step), y), (frame.x(step + 1), y)]
    area = [(left, bottom), *corners, (right, bottom)]
    high, at = bottom - peak * scale, in_use.index(peak)
    x = frame.x(at + 0.5)
    when = f"after event {at - 1}" if at else "before event 0"
    text = f"peak {in_units(peak)} {when}"
    # The text is on the side of the peak where there is room.
    peak_text = (
        Text(x + 8, high - 7, text, 12, _PEAK, "start", bold=True)
        if x < (left + right) / 2
        else Text(x - 8, high - 7, text, 12, _PEAK, "end", bold=True)
    )
    return [
        Line([(left, bottom), (right, bottom)], _AXIS),
        Line(area, "none", fill=_AREA),
        Line(corners, _CURVE, 1.4),
        Line([(left, high), (right, high)], _PEAK, 0.8, dashed=True),
        Dot(x, high, 4, _PEAK),
        peak_text,
        Text(left - 10, high + 4, in_units(peak), 11, _GREY, "end"),
        Text(left - 10, bottom + 4, "0", 11, _GREY, "end"),
        Text(left - 10, (high + bottom) / 2 + 4, "in use", 11, _GREY, "end"),
        *_ticks(timeline.length, frame, bottom),
    ]


def _ticks(length: int, frame: _Frame, bottom: float) -> list[Shape]:
    """Return event numbers below the chart, each where its event changes the memory."""
    steps = (factor * 10**power for power in range(12) for factor in (1, 2, 5))
    every = next(step for step in steps if length / step <= 12)
    shapes: list[Shape] = []
    for index in range(0, length, every):
        x = frame.x(index + 1)
        shapes += [
            Line([(x, bottom), (x, bottom + 4)], _AXIS),
            Text(x, bottom + 17, str(index), 11, _GREY, "middle"),
        ]
    middle = frame.left + frame.width / 2
    return [*shapes, Text(middle, bottom + 34, "events in their order", 11, _GREY, "middle")]


def _marks(timeline: Timeline, frame: _Frame, bottom: float) -> list[Shape]:
    """Return lines through both plots at the marks; colliding texts are left out."""
    shapes: list[Shape] = []
    free_from = 0.0
    for index, text in sorted(timeline.marks):
        x = frame.x(index + 0.5)
        end = x + 14 + _LETTER * len(text)
        is_free = x >= free_from and end <= frame.left + frame.width + _RIGHT
        top = frame.top - 16 if is_free else frame.top
        shapes.append(Line([(x, top), (x, bottom)], _MARK, 1, dashed=True))
        if is_free:
            shapes.append(Text(x + 5, frame.top - 7, text, 11, _MARK))
            free_from = end
    return shapes


def _exact(count: int) -> str:
    return f"{count:,} bytes ({in_units(count)})" if count >= 1024 else plural(count, "byte")
