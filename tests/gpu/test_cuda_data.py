"""Nodes that only CUDA has: cuda-bindings put them into a kept template."""

from __future__ import annotations

import ctypes
import json
import re
from typing import Any

import pytest
import torch

import cgraph
from cgraph import _core
from lab import CudaLab, fresh

pytestmark = pytest.mark.gpu
lab = CudaLab()


def ok(result: tuple[Any, ...]) -> Any:
    """Return the results of a cuda-bindings call besides its code, which must be zero."""
    assert int(result[0]) == 0, result[0]
    return result[1] if len(result) == 2 else result[1:]


def graph_to_extend(x: torch.Tensor | None = None) -> tuple[cgraph.CUDAGraph, Any]:
    from cuda.bindings import driver

    x = fresh(lab, 64) if x is None else x
    graph = cgraph.CUDAGraph(keep_graph=True)
    with cgraph.graph(graph):
        x.mul_(2)
    graph.retain_object(x)
    return graph, driver.CUgraph(graph.raw_cuda_graph())


def described(graph: cgraph.CUDAGraph, kind: str) -> list[dict[str, Any]]:
    graph.instantiate()
    return [node for node in graph.get_graph_data()["nodes"] if node["node_type"] == kind]


def test_a_batch_mem_op_node_is_known() -> None:
    from cuda.bindings import driver

    graph, raw = graph_to_extend()
    word = torch.zeros(2, dtype=torch.int32, device="cuda")
    operation = driver.CUstreamBatchMemOpParams()
    operation.operation = driver.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WRITE_VALUE_32
    operation.writeValue.address = driver.CUdeviceptr(word.data_ptr())
    operation.writeValue.value = 7
    params = driver.CUDA_BATCH_MEM_OP_NODE_PARAMS()
    params.ctx = ok(driver.cuCtxGetCurrent())
    params.count = 1
    params.paramArray = [operation]
    ok(driver.cuGraphAddBatchMemOpNode(raw, None, 0, params))
    assert len(described(graph, "batch_mem_op")) == 1
    graph.replay()
    assert word.tolist() == [7, 0]


def graph_that_allocates(x: torch.Tensor | None = None) -> tuple[cgraph.CUDAGraph, int]:
    """Return a graph with an allocating and a freeing node, and the address."""
    from cuda.bindings import driver

    graph, raw = graph_to_extend(x)
    params = driver.CUDA_MEM_ALLOC_NODE_PARAMS()
    params.poolProps.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    params.poolProps.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    params.poolProps.location.id = 0
    params.bytesize = 4096
    node = ok(driver.cuGraphAddMemAllocNode(raw, None, 0, params))
    ok(driver.cuGraphAddMemFreeNode(raw, [node], 1, params.dptr))
    return graph, int(params.dptr)


def test_nodes_that_allocate_and_free_tell_their_memory() -> None:
    graph, address = graph_that_allocates()
    (alloc,) = described(graph, "mem_alloc")
    (free,) = described(graph, "mem_free")
    assert (alloc["address"], free["address"]) == (address, address)
    assert alloc["bytes"] >= 4096 and free["dependencies"] == [alloc["index"]]


def test_a_graph_that_allocates_is_instantiated_again_also_in_flight() -> None:
    x = fresh(lab, 64)
    before = x.clone()
    graph, _ = graph_that_allocates(x)
    for _ in range(3):
        torch.cuda._sleep(10_000_000)
        graph.replay()
        graph.instantiate()
    graph.replay()
    assert torch.equal(x, before * 16)


def test_a_host_node_tells_function_and_name() -> None:
    from cuda.bindings import driver

    graph, raw = graph_to_extend()
    libc = ctypes.CDLL(None)
    address = ctypes.cast(libc.free, ctypes.c_void_p).value
    params = driver.CUDA_HOST_NODE_PARAMS()
    params.fn = driver.CUhostFn(address)
    ok(driver.cuGraphAddHostNode(raw, None, 0, params))
    (host,) = described(graph, "host")
    assert host["host_fn_addr"] == address and "free" in host["host_fn_name"]


def test_event_nodes_of_a_capture_tell_their_event() -> None:
    x = fresh(lab, 64)
    event = torch.cuda.Event(external=True)
    graph = cgraph.CUDAGraph(keep_graph=True)
    with cgraph.graph(graph):
        x.mul_(2)
        event.record()
        event.wait()
    (record,) = described(graph, "event_record")
    (wait,) = described(graph, "wait_event")
    assert record["event_ptr"] == wait["event_ptr"] == event.cuda_event


def test_a_view_names_the_memory_of_equal_kernels_in_a_row() -> None:
    x, graph = fresh(lab, 64), cgraph.CUDAGraph(keep_graph=True)
    with cgraph.graph(graph):
        x.mul_(2)
        x.mul_(2)
    html = cgraph.view(graph).html
    [text] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html)
    drawn = json.loads(text)["graph"]
    assert len(drawn["nodes"]) == 2
    for node in drawn["nodes"]:
        assert any(f"{x.data_ptr():#x} in" in drawn["texts"][fact] for fact in node["x"])


def test_a_conditional_node_has_bodies_where_the_driver_tells() -> None:
    from cuda.bindings import driver

    graph, raw = graph_to_extend()
    context = ok(driver.cuCtxGetCurrent())
    handle = ok(driver.cuGraphConditionalHandleCreate(raw, context, 1, 1))
    params = driver.CUgraphNodeParams()
    params.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
    params.conditional.handle = handle
    params.conditional.type = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_IF
    params.conditional.size = 1
    params.conditional.ctx = context
    # cuda-bindings 12 has the call with edge data under its versioned name.
    add_node = getattr(driver, "cuGraphAddNode_v2", driver.cuGraphAddNode)
    ok(add_node(raw, None, None, 0, params))
    (body,) = params.conditional.phGraph_out
    ok(driver.cuGraphAddEmptyNode(body, None, 0))
    (node,) = described(graph, "conditional")
    if _core.Device.cuda(0).driver_version < 13_020:
        assert (node["condition"], node["bodies"]) == (None, [])
    else:
        assert node["condition"] == "if"
        assert [n["node_type"] for n in node["bodies"][0]["nodes"]] == ["empty"]
