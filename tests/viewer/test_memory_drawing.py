"""What is drawn of a pool's memory: every block, and no unused range that would hide them."""

from __future__ import annotations

from typing import Any

import torch

from cgraph import _torch
from cgraph._viewer.memory import Used, as_drawn, used_ranges
from cgraph.timeline import Event, Segment, Timeline
from lab import SimLab
from viewed import graph_of

MIB = 1 << 20


def used(*blocks: tuple[int, int], size: int = 64 * MIB) -> tuple[int, list[Used]]:
    events = [Event("alloc", address, count) for address, count in blocks]
    timeline = Timeline.of("pool", [(0, size)], events)
    return used_ranges(Segment(0, size), timeline.spans)


def test_unused_ranges_around_blocks_are_cut() -> None:
    found = used((8 * MIB, MIB), (9 * MIB, MIB), (40 * MIB, MIB))
    assert found == (8 * MIB, [Used(8 * MIB, 2 * MIB, 30 * MIB), Used(40 * MIB, MIB, 23 * MIB)])


def test_a_gap_that_is_small_beside_what_is_used_stays() -> None:
    assert used((0, MIB), (MIB + 1024, MIB)) == (0, [Used(0, 2 * MIB + 1024, 62 * MIB - 1024)])


def test_a_segment_without_blocks_is_cut_as_a_whole() -> None:
    assert used(size=2 * MIB) == (2 * MIB, [])


def test_cuts_and_ranges_are_all_of_a_segment() -> None:
    blocks = [(place * MIB, 512 * (place + 1)) for place in (1, 2, 3, 30, 31, 62)]
    before, ranges = used(*blocks)
    assert before + sum(one.bytes + one.cut for one in ranges) == 64 * MIB
    assert [one.address for one in ranges] == [address for address, _ in blocks]


def test_every_block_lies_in_a_range_that_is_drawn() -> None:
    base = 0x7F0000000000
    events = [Event("alloc", base + at * MIB, MIB, label=f"op{at}") for at in (1, 2, 50)]
    events += [Event("free", base + MIB, MIB), Event("alloc", base + MIB, 512)]
    found = as_drawn(Timeline.of("pool", [(base, 64 * MIB)], events))
    ranges = [(start, start + size) for start, size, _ in found["segments"][0]["ranges"]]
    for block in found["blocks"]:
        start, size, begin, end = block["p"]
        assert any(low <= start and start + size <= high for low, high in ranges)
        assert 0 <= begin < end <= len(found["inUse"])
    assert found["peak"] == [3 * MIB, 3]


def test_a_block_tells_its_owner_and_its_stack() -> None:
    event = Event("alloc", 0, 512, 0, "aten.add", ("/a/b/run.py:1 main", "/a/b/model.py:7 forward"))
    [block] = as_drawn(Timeline.of("pool", [(0, MIB)], [event]))["blocks"]
    facts: dict[str, Any] = dict(block["x"])
    assert facts["owner"] == "aten.add"
    assert facts["stack, innermost first"] == "b/model.py:7 forward\nb/run.py:1 main"


def test_recorded_blocks_know_the_operator_and_the_lines_that_made_them(sim: SimLab) -> None:
    x = torch.ones(4)
    timeline = graph_of(sim, lambda: (x + 1) * 2).memory().timeline
    assert timeline is not None
    assert [one.label for one in timeline.spans] == ["aten.add.Tensor", "aten.mul.Tensor"]
    for one in timeline.spans:
        assert "test_memory_drawing.py:" in one.frames[-1] and one.frames[-1].endswith(" <lambda>")
    assert _shown(timeline) == ["elementwise"]


def test_frames_of_torchs_record_are_the_users_innermost_last() -> None:
    frames = [
        {"filename": torch.__file__, "line": 3, "name": "inside"},
        {"filename": "/a/model.py", "line": 7, "name": "forward"},
        {"filename": "??", "line": 0, "name": "c++"},
        {"filename": "/a/run.py", "line": 1, "name": "main"},
    ]
    found = _torch.recorded_frames({"frames": frames})
    assert found == ("/a/run.py:1 main", "/a/model.py:7 forward")
    assert _torch.recorded_frames({"action": "alloc"}) == ()


def _shown(timeline: Timeline) -> list[str]:
    """Return the families in the legend of a drawing."""
    return [name for name, _, _ in as_drawn(timeline)["families"]]
