"""Hooks."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import cgraph
from cgraph.errors import StateError
from lab import Lab, fresh


def test_capture_end_hooks_run_in_order_with_a_live_template(lab: Lab) -> None:
    x, graph = fresh(lab, 8), cgraph.CUDAGraph()
    seen: list[tuple[str, bool]] = []
    for name in ("first", "second", "third"):
        graph.register_capture_end_hook(
            lambda g, name=name: seen.append((name, g.raw_cuda_graph() != 0))
        )
    with cgraph.graph(graph):
        x + 1
    assert seen == [("first", True), ("second", True), ("third", True)]


def test_a_removed_hook_does_not_run(lab: Lab) -> None:
    x, graph, seen = fresh(lab, 8), cgraph.CUDAGraph(), []
    handle = graph.register_capture_end_hook(lambda _: seen.append("removed"))
    with graph.register_capture_end_hook(lambda _: seen.append("with")):
        pass
    graph.register_capture_end_hook(lambda _: seen.append("kept"))
    handle.remove()
    handle.remove()
    with cgraph.graph(graph):
        x + 1
    assert seen == ["kept"]


def test_post_instantiate_hooks_run_for_each_exec(lab: Lab) -> None:
    x, graph = fresh(lab, 8), cgraph.CUDAGraph(keep_graph=True)
    execs: list[int] = []
    graph.register_post_instantiate_hook(lambda g: execs.append(g.raw_cuda_graph_exec()))
    with cgraph.graph(graph):
        x + 1
    assert execs == []
    graph.instantiate()
    graph.instantiate()
    assert len(set(execs)) == 2


def test_the_first_replay_runs_the_hooks_too(lab: Lab) -> None:
    x, graph, seen = fresh(lab, 8), cgraph.CUDAGraph(keep_graph=True), []
    graph.register_post_instantiate_hook(seen.append)
    with cgraph.graph(graph):
        x + 1
    graph.replay()
    graph.replay()
    assert seen == [graph]


def test_without_keep_graph_the_template_dies_after_both_kinds_of_hooks(
    lab: Lab,
) -> None:
    x, graph = fresh(lab, 8), cgraph.CUDAGraph()
    order: list[str] = []

    def end(g: cgraph.CUDAGraph) -> None:
        assert g.raw_cuda_graph() != 0
        with pytest.raises(StateError):
            g.raw_cuda_graph_exec()
        order.append("end")

    def instantiated(g: cgraph.CUDAGraph) -> None:
        assert g.raw_cuda_graph() != 0
        assert g.raw_cuda_graph_exec() != 0
        order.append("instantiated")

    graph.register_post_instantiate_hook(instantiated)
    graph.register_capture_end_hook(end)
    with cgraph.graph(graph):
        x + 1
    assert order == ["end", "instantiated"]
    with pytest.raises(StateError):
        graph.raw_cuda_graph()


def test_a_hook_that_raises_stops_the_others_and_leaves_the_template(lab: Lab) -> None:
    x, graph, seen = fresh(lab, 8), cgraph.CUDAGraph(), []

    def broken(_: cgraph.CUDAGraph) -> None:
        raise KeyError("hook")

    handle = graph.register_capture_end_hook(broken)
    graph.register_capture_end_hook(seen.append)
    before = lab.current()
    with pytest.raises(KeyError, match="hook"), cgraph.graph(graph):
        y = x + 1
    assert seen == []
    assert lab.current() == before
    assert graph.raw_cuda_graph() != 0
    with pytest.raises(StateError, match="not finalised"):
        graph.replay()
    handle.remove()
    graph.instantiate()
    x.normal_()
    graph.replay()
    assert torch.equal(y, x + 1)


def test_a_hook_may_remove_itself_and_others(lab: Lab) -> None:
    x, graph, seen = fresh(lab, 8), cgraph.CUDAGraph(), []
    handles = []

    def first(_: cgraph.CUDAGraph) -> None:
        seen.append("first")
        for handle in handles:
            handle.remove()

    handles.append(graph.register_capture_end_hook(first))
    handles.append(graph.register_capture_end_hook(lambda _: seen.append("second")))
    with cgraph.graph(graph):
        x + 1
    graph.reset()
    with cgraph.graph(graph):
        x + 1
    assert seen == ["first", "second"]


def test_hooks_outlive_a_reset(lab: Lab) -> None:
    x, graph, seen = fresh(lab, 8), cgraph.CUDAGraph(), []
    graph.register_capture_end_hook(seen.append)
    for _ in range(2):
        with cgraph.graph(graph):
            x + 1
        graph.reset()
    assert seen == [graph, graph]


def test_a_hook_that_refers_to_its_graph_does_not_keep_it_alive(lab: Lab) -> None:
    x, graph = fresh(lab, 8), cgraph.CUDAGraph()
    with cgraph.graph(graph):
        x + 1
    graph.register_capture_end_hook(graph.__class__.pool.__get__(graph))
    dead = weakref.ref(graph)
    del graph
    gc.collect()
    assert dead() is None


def test_what_is_no_callable_is_no_hook(lab: Lab) -> None:
    with pytest.raises(TypeError, match="42"):
        cgraph.CUDAGraph().register_capture_end_hook(42)  # type: ignore[arg-type]
