"""Views as files of other viewers: Perfetto's trace events, torch's snapshot of memory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from cgraph._viewer.nodes import Node
from cgraph.timeline import Span, Timeline

__all__ = ["memory_snapshot", "trace_events"]

# A line of Python, as ``file:line function``.
_FRAME = re.compile(r"(.*?):(\d+) (.*)", re.DOTALL)

_PROCESS = 1
_ARGUMENTS = ("operator", "kernel", "module", "source", "grid", "block", "bytes")


def trace_events(title: str, nodes: Sequence[Node]) -> dict[str, Any]:
    """Return nodes as Chrome's trace events, which Perfetto reads too.

    A lane is a track, a node a slice, and a module a slice around those of its nodes that follow
    each other in a lane. A node begins when those before it and in its lane have ended. It takes
    its seconds, or one microsecond if no node has any.

    Args:
        title: The name of the process.
        nodes: The nodes in order, with their lanes.
    """
    is_timed = any("seconds" in node.measures for node in nodes)
    ends: list[float] = []
    free: dict[int, float] = {}
    events: list[dict[str, Any]] = []
    tracks: dict[int, list[tuple[Node, float, float]]] = {}
    for node in nodes:
        begin = max([free.get(node.lane, 0.0), *(ends[one] for one in node.depends)])
        lasts = node.measures.get("seconds", 0.0) * 1e6 if is_timed else 1.0
        ends.append(begin + lasts)
        free[node.lane] = ends[-1]
        tracks.setdefault(node.lane, []).append((node, begin, ends[-1]))
    for lane in sorted(tracks):
        slices = [*_modules(tracks[lane]), *map(_slice, tracks[lane])]
        # The outer one of two slices that begin together comes first.
        slices.sort(key=lambda one: (one["ts"], -one["dur"], one["cat"] != "module"))
        events += [{**one, "pid": _PROCESS, "tid": lane} for one in slices]
    names = [_named("process_name", title, 0)]
    names += [_named("thread_name", f"lane {lane}", lane) for lane in sorted(tracks)]
    return {"traceEvents": names + events, "displayTimeUnit": "ns"}


def memory_snapshot(timeline: Timeline) -> dict[str, Any]:
    """Return a timeline as ``torch.cuda.memory._snapshot()`` does, for torch's viewer.

    Times are the numbers of events, as their order is all that is known.

    Args:
        timeline: The timeline.
    """
    begins = [(one.begin, 1, one) for one in timeline.spans if not one.before]
    ends = [(one.end, 0, one) for one in timeline.spans if one.end is not None]
    # Where both happen at one event, the earlier block made room.
    ordered = sorted([*begins, *ends], key=lambda one: (one[0], one[1], one[2].address))
    trace: list[dict[str, Any]] = []
    for index, begins_here, span in ordered:
        actions = ("alloc",) if begins_here else ("free_requested", "free_completed")
        trace += [_entry(action, index, span) for action in actions]
    held = [one for one in timeline.spans if one.end is None]
    segments = []
    for segment in timeline.segments:
        end = segment.address + segment.bytes
        inside = [one for one in held if segment.address <= one.address < end]
        used = sum(one.bytes for one in inside)
        segments.append(
            {
                "device": 0,
                "address": segment.address,
                "total_size": segment.bytes,
                "allocated_size": used,
                "active_size": used,
                "requested_size": used,
                "stream": inside[0].stream if inside else 0,
                "segment_type": "large",
                "segment_pool_id": (0, 1),
                "is_expandable": False,
                "frames": [],
                "blocks": [*_blocks(segment.address, end, inside)],
            }
        )
    return {
        "segments": segments,
        "device_traces": [trace],
        "allocator_settings": {},
        "external_annotations": [],
    }


def _modules(track: Sequence[tuple[Node, float, float]]) -> Iterator[dict[str, Any]]:
    """List the slices of modules around those of a track's nodes."""
    # A module that is open: its place in the path, its name, begin and end.
    opened: list[tuple[str, float, float]] = []

    def closed(down_to: int) -> Iterator[dict[str, Any]]:
        while len(opened) > down_to:
            path = ".".join(name for name, _, _ in opened)
            name, begin, end = opened.pop()
            about = {"name": name, "cat": "module", "ph": "X", "ts": begin, "dur": end - begin}
            yield {**about, "args": {"module": path}}

    for node, begin, end in track:
        same = 0
        while same < min(len(opened), len(node.path)) and opened[same][0] == node.path[same]:
            same += 1
        yield from closed(same)
        opened += [(name, begin, end) for name in node.path[same:]]
        opened[:] = [(name, start, max(stop, end)) for name, start, stop in opened]
    yield from closed(0)


def _slice(timed: tuple[Node, float, float]) -> dict[str, Any]:
    node, begin, end = timed
    said = {name: text for name in _ARGUMENTS if (text := node.fact(name)) is not None}
    about = {"name": node.title, "cat": node.family, "ph": "X", "ts": begin, "dur": end - begin}
    return {**about, "args": said}


def _named(kind: str, name: str, track: int) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": _PROCESS, "tid": track, "args": {"name": name}}


def _entry(action: str, index: int, span: Span) -> dict[str, Any]:
    where = {"addr": span.address, "size": span.bytes, "stream": span.stream, "device": 0}
    return {"action": action, **where, "time_us": index, "frames": _frames(span)}


def _blocks(start: int, end: int, inside: Sequence[Span]) -> Iterator[dict[str, Any]]:
    """List the blocks of a segment, those that are free included."""

    def block(address: int, size: int, state: str, span: Span | None) -> dict[str, Any]:
        frames = [] if span is None else _frames(span)
        about = {"address": address, "size": size, "requested_size": size, "state": state}
        return {**about, "frames": frames}

    here = start
    for span in sorted(inside, key=lambda one: one.address):
        if span.address > here:
            yield block(here, span.address - here, "inactive", None)
        yield block(span.address, span.bytes, "active_allocated", span)
        here = span.address + span.bytes
    if here < end:
        yield block(here, end - here, "inactive", None)


def _frames(span: Span) -> list[dict[str, Any]]:
    """Return the stack of a block as torch has it, the innermost first."""
    lines = []
    for frame in reversed(span.frames):
        if (found := _FRAME.fullmatch(frame)) is not None:
            file, line, name = found.groups()
            lines.append({"filename": file, "line": int(line), "name": name})
    label = [{"filename": span.label, "line": 0, "name": ""}] if span.label else []
    return label + lines
