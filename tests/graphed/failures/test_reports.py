"""Reports of graphed functions: their numbers, texts, tables and pages are true."""

from __future__ import annotations

import io
import json
import random
import re
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from cgraph._text import in_time, in_units
from cgraph.reports import FunctionReport, KeyReport, Report, Rerecording

# The operating system's numbers: others in every run.
CHANCE = random.SystemRandom()
NASTY = "<script>alert('&\"')</script>\x00\x1b[7m\ud800\n</table>"


def some_key(**changes: Any) -> KeyReport:
    """Return a captured key that is fine."""
    values: dict[str, Any] = {
        "key": f"x: float32[{CHANCE.randrange(1, 999)}, 16]",
        "state": "captured",
        "reason": None,
        "where": None,
        "rerecorded": (),
        "replays": CHANCE.randrange(1000, 99999),
        "eager_calls": CHANCE.randrange(999),
        "capture_seconds": CHANCE.uniform(0.01, 0.9),
        "nodes": CHANCE.randrange(1, 9999),
        "memory_bytes": CHANCE.randrange(1, 1 << 32),
        "breaks": (),
    }
    return KeyReport(**(values | changes))


def eager_key(reason: str | None, **changes: Any) -> KeyReport:
    """Return a key that was never captured."""
    nothing = dict.fromkeys(("nodes", "memory_bytes"))
    some = {"state": "eager", "reason": reason, "replays": 0, "capture_seconds": 0.0}
    return some_key(**(nothing | some | changes))


def moved(count: int, argument: str | None = "cache", reason: str = "moved") -> Rerecording:
    return Rerecording(reason, argument, "model.py:31", count)


def of(*keys: KeyReport, name: str = "decode") -> FunctionReport:
    return FunctionReport(name, "/home/me/app/model.py:12", keys)


def root(shown: Report | FunctionReport) -> ElementTree.Element:
    """Parse the page, which must be XML."""
    return ElementTree.fromstring(shown.html())


def said(element: ElementTree.Element) -> str:
    return "".join(element.itertext())


def rows(shown: Report | FunctionReport) -> list[dict[str, str]]:
    """Return the cells of each key by column name, from the page."""
    found = []
    for grid in root(shown).iter("table"):
        names = [said(head) for head in grid.iterfind("thead/tr/th")]
        for body in grid.iterfind("tbody"):
            found.append(dict(zip(names, map(said, body[0]), strict=True)))
    return found


def printed_rows(function: FunctionReport) -> list[dict[str, str]]:
    """Return the cells of each key from the printed table, by column position."""
    lines = str(function).splitlines()
    spans = [match.span() for match in re.finditer("─+", lines[2])]
    table = [[line[start:end].strip() for start, end in spans] for line in [lines[1], *lines[3:]]]
    return [dict(zip(table[0], row, strict=True)) for row in table[1 : 1 + len(function.keys)]]


def test_a_function_sums_its_keys() -> None:
    first, second = some_key(), some_key(state="observed")
    unknown = some_key(memory_bytes=None)
    function = of(first, second, unknown, eager_key("raised"))
    assert function.captured == 2
    assert function.replays == first.replays + second.replays + unknown.replays
    captures = [key.capture_seconds for key in (first, second, unknown)]
    assert function.capture_seconds == pytest.approx(sum(captures))
    assert function.memory_bytes == (first.memory_bytes or 0) + (second.memory_bytes or 0)


def test_a_report_cannot_be_changed() -> None:
    for one in (some_key(), of(), Report(()), moved(1)):
        with pytest.raises(FrozenInstanceError):
            setattr(one, fields(one)[0].name, "other")


def test_a_key_that_is_fine_needs_no_advice() -> None:
    assert some_key().advice is None
    assert some_key(rerecorded=(moved(2), moved(2, None, "evicted"))).advice is None
    assert some_key(state="observed").advice is None


@pytest.mark.parametrize("reason", ["something else", "it did a host sync", ""])
def test_an_eager_key_whose_reason_is_not_known_points_to_explain(reason: str) -> None:
    assert "cgraph.explain(fn, *args)" in (eager_key(reason).advice or "")


def test_the_fix_of_a_failed_capture_is_the_advice() -> None:
    key = eager_key("raised in the capture", fix="choose on the device")
    assert key.advice == "choose on the device"


def test_an_argument_that_often_made_a_capture_anew_is_to_be_kept() -> None:
    often = some_key(rerecorded=(moved(2), moved(1, reason="resized"), moved(2, "mask")))
    advice = often.advice or ""
    assert advice.startswith("cache made it be captured again 3 times: keep it")
    assert "mask" not in advice


def test_a_key_that_was_often_evicted_needs_more_graphs() -> None:
    advice = some_key(rerecorded=(moved(5, None, "evicted"),)).advice or ""
    assert advice.startswith("evicted and captured again 5 times: raise max_graphs")


def test_a_capture_that_was_not_used_is_told() -> None:
    once = some_key(replays=1, capture_seconds=0.25).advice or ""
    assert once.startswith("captured in 250 ms and never replayed again: ")
    assert some_key(replays=2).advice is None
    each = some_key(replays=3, capture_seconds=0.5, rerecorded=(moved(2),)).advice or ""
    assert each.startswith("captured 3 times in 500 ms for 3 replays: ")
    assert some_key(replays=4, rerecorded=(moved(2),)).advice is None
    assert some_key(replays=1, capture_seconds=0.25, is_simulated=True).advice is None


def test_a_function_that_has_sizes_is_not_to_be_given_some() -> None:
    for changes in ({"replays": 0}, {"replays": 1}):
        assert "give sizes=" in (some_key(**changes).advice or "")
        advice = some_key(**changes, has_sizes=True).advice
        assert advice is not None and "give sizes=" not in advice


def test_the_cells_of_a_key_are_its_numbers() -> None:
    key = some_key(
        replays=12345,
        eager_calls=7,
        capture_seconds=0.0123,
        nodes=1389,
        copied_bytes=96,
    )
    expected = {
        "key": key.key,
        "state": "captured",
        "replays": "12,345",
        "eager calls": "7",
        "capture ms": "12.3",
        "nodes": "1,389",
        "copied": "96 B",
        "memory": in_units(key.memory_bytes or 0),
    }
    assert printed_rows(of(key)) == [expected]
    (row,) = rows(of(key))
    assert row == expected


def test_what_is_not_known_is_a_dash() -> None:
    (dashes,) = printed_rows(of(eager_key("raised")))
    assert [dashes[name] for name in ("nodes", "copied", "memory")] == ["-"] * 3
    assert dashes["state"] == "eager" and dashes["replays"] == "0"


def test_keys_are_in_the_order_of_their_replays() -> None:
    counts = CHANCE.sample(range(2, 999), 9)
    keys = [some_key(key=f"key {count}", replays=count) for count in counts]
    function = of(*keys, eager_key("raised", key="never"))
    expected = [*(f"key {count}" for count in sorted(counts, reverse=True)), "never"]
    assert [row["key"] for row in printed_rows(function)] == expected
    assert [row["key"] for row in rows(function)] == expected
    names = [key.key for key in function.keys]
    assert [key["key"] for key in function.to_dict()["keys"]] == names


def test_reasons_rerecordings_breaks_and_advice_are_said_in_words() -> None:
    function = of(
        eager_key("raised: float(x)\n waits", where="/home/me/app/model.py:33"),
        some_key(rerecorded=(moved(4), moved(1, None, "evicted")), breaks=("a.py:1", "b.py:2")),
    )
    words = [
        ("why", "raised: float(x) waits (app/model.py:33)"),
        ("advice", function.keys[0].advice or ""),
        ("captured again", "4 times: cache moved (model.py:31)"),
        ("captured again", "once: evicted (model.py:31)"),
        ("eager breaks", "a.py:1, b.py:2"),
        ("advice", function.keys[1].advice or ""),
    ]
    page = root(function)
    pairs = zip(map(said, page.iter("dt")), map(said, page.iter("dd")), strict=True)
    assert sorted(pairs) == sorted(words)
    lines = str(function).splitlines()
    assert sorted(line for line in lines if line.startswith("  ")) == sorted(
        f"  {about}: {text}" for about, text in words
    )


def test_a_function_tells_its_sums_and_where_it_is() -> None:
    function = of(some_key(), some_key(state="observed"))
    sums = (
        f"1 of 2 keys captured, in {in_time(function.capture_seconds)} and"
        f" {in_units(function.memory_bytes)}; {function.replays:,} replays"
    )
    assert str(function).splitlines()[0] == f"decode (app/model.py:12): {sums}"
    assert sums in said(root(function))
    assert str(Report((function,))) == str(function)


def test_a_report_of_several_functions_begins_with_their_sums() -> None:
    one, two = of(some_key(), name="one"), of(some_key(), eager_key("raised"), name="two")
    report = Report((one, two))
    first = str(report).splitlines()[0]
    assert first.startswith("2 functions: 2 of 3 keys captured, in ")
    assert first.endswith(f"; {one.replays + two.replays:,} replays")
    assert str(one) in str(report) and str(two) in str(report)
    assert first in said(root(report)) and len(rows(report)) == 3


def test_what_is_empty_says_so() -> None:
    for told in (str(Report(())), said(root(Report(())))):
        assert "No function is graphed yet" in told
    bare = FunctionReport("encode", None, ())
    assert str(bare) == "encode: It was not called yet."
    assert "It was not called yet." in said(root(bare)) and rows(bare) == []
    assert (bare.captured, bare.replays, bare.capture_seconds, bare.memory_bytes) == (0, 0, 0, 0)
    assert Report(()).to_dict() == {"functions": []}


def test_numbers_survive_json() -> None:
    keys = [
        some_key(rerecorded=(moved(4),), breaks=("a.py:1",)),
        eager_key(NASTY),
    ]
    function = of(*keys)
    numbers = Report((function,)).to_dict()
    assert json.loads(json.dumps(numbers)) == numbers
    (found,) = numbers["functions"]
    assert found == function.to_dict()
    names = ["captured", "replays", "capture_seconds", "memory_bytes", "where"]
    assert {name: found[name] for name in names} == {
        name: getattr(function, name) for name in names
    }
    for key, values in zip(keys, found["keys"], strict=True):
        assert set(values) == {each.name for each in fields(KeyReport)} | {"advice"}
        for name in set(values) - {"rerecorded", "breaks", "frozen"}:
            assert values[name] == getattr(key, name)
        assert [Rerecording(**one) for one in values["rerecorded"]] == [*key.rerecorded]
        assert tuple(values["breaks"]) == key.breaks


def test_no_word_of_a_user_becomes_a_part_of_the_page_or_tears_the_table() -> None:
    again = Rerecording(NASTY, NASTY, NASTY, 2)
    nasty = some_key(
        key=NASTY, reason=NASTY, where=NASTY, rerecorded=(again, again, again), breaks=(NASTY,)
    )
    plain = some_key(key="a", reason="a", where="a", rerecorded=(moved(2, "a"),) * 3, breaks=("a",))
    function = FunctionReport(NASTY, NASTY, (nasty,))
    page = root(Report((function,)))
    model = root(of(plain))
    assert [each.tag for each in page.iter()] == [each.tag for each in model.iter()]
    assert "<script>alert('&\"')</script>" in said(page)
    assert "<script" not in function.html() + function._repr_html_()
    assert not set(str(function).encode("utf-8")) & {0, 27}
    assert len(str(function).splitlines()) == len(str(of(plain)).splitlines())


def test_a_page_needs_nothing_from_elsewhere() -> None:
    text = Report((of(some_key()), of(eager_key("raised")))).html()
    assert text.startswith("<!DOCTYPE html>")
    assert not re.search(r"https?:|<script|<link|<img|@import|url\(|\bsrc=|\bhref=|\bon\w+=", text)
    assert "default-src 'none'" in text


def test_every_ink_of_a_page_can_be_read_in_light_and_dark() -> None:
    light, dark = (
        dict(re.findall(r"--(\w+): (#\w{6})", part))
        for part in of(some_key())._repr_html_().split("@media (prefers-color-scheme: dark)")
    )
    assert light.keys() == dark.keys()
    for colours in (light, dark):
        for ink in ("ink", "faint", "bad"):
            assert contrast(colours[ink], colours["ground"]) >= 4.5
        assert contrast(colours["ink"], colours["head"]) >= 4.5


def contrast(one: str, other: str) -> float:
    """Return the WCAG 2 contrast of two colours: 1 if equal, 21 between black and white."""

    def light(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (
            p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted([light(one), light(other)])
    return (high + 0.05) / (low + 0.05)


def test_a_page_is_written_and_returned(tmp_path: Path) -> None:
    function = of(some_key(reason=NASTY))
    for shown in (function, Report((function,))):
        path = tmp_path / "report.html"
        text = shown.html(path)
        assert path.read_text(encoding="utf-8") == text == shown.html(str(path)) == shown.html()


def test_a_notebook_gets_the_content_without_a_page_around_it() -> None:
    report = Report((of(some_key()),))
    content = report._repr_html_()
    assert content in report.html() and "<html" not in content and "<body" not in content
    style = content.split("<style>")[1].split("</style>")[0]
    selectors = [line for line in style.splitlines() if line.endswith("{") and line[0] != "@"]
    assert selectors and all(line.lstrip().startswith(".cgraph-report") for line in selectors)


def test_show_prints_the_table_to_a_file_or_to_standard_output(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for shown in (of(some_key()), Report((of(some_key()), of()))):
        shown.show()
        assert capsys.readouterr().out == f"{shown}\n"
        file = io.StringIO()
        shown.show(file)
        assert file.getvalue() == f"{shown}\n" and capsys.readouterr().out == ""
