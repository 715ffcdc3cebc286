"""Bad input: each raises a `CgraphError` that names the value, the expectation and the fix."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cgraph
from cgraph import _core
from cgraph.errors import (
    ArgumentError,
    CaptureError,
    CgraphError,
    ForeignError,
    NoDriverError,
    StateError,
)
from lab import CudaLab, Lab, SimLab, captured, fresh


def test_replay_before_a_capture(lab: Lab) -> None:
    with pytest.raises(StateError, match="nothing to replay"):
        cgraph.CUDAGraph().replay()


def test_replay_inside_the_capture(lab: Lab) -> None:
    x, graph = fresh(lab, 8), cgraph.CUDAGraph()
    with cgraph.graph(graph):
        x + 1
        with pytest.raises(StateError, match="capture_end"):
            graph.replay()


def test_replay_of_a_reset_graph(lab: Lab) -> None:
    x = fresh(lab, 8)
    graph, _ = captured(lab, x)
    graph.replay()
    graph.reset()
    with pytest.raises(StateError, match="before a successful capture"):
        graph.replay()


def test_capture_into_a_graph_that_captures_already(lab: Lab) -> None:
    x, graph = fresh(lab, 8), cgraph.CUDAGraph()
    with cgraph.graph(graph):
        x + 1
        with pytest.raises(StateError, match="capture_end"):
            graph.capture_begin()


@pytest.mark.parametrize("keep", [True, False])
def test_capture_into_a_graph_that_holds_one_already(lab: Lab, keep: bool) -> None:
    x = fresh(lab, 8)
    graph, _ = captured(lab, x, keep_graph=keep)
    before = lab.current()
    with pytest.raises(StateError, match="reset"), cgraph.graph(graph):
        pass
    assert lab.current() == before


def test_capture_on_the_default_stream(lab: Lab) -> None:
    with pytest.raises(CaptureError, match="must be captured on a non-default stream\\."):
        cgraph.CUDAGraph().capture_begin()


def test_end_without_begin(lab: Lab) -> None:
    for end in ("capture_end", "capture_end_pre"):
        with pytest.raises(StateError, match="capture_begin"):
            getattr(cgraph.CUDAGraph(), end)()
    with pytest.raises(StateError, match="capture_end_pre"):
        cgraph.CUDAGraph().capture_end_post()


def test_end_on_another_stream(lab: Lab) -> None:
    x, graph = fresh(lab, 8), cgraph.CUDAGraph()
    with lab.use(lab.stream()):
        graph.capture_begin()
        x + 1
    with pytest.raises(CaptureError, match="same stream"):
        graph.capture_end()
    with cgraph.graph(graph):
        y = x + 1
    x.normal_()
    graph.replay()
    assert torch.equal(y, x + 1)


def test_pool_before_a_capture(lab: Lab) -> None:
    with pytest.raises(StateError, match="before a successful capture"):
        cgraph.CUDAGraph().pool()


@pytest.mark.parametrize("pool", [17, (0, 0), (3, 4), "pool", (1, 2, 3), ([], 1), (0, "x")])
def test_a_pool_that_is_none(lab: Lab, pool: Any) -> None:
    with lab.use(lab.stream()), pytest.raises(CgraphError, match="pool"):
        cgraph.CUDAGraph().capture_begin(pool=pool)
    assert not cgraph.is_current_stream_capturing()


def test_a_stream_of_another_kind(lab: Lab) -> None:
    with (
        pytest.raises(ForeignError, match="expected"),
        cgraph.graph(cgraph.CUDAGraph(), stream=torch.Stream(device="cpu")),
    ):
        pass


def test_a_pool_of_another_simulator(sim: SimLab) -> None:
    x = torch.randn(8)
    with cgraph.sim.use():
        graph, _ = captured(sim, x)
        handle = graph.pool()
    with (
        pytest.raises(ForeignError, match="another device"),
        cgraph.graph(cgraph.CUDAGraph(), pool=handle),
    ):
        pass


def test_a_graph_of_another_driver(sim: SimLab) -> None:
    x = torch.randn(8)
    with cgraph.sim.use() as other:
        graph, y = captured(sim, x)
    with pytest.raises(ForeignError, match=r"sim:\d+, which is not in force"):
        graph.replay()
    with cgraph.sim.use(other):
        graph.replay()
    assert torch.equal(y, x * 2 + 1)


def test_a_wait_for_a_stream_of_another_simulator(sim: SimLab) -> None:
    other = cgraph.sim.Simulator()
    with pytest.raises(ForeignError, match="sim:"):
        _core.Stream(other.device).wait_stream(sim.simulator.default_stream)


def test_a_graph_context_inside_another_one_breaks_nothing(lab: Lab) -> None:
    x, outer = fresh(lab, 8), cgraph.CUDAGraph()
    with cgraph.graph(outer):
        y = x + 1
        with pytest.raises(CaptureError, match="nested"), cgraph.graph(cgraph.CUDAGraph()):
            pass
    x.normal_()
    outer.replay()
    assert torch.equal(y, x + 1)


@pytest.mark.parametrize("given", [None, 3, torch.cuda.CUDAGraph])
def test_what_is_no_graph(lab: Lab, given: Any) -> None:
    with pytest.raises(ArgumentError, match=r"cgraph\.CUDAGraph"):
        cgraph.graph(given)


@pytest.mark.parametrize("mode", [None, 3, "Global"])
def test_what_is_no_mode(lab: Lab, mode: Any) -> None:
    with pytest.raises(ArgumentError, match="thread_local"):
        cgraph.graph(cgraph.CUDAGraph(), capture_error_mode=mode)
    with lab.use(lab.stream()), pytest.raises(ArgumentError, match="thread_local"):
        cgraph.CUDAGraph().capture_begin(capture_error_mode=mode)


def test_a_stream_of_another_simulator(sim: SimLab) -> None:
    other = cgraph.sim.Simulator()
    with pytest.raises(ForeignError, match="another device"), sim.use(other.new_stream()):
        pass


@pytest.mark.gpu
def test_a_pool_of_the_simulator_on_cuda() -> None:
    with cgraph.sim.use():
        handle = cgraph.graph_pool_handle()
    with (
        pytest.raises(ForeignError, match="simulator"),
        cgraph.graph(cgraph.CUDAGraph(), pool=handle),
    ):
        pass


@pytest.mark.gpu
def test_a_stream_of_the_simulator_on_cuda() -> None:
    stream = cgraph.sim.Simulator().new_stream()
    with pytest.raises(ForeignError, match=r"expected a torch.cuda.Stream.*CGRAPH_DRIVER=sim"):
        cgraph.graph(cgraph.CUDAGraph(), stream=stream).__enter__()


@pytest.mark.gpu
def test_cpu_tensors_on_cuda_are_named_as_the_cause_of_an_empty_graph() -> None:
    x = torch.randn(8)
    lab = CudaLab()
    with pytest.warns(UserWarning, match="Tensors of another device"):
        captured(lab, x)


def test_an_unknown_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CGRAPH_DRIVER", "vulkan")
    with pytest.raises(ArgumentError, match=r"vulkan.*cuda.*sim"):
        cgraph.graph_pool_handle()


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_a_gpu_the_error_says_how_to_choose_the_simulator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CGRAPH_DRIVER", "cuda")
    with pytest.raises(NoDriverError, match=r"CGRAPH_DRIVER=sim"):
        with cgraph.graph(cgraph.CUDAGraph()):
            pass


def test_options_beside_a_simulator() -> None:
    with pytest.raises(ArgumentError, match="seed"):
        with cgraph.sim.use(cgraph.sim.Simulator(), seed=3):
            pass
