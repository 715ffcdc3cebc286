"""Timelines of a pool's blocks: no byte is lost, and the drawing shows every block."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock
from xml.etree import ElementTree

import pytest

from cgraph.errors import ArgumentError
from cgraph.timeline import Event, Segment, Span, Timeline

SVG = "{http://www.w3.org/2000/svg}"
SEGMENTS = [(0, 4096), (8192, 1000)]
SEEDS = range(40)


@pytest.fixture(params=SEEDS)
def chance(request: pytest.FixtureRequest) -> random.Random:
    seed = request.param * 2**32 + int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}")  # pytest shows it if the test fails
    return random.Random(seed)


def stream_of_events(
    chance: random.Random, count: int
) -> tuple[list[tuple[int, int]], list[Event], list[int]]:
    """Draw blocks that were there before, events, and the bytes in use around them.

    Memory is in units of 8 bytes that know their block: the model that needs no spans. Some frees
    are unreported and only seen by later allocations there.
    """
    base, size = chance.choice(SEGMENTS)
    units: list[int | None] = [None] * (size // 8)
    blocks: dict[int, int] = {}
    told, untold = list[Event](), set[int]()

    def place() -> tuple[int, int] | None:
        wanted = chance.randint(1, 12)
        start = chance.randrange(len(units) - wanted)
        owners = {units[unit] for unit in range(start, start + wanted)} - {None}
        return (start, wanted) if owners <= untold else None

    def put(start: int, wanted: int) -> None:
        owners = {units[unit] for unit in range(start, start + wanted)} - {None}
        for owner in owners:
            assert owner is not None
            drop(owner)
        blocks[start] = wanted
        units[start : start + wanted] = [start] * wanted

    def drop(start: int) -> int:
        wanted = blocks.pop(start)
        untold.discard(start)
        units[start : start + wanted] = [None] * wanted
        return wanted

    def in_use() -> int:
        return 8 * sum(unit is not None for unit in units)

    for _ in range(chance.randrange(6)):
        if found := place():
            put(*found)
    before = [(base + 8 * start, 8 * wanted) for start, wanted in blocks.items()]
    usage = [in_use()]
    while len(told) < count:
        known = sorted(set(blocks) - untold)
        if known and chance.random() < 0.4:
            start = chance.choice(known)
            told.append(Event("free", base + 8 * start, 8 * drop(start)))
        elif known and chance.random() < 0.1:
            untold.add(chance.choice(known))
            continue
        elif found := place():
            put(*found)
            told.append(Event("alloc", base + 8 * found[0], 8 * found[1], label=str(len(told))))
        else:
            continue
        usage.append(in_use())
    return before, told, usage


def boxes(path: Path) -> list[dict[str, str]]:
    """Return the attributes of each block's rectangle, and its tooltip as ``title``."""
    found = ElementTree.parse(path).getroot().findall(f"{SVG}rect[@class='span']")
    return [box.attrib | {"title": box.findtext(f"{SVG}title") or ""} for box in found]


def grounds(path: Path) -> list[dict[str, str]]:
    """Return the attributes of each segment's rectangle, from the top down."""
    found = ElementTree.parse(path).getroot().findall(f"{SVG}rect")
    segments = [
        box.attrib for box in found if (box.findtext(f"{SVG}title") or "").startswith("segment of")
    ]
    return sorted(segments, key=lambda box: float(box["y"]))


def texts(path: Path) -> list[str]:
    return [text.text or "" for text in ElementTree.parse(path).getroot().iter(f"{SVG}text")]


def some_timeline(count: int) -> Timeline:
    before, events, _ = stream_of_events(random.Random(os.urandom(8)), count)
    return Timeline.of("pool", SEGMENTS, events, before)


def test_bytes_in_use_peak_and_held_are_those_of_a_model_of_the_memory(
    chance: random.Random,
) -> None:
    before, events, usage = stream_of_events(chance, chance.randrange(1, 200))
    timeline = Timeline.of("pool", SEGMENTS, events, before)
    assert timeline.in_use() == usage
    assert timeline.peak == max(usage) and timeline.held == usage[-1]
    assert timeline.length == len(events) and timeline.reserved == 5096


def test_every_allocation_and_every_block_from_before_has_one_span(chance: random.Random) -> None:
    before, events, _ = stream_of_events(chance, 100)
    spans = Timeline.of("pool", SEGMENTS, events, before).spans
    made = [(event.address, event.bytes, event.label) for event in events if event.label]
    assert [(span.address, span.bytes, span.label) for span in spans if not span.before] == made
    assert sorted((span.address, span.bytes) for span in spans if span.before) == sorted(before)


def test_blocks_from_before_are_found_by_their_frees(chance: random.Random) -> None:
    before, events, _ = stream_of_events(chance, 100)
    full, bare = (Timeline.of("pool", SEGMENTS, events, known) for known in (before, ()))
    assert set(bare.spans) <= set(full.spans)
    for missing in set(full.spans) - set(bare.spans):
        assert missing.before and (missing.end is None or events[missing.end].action == "alloc")


def test_two_joined_timelines_are_one_of_all_events(chance: random.Random) -> None:
    before, events, usage = stream_of_events(chance, 120)
    cuts = sorted(chance.sample(range(121), 2))
    parts = [events[: cuts[0]], events[cuts[0] : cuts[1]], events[cuts[1] :]]
    first, second, third = (
        Timeline.of("pool", SEGMENTS, part, before if number == 0 else (), [(0, f"part {number}")])
        for number, part in enumerate(parts)
    )
    marks = [(0, "part 0"), (cuts[0], "part 1"), (cuts[1], "part 2")]
    whole = Timeline.of("pool", SEGMENTS, events, before, marks)
    assert first.joined(second).joined(third) == whole == first.joined(second.joined(third))
    assert whole.in_use() == usage


def test_a_block_that_came_between_two_timelines_begins_with_the_later_one() -> None:
    first = Timeline.of("a", SEGMENTS, [Event("alloc", 0, 64), Event("free", 0, 64)])
    second = Timeline.of("b", SEGMENTS, [Event("free", 0, 64), Event("alloc", 64, 8)])
    joined = first.joined(second)
    assert joined.in_use() == [0, 64, 64, 0, 8]
    assert joined.title == "a"
    assert joined.spans[1] == Span(0, 64, 2, 2, 0, "", before=True)
    earlier = Timeline.of("c", SEGMENTS, [Event("alloc", 512, 8)])
    assert earlier.joined(joined).in_use() == [0, 8, 72, 72, 8, 16]


def test_a_pool_that_grew_between_two_timelines_has_the_segments_of_both() -> None:
    first = Timeline.of("a", [(512, 1024)], [])
    second = Timeline.of("a", [(4096, 512), (512, 2048)], [])
    assert first.joined(second).segments == (Segment(512, 2048), Segment(4096, 512))


def test_segments_that_touch_stay_apart() -> None:
    touching = Timeline.of("a", [(512, 512), (0, 512)], [Event("alloc", 256, 512)])
    assert touching.segments == (Segment(0, 512), Segment(512, 512)) and not touching.spans


def test_an_allocation_in_a_living_block_ends_it() -> None:
    events = [Event("alloc", 0, 64), Event("alloc", 32, 8), Event("alloc", 32, 8, label="new")]
    timeline = Timeline.of("pool", SEGMENTS, events)
    assert [(span.begin, span.end) for span in timeline.spans] == [(0, 1), (1, 2), (2, None)]
    assert timeline.peak == 64 and timeline.held == 8


def test_a_block_without_bytes_ends_like_another() -> None:
    events = [Event("alloc", 8, 0), Event("alloc", 8, 0), Event("free", 8, 0)]
    timeline = Timeline.of("pool", SEGMENTS, events)
    assert [(span.begin, span.end) for span in timeline.spans] == [(0, 1), (1, 2)]


def test_a_second_free_tells_of_no_block() -> None:
    events = [Event("alloc", 0, 64), Event("free", 0, 64), Event("free", 0, 64)]
    timeline = Timeline.of("pool", SEGMENTS, events)
    assert timeline.spans == (Span(0, 64, 0, 1, 0, ""),) and timeline.length == 3


def test_blocks_outside_all_segments_are_left_out() -> None:
    outside = [(4096, 8), (4090, 8), (9190, 8), (8000, 4000)]
    events = [Event(action, *block) for block in outside for action in ("alloc", "free")]
    frees = [Event("free", *block) for block in outside]
    timeline = Timeline.of("pool", SEGMENTS, [*frees, *events], before=outside)
    assert timeline.spans == () and timeline.length == 12 and timeline.peak == 0


@pytest.mark.parametrize("count", [1, 5, 300, 4000])
def test_the_drawing_has_a_rectangle_for_each_block_and_the_peaks_number(
    count: int, tmp_path: Path
) -> None:
    timeline, path = some_timeline(count), tmp_path / "pool.svg"
    timeline.draw(path)
    found = boxes(path)
    assert len(found) == len(timeline.spans)
    for box, span in zip(found, timeline.spans, strict=True):
        assert f"at {span.address:#x}" in box["title"] and span.label in box["title"]
    peak = f"{timeline.peak / 1024:.1f} KiB" if timeline.peak >= 1024 else f"{timeline.peak} B"
    assert any(text.startswith(f"peak {peak} ") for text in texts(path))
    assert any(text.startswith(f"peak {peak}, held ") for text in texts(path))
    assert float(ElementTree.parse(path).getroot().attrib["width"]) < 1500


def test_boxes_lie_as_blocks_do_in_memory_and_in_order(tmp_path: Path) -> None:
    timeline, path = some_timeline(60), tmp_path / "pool.svg"
    timeline.draw(path)
    places = [[float(box[key]) for key in ("x", "y", "width", "height")] for box in boxes(path)]
    drawn = list(zip(timeline.spans, places, strict=True))
    for one, (x, y, width, _) in drawn:
        for other, (other_x, other_y, _, other_height) in drawn:
            if one.end is not None and one.end <= other.begin and not other.before:
                assert x + width <= other_x + 0.01
            if one.address + one.bytes <= other.address:
                least = 1.2  # a box is never lower
                assert y >= other_y + other_height - least


def test_segments_are_stacked_from_the_lowest_address_up_around_their_blocks(
    tmp_path: Path,
) -> None:
    path, size = tmp_path / "pool.svg", 1 << 20
    segments = [(0, size), (4 * size, 4 * size), (9 * size, 2 * size)]
    Timeline.of("pool", segments, [Event("alloc", *each) for each in segments]).draw(path)
    places = [[(box["y"], box["height"]) for box in found(path)] for found in (grounds, boxes)]
    assert places[0] == places[1][::-1] and len(places[0]) == 3
    written = [text for text in texts(path) if text in ("1.0 MiB", "2.0 MiB", "4.0 MiB")]
    assert sorted(written) == sorted(["1.0 MiB", "2.0 MiB", "4.0 MiB"] * 2)


def test_a_tiny_block_is_still_seen_inside_its_segment(tmp_path: Path) -> None:
    path, segment = tmp_path / "pool.svg", 1 << 34
    events = [Event("alloc", 0, 512), Event("alloc", segment - 512, 512)]
    Timeline.of("pool", [(0, segment)], events).draw(path)
    low, high = boxes(path)
    (ground,) = grounds(path)
    assert float(low["height"]) >= 1 and float(high["height"]) >= 1
    assert float(high["y"]) >= float(ground["y"])
    bottom = float(ground["y"]) + float(ground["height"])
    assert float(low["y"]) + float(low["height"]) <= bottom + 0.01


def test_the_kinds_of_blocks_have_their_own_colours_and_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "pool.svg"
    events = [
        Event("free", 64, 64),
        Event("alloc", 0, 64, stream=0x7F0, label="gone"),
        Event("free", 0, 64),
        Event("alloc", 128, 512, label="stays"),
    ]
    Timeline.of("pool", SEGMENTS, events, before=[(8192, 8)]).draw(path)
    fills = {box["fill"] for box in boxes(path)}
    assert len(fills) == 4  # the two earlier blocks have two shades
    assert {"temporary 1", "held at the end 1", "there before 2"} <= set(texts(path))
    (gone,) = [box["title"] for box in boxes(path) if box["title"].startswith("gone")]
    assert gone.splitlines()[1:] == [
        "64 bytes at 0x0",
        "from: event 1",
        "to: event 2",
        "stream: 0x7f0",
    ]


def test_marks_are_written_unless_they_would_collide(tmp_path: Path) -> None:
    path = tmp_path / "pool.svg"
    _, events, _ = stream_of_events(random.Random(os.urandom(8)), 1000)
    marks = [(0, "first"), (1, "hidden"), (500, "second")]
    Timeline.of("pool", SEGMENTS, events, marks=marks).draw(path)
    assert {"first", "second"} <= set(texts(path)) and "hidden" not in texts(path)


def test_any_text_makes_valid_xml(tmp_path: Path) -> None:
    path, text = tmp_path / "pool.svg", '<b> & "it\'s" \x00\x1b\ud800 ]]> $x$'
    event = Event("alloc", 0, 2048, label=text)
    Timeline.of(text, SEGMENTS, [event] * 2, marks=[(0, text)]).draw(path)
    clean = '<b> & "it\'s" \ufffd\ufffd\ufffd ]]> $x$'
    assert texts(path).count(clean) == 4  # the title, the mark, and in two large boxes
    assert all(box["title"].startswith(clean) for box in boxes(path))


@pytest.mark.parametrize("before", [[], [(0, 512)]])
def test_a_timeline_without_events_says_so(before: list[tuple[int, int]], tmp_path: Path) -> None:
    path = tmp_path / "pool.svg"
    Timeline.of("pool", SEGMENTS if before else [], [], before).draw(path)
    assert "No events were recorded." in texts(path) and len(boxes(path)) == len(before)


@pytest.mark.parametrize(("name", "suffix"), [("pool.gif", r"'\.gif'"), ("pool", "''")])
def test_a_suffix_that_cannot_be_drawn_is_named(name: str, suffix: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=rf"{suffix}, expected \.svg, \.png or \.pdf"):
        some_timeline(5).draw(tmp_path / name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("suffix", ["png", "pdf"])
def test_without_matplotlib_the_error_says_what_to_do(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ArgumentError, match=r"pip install matplotlib, or .* ends in \.svg"):
        some_timeline(5).draw(tmp_path / f"pool.{suffix}")
    assert not list(tmp_path.iterdir())


def test_with_matplotlib_the_same_page_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: dict[str, Any] = {
        name: MagicMock(name=name) for name in ("matplotlib", "figure", "patches")
    }
    for name, module in parts.items():
        full = name if name == "matplotlib" else f"matplotlib.{name}"
        monkeypatch.setitem(sys.modules, full, module)
    timeline = some_timeline(50)
    timeline.draw(tmp_path / "pool.svg")
    timeline.draw(tmp_path / "pool.PNG")
    figure = parts["figure"].Figure.return_value
    assert figure.savefig.call_args.args == (tmp_path / "pool.PNG",)
    drawn = [call.args for call in parts["patches"].Rectangle.call_args_list]
    corners = {(f"{x:.3f}", f"{y:.3f}") for (x, y), *_ in drawn}
    for box in boxes(tmp_path / "pool.svg"):
        assert (f"{float(box['x']):.3f}", f"{float(box['y']):.3f}") in corners
    written = [call.args[2] for call in figure.add_axes.return_value.text.call_args_list]
    assert written == texts(tmp_path / "pool.svg")
