"""``cgraph.view``: what it takes, what the page has, and what it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cgraph
from cgraph._viewer.addresses import Addresses
from cgraph._viewer.page import page
from cgraph.errors import ArgumentError, ForeignError, StateError
from lab import Lab, fresh
from tree_programs import half, in_tree, line, step
from viewed import graph_of, step_of

ODD = "</script><b>\"'&\u2028 «é»\0"


def neg(x: torch.Tensor) -> torch.Tensor:
    return -x


def data_of(html: str) -> dict[str, Any]:
    """Return the data in a page."""
    [text] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html)
    found: dict[str, Any] = json.loads(text)
    return found


def texts_of(html: str) -> set[str]:
    return {*data_of(html)["graph"]["texts"]}


def test_a_graph_has_its_nodes_and_its_memory(lab: Lab) -> None:
    shown = cgraph.view(step_of(lab))
    found = data_of(shown.html)
    assert len(found["graph"]["nodes"]) >= 10
    assert found["memory"]["segments"] and found["memory"]["blocks"]
    [[folded, head]] = [found["graph"]["root"]["i"][0]["i"]]
    assert (folded["n"], len(folded["r"]), head["n"]) == ("layers.0 … 2", 3, "head")
    assert re.fullmatch(r"<cgraph.View of graph \d+: \d+ nodes, \d+ blocks>", repr(shown))


def test_a_node_tells_operator_module_source_and_labels(lab: Lab) -> None:
    x = fresh(lab, 4)

    def work() -> torch.Tensor:
        with cgraph.annotate("scale"):
            return x * 2

    found = texts_of(cgraph.view(graph_of(lab, work)).html)
    assert {"aten.mul.Tensor", "scale", "mul"} <= found
    assert any("test_view.py:" in one for one in found)


def test_a_graph_that_was_not_recorded_has_no_tab_of_memory(lab: Lab) -> None:
    x, graph = fresh(lab, 4), cgraph.CUDAGraph(keep_graph=True)
    with cgraph.graph(graph):
        _ = x + 1
    assert "memory" not in data_of(cgraph.view(graph).html)


def test_segments_come_one_after_the_other_with_their_breaks(lab: Lab) -> None:
    x = fresh(lab, 4)

    @cgraph.eager_break
    def look(y: torch.Tensor) -> torch.Tensor:
        return y * y.sum().item()

    with cgraph.record_memory():
        segments, _ = cgraph.SegmentedGraph.capture(
            lambda: look(x + 1) * 2, keep_graph=True, enable_annotations=True
        )
    found = data_of(cgraph.view(segments).html)
    nodes, texts = found["graph"]["nodes"], found["graph"]["texts"]
    titles = [texts[one["t"]] for one in nodes]
    assert [one for one in titles if "copy" not in one] == ["add", "look", "mul"]
    assert [one["d"] for one in nodes][-2:] == [[len(nodes) - 3], [len(nodes) - 2]]
    assert found["memory"]["blocks"]
    segments.reset()
    with pytest.raises(StateError, match="after reset"):
        cgraph.view(segments)


@pytest.mark.parametrize("kind", ["pool", "token", "memory", "timeline", "dry run"])
def test_the_memory_alone_can_be_seen(lab: Lab, kind: str) -> None:
    pool, x = cgraph.MemPool(), fresh(lab, 64)
    graph = graph_of(lab, lambda: (x + 1) * 2, pool=pool)
    ways: dict[str, Callable[[], object]] = {
        "pool": lambda: pool,
        "token": graph.pool,
        "memory": graph.memory,
        "timeline": lambda: graph.memory().timeline,
        "dry run": lambda: cgraph.dry_run(lambda: (x + 1) * 2),
    }
    found = data_of(cgraph.view(ways[kind](), title="mine").html)
    assert (found["title"], "graph" in found) == ("mine", False)
    assert len(found["memory"]["blocks"]) == 2


def test_trees_are_drawn_with_replays_and_bytes_and_ways_as_lanes(lab: Lab) -> None:
    first = in_tree(lab, half, fresh(lab, 64))
    ways = [in_tree(lab, line, fresh(lab, 64)), in_tree(lab, neg, fresh(lab, 64))]
    for number in range(12):
        step()
        y = first(fresh(lab, 64))
        z = ways[number % 2](ways[number % 2](y))
        del y, z
    report = cgraph.trees.report()
    found = data_of(cgraph.view(report).html)["graph"]
    assert found == data_of(cgraph.view(cgraph.trees).html)["graph"]
    paths: list[str] = []
    for one in found["nodes"]:
        before = [paths[place] for place in one["d"]]
        paths.append(" ".join([*before, found["texts"][one["t"]]]))
    assert sorted(paths) == ["half", "half line", "half line line", "half neg", "half neg neg"]
    lanes = [one["l"] for one in found["nodes"]]
    assert {lane for lane, path in zip(lanes, paths, strict=True) if "line" in path} != {
        lane for lane, path in zip(lanes, paths, strict=True) if "neg" in path
    }
    replays = [one["m"][found["measures"].index("replays") - 1] for one in found["nodes"]]
    assert replays == [one.replays for one in report.trees[0].nodes]
    assert max(replays) == replays[paths.index("half")]


def test_no_text_ends_an_element_of_the_page(lab: Lab) -> None:
    x = fresh(lab, 4)

    def work() -> torch.Tensor:
        with cgraph.annotate(ODD):
            return x * 2

    html = cgraph.view(graph_of(lab, work), title=ODD).html
    tags: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: tags.append(tag)  # type: ignore[method-assign]
    parser.feed(html)
    assert tags.count("script") == 2 and "b" not in tags
    found = data_of(html)
    assert (found["title"], found["graph"]["root"]["i"][0]["n"]) == (ODD, f"«{ODD}»")
    frame = cgraph.view(graph_of(lab, work), title=ODD)._repr_html_()
    assert frame.count("<") == 2 and 'sandbox="allow-scripts"' in frame


def test_the_page_loads_nothing_and_runs_only_its_own_script(lab: Lab) -> None:
    html = cgraph.view(step_of(lab)).html
    assert not re.search(r"https?://|<link|<img|@import|url\(|\bsrc=", html)
    [policy] = re.findall(r'Content-Security-Policy" content="([^"]*)"', html)
    assert policy.startswith("default-src 'none'; ") and "script-src 'sha256-" in policy


def test_the_same_data_give_the_same_bytes(lab: Lab) -> None:
    graph = step_of(lab)
    assert cgraph.view(graph).html == cgraph.view(graph).html
    assert page("empty", None, None) == page("empty", None, None)


def test_show_opens_a_saved_page(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    shown = cgraph.view(step_of(lab))
    shown.show()
    shown.save(tmp_path / "mine.html")
    [file] = tmp_path.glob("cgraph-*.html")
    assert opened == [file.as_uri()]
    assert file.read_bytes() == (tmp_path / "mine.html").read_bytes()


def test_what_cannot_be_seen_is_refused_with_the_reason(lab: Lab) -> None:
    x, graph, pool = fresh(lab, 4), cgraph.CUDAGraph(), cgraph.MemPool()
    with pytest.raises(StateError, match=r"view\(\) before a successful capture"):
        cgraph.view(graph)
    with cgraph.graph(graph, pool=pool):
        _ = x + 1
    with pytest.raises(StateError, match=r"view\(\) needs the template"):
        cgraph.view(graph)
    with pytest.raises(StateError, match=r"pool \d+ .* were not recorded. Fix: capture inside"):
        cgraph.view(pool)
    with pytest.raises(StateError, match="were not recorded"):
        cgraph.view(graph.memory())
    segments, _ = cgraph.SegmentedGraph.capture(lambda: x + 1)
    with pytest.raises(StateError, match=r"templates of the segments.*Fix: .*keep_graph=True"):
        cgraph.view(segments)
    with pytest.raises(ArgumentError, match="what is 'graph', expected a CUDAGraph"):
        cgraph.view("graph")
    with pytest.raises(ForeignError):
        cgraph.view((7, 7))
    with pytest.raises(StateError, match=r"view\(\) of graph trees without a graph. Fix: call"):
        cgraph.view(cgraph.trees.TreesReport((), ()))


def test_a_node_has_its_own_addresses_and_those_of_its_graphs_nodes() -> None:
    found = [SimpleNamespace(node=node, address=address) for node, address in ((1, 10), (3, 30))]
    addresses = Addresses(found)  # type: ignore[arg-type]
    child = {"handle": 2, "bodies": [{"nodes": [{"handle": 3}]}]}
    for node, expected in (({"handle": 1}, [10]), (child, [30]), ({"handle": 4}, [])):
        assert [one.address for one in addresses.of(node)] == expected


def test_a_page_says_that_its_nodes_are_operators_of_the_simulator(lab: Lab) -> None:
    about = data_of(cgraph.view(step_of(lab)).html)["graph"]["about"]
    assert ("simulator" in about) == (lab.device == "cpu")
