"""Files for Perfetto and for torch's viewer of memory."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from torch.cuda import _memory_viz

import cgraph
from cgraph._viewer.exports import memory_snapshot, trace_events
from cgraph._viewer.lanes import in_lanes, ordered
from cgraph.errors import StateError
from cgraph.timeline import Event, Timeline
from lab import Lab, captured, fresh
from viewed import chain, node, step_of


def slices(nodes: list[Any]) -> list[dict[str, Any]]:
    nodes = ordered(nodes)
    in_lanes(nodes)
    return [one for one in trace_events("graph", nodes)["traceEvents"] if one["ph"] == "X"]


def test_a_snapshot_takes_lines_of_functions_with_spaces_in_their_names() -> None:
    event = Event("alloc", 0, 64, frames=("a b.py:3 my fn(int, char)", "no line"))
    snapshot = memory_snapshot(Timeline.of("pool", [(0, 4096)], [event]))
    [[traced]] = [snapshot["device_traces"][0][-1:]]
    assert traced["frames"] == [{"filename": "a b.py", "line": 3, "name": "my fn(int, char)"}]


def test_each_node_is_a_slice_after_those_it_depends_on() -> None:
    found = slices([node(), node("", [0]), node("", [0]), node("", [1]), node("", [2, 3])])
    assert [(one["tid"], one["ts"], one["dur"]) for one in found] == [
        (0, 0, 1), (0, 1, 1), (0, 2, 1), (0, 3, 1), (1, 1, 1)
    ]  # fmt: skip


def test_modules_are_slices_around_those_of_their_nodes() -> None:
    found = slices(chain(("M.a", "x"), ("M.a", "y"), ("M.b", "z")))
    names = [(one["name"], one["ts"], one["dur"]) for one in found]
    assert names == [("M", 0, 3), ("a", 0, 2), ("x", 0, 1), ("y", 1, 1), ("b", 2, 1), ("z", 2, 1)]
    assert found[4]["args"] == {"module": "M.b"}


def test_slices_last_as_long_as_nodes_where_that_is_known() -> None:
    found = slices([node(seconds=2e-6), node("", [0], seconds=5e-6)])
    assert [(one["ts"], one["dur"]) for one in found] == [(0, 2), pytest.approx((2, 5))]


def test_the_file_for_perfetto_has_operator_module_and_source(lab: Lab, tmp_path: Path) -> None:
    cgraph.view(step_of(lab)).save_perfetto(tmp_path / "graph.json")
    events = json.loads((tmp_path / "graph.json").read_text())["traceEvents"]
    said = [one["args"] for one in events if one["name"] == "addmm" and one["ph"] == "X"]
    assert said[0]["operator"] == "aten.addmm.default"
    assert said[0]["module"] == "Model.layers.0.inner.0" and "viewed.py" in said[0]["source"]


def test_torchs_own_functions_read_the_snapshot(lab: Lab, tmp_path: Path) -> None:
    graph = step_of(lab)
    cgraph.view(graph).save_memory_snapshot(tmp_path / "memory.pickle")
    snapshot = pickle.loads((tmp_path / "memory.pickle").read_bytes())
    timeline = graph.memory().timeline
    assert timeline is not None
    for draw in (_memory_viz.trace_plot, _memory_viz.segment_plot):
        assert "snapshot.pickle" in draw(snapshot)
    assert f"{len(snapshot['device_traces'][0])} entries" in _memory_viz.trace(snapshot)
    assert sum(map(_memory_viz.calc_active, snapshot["segments"])) == timeline.held
    assert f"segments: {len(snapshot['segments'])}" in _memory_viz.segsum(snapshot)


def test_the_snapshots_events_are_those_of_the_timeline() -> None:
    frames = ("/a/model.py:3 forward",)
    events = [
        Event("alloc", 0, 512, 7, "aten.add", frames),
        Event("alloc", 512, 1024, 7),
        Event("free", 0, 512, 7),
        Event("free", 2048, 512, 7),
    ]
    found = memory_snapshot(Timeline.of("pool", [(0, 4096)], events, [(2048, 512)]))
    [trace] = found["device_traces"]
    assert [(one["action"], one["addr"], one["size"]) for one in trace] == [
        ("alloc", 0, 512),
        ("alloc", 512, 1024),
        ("free_requested", 0, 512),
        ("free_completed", 0, 512),
        ("free_requested", 2048, 512),
        ("free_completed", 2048, 512),
    ]
    assert trace[0]["frames"][1] == {"filename": "/a/model.py", "line": 3, "name": "forward"}
    [segment] = found["segments"]
    states = [(one["address"], one["size"], one["state"]) for one in segment["blocks"]]
    assert states == [
        (0, 512, "inactive"), (512, 1024, "active_allocated"), (1536, 2560, "inactive")
    ]  # fmt: skip


def test_a_view_without_a_graph_has_no_file_for_perfetto(lab: Lab, tmp_path: Path) -> None:
    memory = cgraph.view(step_of(lab).memory())
    with pytest.raises(StateError, match=r"save_perfetto\(\) of a view without a graph.*Fix:"):
        memory.save_perfetto(tmp_path / "graph.json")
    assert not [*tmp_path.iterdir()]


def test_a_view_without_memory_has_no_snapshot(lab: Lab, tmp_path: Path) -> None:
    graph, _ = captured(lab, fresh(lab, 4), keep_graph=True)
    with pytest.raises(StateError, match=r"without memory.*record_memory"):
        cgraph.view(graph).save_memory_snapshot(tmp_path / "memory.pickle")
    assert not [*tmp_path.iterdir()]
