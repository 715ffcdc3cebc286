"""Pictures of templates: valid, complete, readable."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import cgraph
from cgraph import picture
from lab import Lab

SVG = "{http://www.w3.org/2000/svg}"
ADD = "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_15CUDAFunctor_addIfEESt5arrayIPcLm3EEEE"
SUM = (
    "_ZN2at6native13reduce_kernelILi512ELi1ENS0_8ReduceOpIfNS0_14func_wrapper_tIfNS0_11sum_functorI"
    "fffEEEEjfLi4ELi4EEEEEvT1_"
)
COPY = "void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda(int)>(int)"
SQRT = (
    "_ZN2at6native12_GLOBAL__N_125multi_tensor_apply_kernelINS1_18TensorListMetadataILi2EEENS1_14Una"
    "ryOpFunctorIfLi2ELi1ELi1EEEJNS0_4SqrtIfEEEEEvT_T0_DpT1_"
)


def kernel(index: int, name: str = "axpy") -> dict[str, Any]:
    dim = {"x": 1, "y": 1, "z": 1}
    return {
        "index": index,
        "kind": "kernel",
        "name": name,
        "grid": dim,
        "block": dim,
        "shared_bytes": 0,
    }


def template(count: int, edges: list[tuple[int, int]]) -> dict[str, Any]:
    return {
        "nodes": [kernel(index) for index in range(count)],
        "edges": [{"from": before, "to": after} for before, after in edges],
    }


def chain(count: int) -> dict[str, Any]:
    return template(count, [(index, index + 1) for index in range(count - 1)])


def boxes(svg: str) -> list[tuple[float, float, float, float]]:
    found = ElementTree.fromstring(svg).findall(f"{SVG}g[@class='node']/{SVG}rect")
    return [tuple(float(box.attrib[key]) for key in ("x", "y", "width", "height")) for box in found]  # type: ignore[misc]


def edges(svg: str) -> int:
    paths = ElementTree.fromstring(svg).iter(f"{SVG}path")
    return sum(path.attrib.get("class", "").startswith("edge") for path in paths)


def test_a_captured_graph_has_a_box_for_each_node(lab: Lab, tmp_path: Path) -> None:
    x = torch.ones(8, 8, device=lab.device)
    graph = cgraph.CUDAGraph(keep_graph=True)
    with cgraph.graph(graph):
        x.neg().add_(1).mul_(2)
    picture.save(graph, tmp_path / "graph.svg", title="A & B")
    svg = (tmp_path / "graph.svg").read_text(encoding="utf-8")
    assert len(boxes(svg)) == 3 and edges(svg) == 2
    assert "A &amp; B" in svg and "3 nodes, 2 edges" in svg


def test_a_graph_without_a_template_is_refused(lab: Lab, tmp_path: Path) -> None:
    x = torch.ones(8, device=lab.device)
    graph = cgraph.CUDAGraph()
    with cgraph.graph(graph):
        x.add_(1)
    with pytest.raises(cgraph.errors.StateError, match=r"picture\.save"):
        picture.save(graph, tmp_path / "graph.svg")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "data",
    [
        template(0, []),
        template(1, []),
        chain(300),
        template(40, [(index, 39) for index in range(39)]),
        template(9, [(0, 1), (0, 2), (1, 3), (2, 4), (4, 5), (3, 6), (5, 6), (0, 6), (6, 7)]),
    ],
    ids=["empty", "one", "chain", "wide", "forked"],
)
def test_every_shape_has_all_boxes_apart_and_all_edges(data: dict[str, Any]) -> None:
    svg = picture.svg(data)
    found = boxes(svg)
    assert len(found) == len(data["nodes"]) and edges(svg) == len(data["edges"])
    for place, (x, y, width, height) in enumerate(found):
        for other_x, other_y, _, _ in found[:place]:
            assert abs(x - other_x) >= width or abs(y - other_y) >= height


def test_a_long_chain_makes_a_page_and_not_a_strip() -> None:
    page = ElementTree.fromstring(picture.svg(chain(300)))
    assert 1 < float(page.attrib["width"]) / float(page.attrib["height"]) < 2.5


def test_nodes_that_are_no_kernels_are_drawn() -> None:
    data = {
        "nodes": [
            {"index": 0, "kind": "memcpy", "bytes": 4096},
            {"index": 1, "kind": "child", "bodies": [chain(2)]},
            {"index": 2, "kind": "event_record"},
        ],
        "edges": [],
    }
    svg = picture.svg(data)
    assert len(boxes(svg)) == 3
    assert "bytes: 4096" in svg and "graph of 2 nodes" in svg and "event record" in svg


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        ("memcpy", "copy, index"),
        ("memset", "fill"),
        ("host", "host function"),
        ("child", "child graph"),
        ("conditional", "child graph"),
        ("mem_alloc", "memory"),
        ("mem_free", "memory"),
        ("batch_mem_op", "order only"),
        ("empty", "order only"),
        ("event_wait", "order only"),
        ("external_signal", "order only"),
        ("type_99", "order only"),
    ],
)
def test_a_node_that_is_no_kernel_has_its_family(kind: str, family: str) -> None:
    assert picture.family({"index": 0, "kind": kind}) == family


@pytest.mark.parametrize(
    ("name", "short", "family"),
    [
        ("aten.native_layer_norm.default", "layer_norm", "reduction"),
        ("aten.normal_.default", "normal", "random"),
        ("aten.addmm.default", "addmm", "matrix product"),
        ("aten.clamp_min.default", "clamp_min", "elementwise"),
        ("nvjet_sm90_sss_64x32_NNT", "nvjet_sm90_sss_64x32_NNT", "matrix product"),
        ("fmha_cutlassF_f32_aligned_64x64", "fmha_cutlassF_f32_aligned_64x64", "attention"),
        (ADD, "add", "elementwise"),
        (SUM, "sum", "reduction"),
        (COPY, "direct_copy", "copy, index"),
        (SQRT, "Sqrt", "elementwise"),
        ("axpy", "axpy", "elementwise"),
    ],
)
def test_a_kernels_name_becomes_short_and_says_its_family(
    name: str, short: str, family: str
) -> None:
    assert picture.short_name(name) == short
    assert picture.family(kernel(0, name)) == family
