"""Contents of a captured graph, as torch 2.15 describes them, and the bodies of its nodes."""

from __future__ import annotations

import ctypes
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import cgraph
from cgraph import data
from cgraph.errors import StateError
from lab import Lab, SimLab, captured, fresh

TELLS_IDS = 13_010
TELLS_BODIES = 13_020
TORCH_NODE_KEYS = {
    "index",
    "node_type",
    "tools_id",
    "graph_id",
    "node_id",
    "kernel_name",
    "grid_dim",
    "block_dim",
    "shared_mem_bytes",
    "event_ptr",
    "host_fn_addr",
    "host_fn_name",
    "dependencies",
    "dependents",
}


def kept(lab: Lab) -> cgraph.CUDAGraph:
    """Return an instantiated graph of two kernels in a row, whose template is kept."""
    x = fresh(lab, 64)
    graph = cgraph.CUDAGraph(keep_graph=True)
    with cgraph.graph(graph):
        x.mul_(2).add_(1)
    graph.instantiate()
    return graph


def diamond(lab: Lab) -> cgraph.CUDAGraph:
    """Capture one kernel, then one on each of two streams, and one after both."""
    x, side = fresh(lab, 64), lab.stream()
    graph = cgraph.CUDAGraph(keep_graph=True)
    with cgraph.graph(graph):
        y = x * 2
        lab.fork(side)
        left = y * 3
        with lab.use(side):
            right = y * 5
        lab.join(side)
        torch.add(left, right)
    graph.instantiate()
    return graph


def described(text: dict[str, Any]) -> dict[str, Any]:
    return data._described(json.loads(json.dumps(text)))


def test_debug_dump_raises_where_no_template_is_live(lab: Lab, tmp_path: Path) -> None:
    path = tmp_path / "graph.dot"
    graph = cgraph.CUDAGraph()
    with pytest.raises(StateError, match=r"debug_dump\(\) before a successful capture"):
        graph.debug_dump(str(path))
    x = fresh(lab, 8)
    with cgraph.graph(graph):
        x.add_(1)
    with pytest.raises(StateError, match="keep_graph=True"):
        graph.debug_dump(str(path))
    assert not path.exists()
    graph = kept(lab)
    graph.debug_dump(str(path))
    assert path.read_text(encoding="utf-8").startswith("digraph")


@pytest.mark.parametrize("keep_graph", [False, True])
def test_export_dot_writes_in_either_keep_mode(lab: Lab, tmp_path: Path, keep_graph: bool) -> None:
    graph = cgraph.CUDAGraph(keep_graph=keep_graph)
    path = tmp_path / "graph.dot"
    graph.register_capture_end_hook(cgraph.export_dot(path))
    graph.register_capture_end_hook(cgraph.export_dot(f"{path}.short", verbose=False))
    x = fresh(lab, 8)
    with cgraph.graph(graph):
        x.mul_(2).add_(1)
    verbose = path.read_text(encoding="utf-8")
    short = Path(f"{path}.short").read_text(encoding="utf-8")
    assert verbose.count("->") == short.count("->") == 1
    assert len(short) < len(verbose)


def test_get_graph_data_names_what_is_missing(lab: Lab) -> None:
    graph = cgraph.CUDAGraph(keep_graph=True)
    with pytest.raises(StateError, match="before a successful capture"):
        graph.get_graph_data()
    x = fresh(lab, 8)
    with cgraph.graph(graph):
        x.add_(1)
    with pytest.raises(StateError, match=r"needs the exec.*instantiate\(\)"):
        graph.get_graph_data()
    graph.instantiate()
    assert len(graph.get_graph_data()["nodes"]) == 1
    graph.reset()
    with pytest.raises(StateError, match="before a successful capture"):
        graph.get_graph_data()
    unkept, _ = captured(lab, x)
    with pytest.raises(StateError, match=r"needs the template.*keep_graph=True"):
        unkept.get_graph_data()


def test_nodes_and_edges_have_torchs_structure(lab: Lab) -> None:
    graph = kept(lab)
    found = graph.get_graph_data()
    assert found == cgraph.graph_data(graph)
    assert list(found) == ["exec_graph_id", "nodes", "edges"]
    assert found["edges"] == [{"from": 0, "to": 1, "from_port": 0, "to_port": 0, "type": 0}]
    for index, node in enumerate(found["nodes"]):
        assert node.keys() >= TORCH_NODE_KEYS
        assert node["index"] == index and node["node_type"] == "kernel"
        assert isinstance(node["kernel_name"], str) and node["kernel_name"]
        for dim in (node["grid_dim"], node["block_dim"]):
            assert type(dim) is tuple and len(dim) == 3 and min(dim) >= 1
        assert node["shared_mem_bytes"] >= 0
        assert (node["event_ptr"], node["host_fn_addr"], node["host_fn_name"]) == (0, 0, None)
        assert node["bodies"] == []
    assert [node["dependencies"] for node in found["nodes"]] == [[], [0]]
    assert [node["dependents"] for node in found["nodes"]] == [[1], []]


def test_a_diamond_of_forked_streams_has_its_dependencies(lab: Lab) -> None:
    nodes = diamond(lab).get_graph_data()["nodes"]
    kernels = [node for node in nodes if node["node_type"] == "kernel"]
    assert len(kernels) == len(nodes) == 4
    first, *sides, last = (node["index"] for node in kernels)
    assert nodes[first]["dependencies"] == []
    assert sorted(nodes[first]["dependents"]) == sides
    assert all(nodes[side]["dependencies"] == [first] for side in sides)
    assert sorted(nodes[last]["dependencies"]) == sides
    assert nodes[last]["dependents"] == []


def test_each_call_gives_a_new_dictionary(lab: Lab) -> None:
    graph = kept(lab)
    first = graph.get_graph_data()
    expected = pickle.dumps(first)
    first["nodes"][0]["dependents"].append(99)
    first["edges"].clear()
    del first["exec_graph_id"]
    assert pickle.dumps(graph.get_graph_data()) == expected


@pytest.mark.parametrize("keep_graph", [False, True])
def test_export_graph_data_pickles_at_each_instantiation(
    lab: Lab, tmp_path: Path, keep_graph: bool
) -> None:
    graph = cgraph.CUDAGraph(keep_graph=keep_graph)
    path = tmp_path / "graph.pickle"
    graph.register_post_instantiate_hook(cgraph.export_graph_data(path))
    x = fresh(lab, 8)
    with cgraph.graph(graph):
        x.mul_(2).add_(1)
    assert path.exists() is not keep_graph
    if keep_graph:
        graph.instantiate()
    found = pickle.loads(path.read_bytes())
    assert [node["node_type"] for node in found["nodes"]] == ["kernel", "kernel"]
    if keep_graph:
        assert found == graph.get_graph_data()


def test_ids_are_those_of_the_exec_or_none(lab: Lab) -> None:
    graph = kept(lab)
    first = graph.get_graph_data()
    graph.instantiate()
    second = graph.get_graph_data()
    if first["exec_graph_id"] is None:
        ids = {node[key] for node in first["nodes"] for key in ("tools_id", "graph_id", "node_id")}
        assert ids == {None} and graph._template.graph_id is None
        return
    check_ids(graph, first, second)


def check_ids(graph: cgraph.CUDAGraph, first: dict[str, Any], second: dict[str, Any]) -> None:
    assert first["exec_graph_id"] != second["exec_graph_id"] != graph._template.graph_id
    for found in (first, second):
        exec_id = found["exec_graph_id"]
        for node in found["nodes"]:
            assert node["graph_id"] == exec_id
            assert node["tools_id"] == exec_id << 32 | node["node_id"]
        assert len({node["node_id"] for node in found["nodes"]}) == 2
    before, after = ([node["node_id"] for node in found["nodes"]] for found in (first, second))
    assert before == after


def test_ids_of_a_new_driver_are_remapped_to_the_exec() -> None:
    with cgraph.sim.use(driver_version=TELLS_IDS) as simulator:
        graph = kept(SimLab(simulator))
        first = graph.get_graph_data()
        graph.instantiate()
        check_ids(graph, first, graph.get_graph_data())


def test_the_body_of_a_child_graph_is_described_at_any_depth(lab: Lab) -> None:
    inner, middle, outer = kept(lab), kept(lab), kept(lab)
    middle._template.add_child(inner._template)
    outer._template.add_child(middle._template)
    outer.instantiate()
    nodes = outer.get_graph_data()["nodes"]
    (child,) = (node for node in nodes if node["node_type"] == "child_graph")
    (body,) = child["bodies"]
    (grandchild,) = (node for node in body["nodes"] if node["node_type"] == "child_graph")
    (body,) = grandchild["bodies"]
    names = [node["kernel_name"] for node in inner.get_graph_data()["nodes"]]
    assert [node["kernel_name"] for node in body["nodes"]] == names
    assert len(body["edges"]) == 1 and body["nodes"][1]["dependencies"] == [0]


@pytest.mark.parametrize(("version", "bodies"), [(TELLS_IDS, 0), (TELLS_BODIES, 2)])
def test_bodies_of_conditional_nodes_are_there_where_the_driver_tells(
    version: int, bodies: int
) -> None:
    with cgraph.sim.use(driver_version=version) as simulator:
        lab = SimLab(simulator)
        body, graph = kept(lab), kept(lab)
        graph._template.add_conditional(simulator.core, [body._template, body._template])
        graph.instantiate()
        nodes = graph.get_graph_data()["nodes"]
        (node,) = (node for node in nodes if node["node_type"] == "conditional")
        assert node["condition"] == ("if" if bodies else None)
        assert [len(body["nodes"]) for body in node["bodies"]] == [2] * bodies


def test_events_are_told_and_kernels_may_lack_a_name() -> None:
    nodes = [
        {"index": 0, "handle": 16, "kind": "kernel"},
        {"index": 1, "handle": 32, "kind": "event_record", "event": 4096},
        {"index": 2, "handle": 48, "kind": "event_wait", "event": 4096},
    ]
    kernel, record, wait = described({"nodes": nodes, "edges": []})["nodes"]
    assert (kernel["kernel_name"], kernel["grid_dim"], kernel["event_ptr"]) == (None, None, 0)
    assert (record["node_type"], wait["node_type"]) == ("event_record", "wait_event")
    assert record["event_ptr"] == wait["event_ptr"] == 4096


def test_programmatic_edges_keep_their_ports_and_type() -> None:
    nodes = [{"index": index, "handle": index, "kind": "kernel"} for index in range(2)]
    edge = {"from": 0, "to": 1, "from_port": 1, "to_port": 0, "kind": "programmatic", "type": 1}
    found = described({"nodes": nodes, "edges": [edge]})
    assert found["edges"] == [{"from": 0, "to": 1, "from_port": 1, "to_port": 0, "type": 1}]


def test_a_host_function_has_its_exported_name() -> None:
    address = ctypes.cast(ctypes.CDLL(None).strlen, ctypes.c_void_p).value
    node = {"index": 0, "handle": 16, "kind": "host", "host_function": address, "host_data": 0}
    (found,) = described({"nodes": [node], "edges": []})["nodes"]
    assert found["host_fn_addr"] == address
    assert found["host_fn_name"] is None or "strlen" in found["host_fn_name"]


def test_an_address_outside_all_libraries_has_no_name() -> None:
    buffer = ctypes.create_string_buffer(16)
    node = {
        "index": 0,
        "handle": 16,
        "kind": "host",
        "host_function": ctypes.addressof(buffer),
        "host_data": 0,
    }
    (found,) = described({"nodes": [node], "edges": []})["nodes"]
    assert found["host_fn_name"] is None


def test_a_failing_driver_call_comes_out_as_its_error(sim: SimLab) -> None:
    graph = kept(sim)
    expected = graph.get_graph_data()
    for call in ("cuGraphGetEdges", "cuGraphNodeGetType", "cuGraphExecGetId"):
        sim.simulator.fail_next(call, 999)
        with pytest.raises(cgraph.errors.DriverError, match=call):
            graph.get_graph_data()
    assert graph.get_graph_data() == expected
