"""`CUDAGraph`."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

import cgraph
from cgraph.errors import ArgumentError, CaptureError, LivenessError, StateError
from lab import Lab, SimLab, captured, fresh


def test_subclasses_and_a_positional_keep_graph_work(lab: Lab) -> None:
    class Mine(cgraph.CUDAGraph):
        def __init__(self, keep_graph: bool = False, name: str = "") -> None:
            super().__init__(keep_graph)
            self.name = name

    x = fresh(lab, 8)
    graph = Mine(True, name="mine")
    with cgraph.graph(graph):
        y = x + 1
    x.normal_()
    graph.replay()
    assert graph.name == "mine"
    assert graph.raw_cuda_graph()
    assert torch.equal(y, x + 1)


def test_without_keep_graph_only_the_exec_outlives_the_capture(lab: Lab) -> None:
    graph, _ = captured(lab, fresh(lab, 8))
    assert graph.raw_cuda_graph_exec() != 0
    if isinstance(lab, SimLab):
        assert lab.simulator.live()["graphs"] == 0
    with pytest.raises(
        StateError,
        match=r"You cannot access the raw cudaGraph_t instance unless CUDAGraph was initialized"
        r" with keep_graph=true.*keep_graph=True",
    ):
        graph.raw_cuda_graph()
    with pytest.raises(
        StateError,
        match=r"instantiate\(\) is intended to be called by the user only when keep_graph=true",
    ):
        graph.instantiate()


def test_with_keep_graph_only_the_template_exists_after_the_capture(lab: Lab) -> None:
    graph, _ = captured(lab, fresh(lab, 8), keep_graph=True)
    assert graph.raw_cuda_graph() != 0
    sentence = (
        r"cannot access the raw cudaGraphExec_t instance until instantiate\(\) has been called"
    )
    with pytest.raises(StateError, match=sentence):
        graph.raw_cuda_graph_exec()


def test_the_first_replay_instantiates(lab: Lab) -> None:
    x = fresh(lab, 8)
    graph, y = captured(lab, x, keep_graph=True)
    x.normal_()
    graph.replay()
    assert graph.raw_cuda_graph_exec() != 0
    assert torch.equal(y, x * 2 + 1)


def test_a_replay_keeps_the_exec_of_an_explicit_instantiate(lab: Lab) -> None:
    x = fresh(lab, 8)
    graph, _ = captured(lab, x, keep_graph=True)
    graph.instantiate()
    before = graph.raw_cuda_graph_exec()
    graph.replay()
    assert graph.raw_cuda_graph_exec() == before


def test_instantiate_keeps_the_template_and_replaces_the_exec(lab: Lab) -> None:
    x = fresh(lab, 8)
    graph, y = captured(lab, x, keep_graph=True)
    template = graph.raw_cuda_graph()
    graph.instantiate()
    first = graph.raw_cuda_graph_exec()
    graph.instantiate()
    assert graph.raw_cuda_graph() == template
    assert graph.raw_cuda_graph_exec() != first
    x.normal_()
    graph.replay()
    assert torch.equal(y, x * 2 + 1)


def test_after_reset_there_is_no_raw_graph(lab: Lab) -> None:
    graph, _ = captured(lab, fresh(lab, 8), keep_graph=True)
    graph.reset()
    with pytest.raises(StateError, match="before a successful capture"):
        graph.raw_cuda_graph()


def test_a_raw_graph_is_a_plain_integer(lab: Lab) -> None:
    graph, _ = captured(lab, fresh(lab, 8), keep_graph=True)
    assert type(graph.raw_cuda_graph()) is int
    assert ctypes.c_void_p(graph.raw_cuda_graph()).value == graph.raw_cuda_graph()


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_capture_begin_and_end_by_hand(lab: Lab, mode: str) -> None:
    x, graph = fresh(lab, 8), cgraph.CUDAGraph()
    stream = lab.stream()
    lab.fork(stream)
    with lab.use(stream):
        graph.capture_begin(capture_error_mode=mode)
        y = x * 3
        graph.capture_end()
    lab.join(stream)
    x.normal_()
    graph.replay()
    assert torch.equal(y, x * 3)


def test_an_unknown_mode_is_named(lab: Lab) -> None:
    with lab.use(lab.stream()), pytest.raises(ArgumentError, match="nonsense"):
        cgraph.CUDAGraph().capture_begin(capture_error_mode="nonsense")


def test_a_replay_runs_on_the_current_stream(lab: Lab) -> None:
    x = fresh(lab, 1 << 12)
    graph, y = captured(lab, x)
    stream = lab.stream()
    x.normal_()
    lab.fork(stream)
    with lab.use(stream):
        graph.replay()
        z = y + 1
    lab.join(stream)
    assert torch.equal(z, x * 2 + 1 + 1)


def test_an_object_can_capture_again_after_reset(lab: Lab) -> None:
    x = fresh(lab, 8)
    graph, _ = captured(lab, x)
    graph.reset()
    with cgraph.graph(graph):
        y = x - 5
    x.normal_()
    graph.replay()
    assert torch.equal(y, x - 5)


def test_debug_mode_is_of_one_object(lab: Lab, tmp_path: Path) -> None:
    x = fresh(lab, 8)
    kept, other = cgraph.CUDAGraph(), cgraph.CUDAGraph()
    kept.enable_debug_mode()
    for graph in (kept, other):
        with cgraph.graph(graph):
            x * 2
    assert kept.raw_cuda_graph() != 0
    with pytest.raises(StateError):
        other.raw_cuda_graph()


@pytest.mark.parametrize("verbose", [True, False])
def test_a_dump_is_a_graphviz_graph(lab: Lab, tmp_path: Path, verbose: bool) -> None:
    graph, _ = captured(lab, fresh(lab, 8), keep_graph=True)
    path = tmp_path / "graph.dot"
    graph.debug_dump(str(path), verbose=verbose)
    text = path.read_text()
    assert text.startswith("digraph")
    assert text.count("->") == 1
    assert ("(1, 1, 1)" in text) == verbose


def test_a_dump_needs_a_live_template(lab: Lab, tmp_path: Path) -> None:
    graph, _ = captured(lab, fresh(lab, 8))
    with pytest.raises(StateError, match="keep_graph=True"):
        graph.debug_dump(str(tmp_path / "graph.dot"))


def test_a_replay_that_would_read_a_freed_tensor_raises(lab: Lab) -> None:
    x, graph = fresh(lab, 1000), cgraph.CUDAGraph()
    with cgraph.graph(graph, check_input_liveness=True):
        y = (x * 2).sum()
    x.normal_()
    graph.replay()
    assert torch.allclose(y, (x * 2).sum())
    del x
    with pytest.raises(LivenessError, match=r"\(1000,\).*aten.mul"):
        graph.replay()


def test_tensors_made_inside_the_capture_may_die(lab: Lab) -> None:
    x, graph = fresh(lab, 1000), cgraph.CUDAGraph()
    with cgraph.graph(graph, check_input_liveness=True):
        y = torch.relu(torch.ones(1000, device=lab.device) + x) * 3
    x.normal_()
    graph.replay()
    assert torch.equal(y, torch.relu(1 + x) * 3)


def test_between_pre_and_post_the_template_is_live(lab: Lab) -> None:
    x, graph, stream = fresh(lab, 8), cgraph.CUDAGraph(), lab.stream()
    lab.fork(stream)
    with lab.use(stream):
        graph.capture_begin()
        y = x + 4
        graph.capture_end_pre()
    assert graph.raw_cuda_graph() != 0
    graph.instantiate()
    graph.capture_end_post()
    with pytest.raises(StateError):
        graph.raw_cuda_graph()
    lab.join(stream)
    x.normal_()
    graph.replay()
    assert torch.equal(y, x + 4)


def test_post_alone_does_not_instantiate(lab: Lab) -> None:
    graph = cgraph.CUDAGraph()
    x = fresh(lab, 8)
    with lab.use(lab.stream()):
        graph.capture_begin()
        x + 4
        graph.capture_end_pre()
        graph.capture_end_post()
    with pytest.raises(StateError, match="instantiate"):
        graph.replay()


def test_an_empty_capture_warns_and_replays(lab: Lab) -> None:
    graph = cgraph.CUDAGraph()
    with pytest.warns(UserWarning, match="is empty"), cgraph.graph(graph):
        pass
    graph.replay()


def test_a_graph_that_is_not_kept_cannot_be_instantiated_again(lab: Lab) -> None:
    graph, _ = captured(lab, fresh(lab, 8))
    with pytest.raises(StateError, match="keep_graph=True"):
        graph.instantiate()


def test_a_replay_inside_another_capture_is_refused(lab: Lab) -> None:
    x = fresh(lab, 8)
    inner, y = captured(lab, x)
    with pytest.raises(CaptureError, match="replay") as caught, cgraph.graph(cgraph.CUDAGraph()):
        inner.replay()
    assert caught.value.code == 900
    x.normal_()
    inner.replay()
    assert torch.equal(y, x * 2 + 1)
