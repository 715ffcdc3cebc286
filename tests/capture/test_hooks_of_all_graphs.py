"""Hooks around replays, hooks of all graphs, and their errors."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import cgraph
from cgraph.errors import StateError
from lab import Lab, SimLab, captured, fresh


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[BaseException]]:
    """Collect errors of ``sys.unraisablehook``; no graph of an earlier test dies meanwhile."""
    gc.collect()
    seen: list[BaseException] = []

    # Without its traceback, which would keep a test's variables alive.
    def report(args: Any) -> None:
        seen.append(args.exc_value.with_traceback(None))

    monkeypatch.setattr(sys, "unraisablehook", report)
    yield seen


def test_hooks_of_a_graph_run_around_every_step_of_its_life(lab: Lab) -> None:
    x, graph, seen = fresh(lab, 8), cgraph.CUDAGraph(), []
    graph.register_capture_start_hook(lambda _: seen.append("start"))
    graph.register_capture_end_hook(lambda _: seen.append("end"))
    graph.register_post_instantiate_hook(lambda _: seen.append("instantiate"))
    graph.register_replay_start_hook(lambda _: seen.append("replay"))
    graph.register_replay_end_hook(lambda _: seen.append("replayed"))
    with cgraph.graph(graph):
        x + 1
    graph.replay()
    graph.replay()
    assert seen == ["start", "end", "instantiate", *["replay", "replayed"] * 2]


def test_hooks_of_all_graphs_run_for_each_graph_and_before_its_own(lab: Lab) -> None:
    x, seen = fresh(lab, 8), []
    with (
        cgraph.register_graph_capture_start_hook(lambda g: seen.append(("start", g))),
        cgraph.register_graph_capture_end_hook(lambda g: seen.append(("end", g))),
        cgraph.register_graph_instantiate_hook(lambda g: seen.append(("instantiate", g))),
        cgraph.register_graph_replay_start_hook(lambda g: seen.append(("replay", g))),
        cgraph.register_graph_replay_end_hook(lambda g: seen.append(("replayed", g))),
    ):
        for _ in range(2):
            seen.clear()
            graph = cgraph.CUDAGraph()
            graph.register_capture_end_hook(lambda g: seen.append(("own end", g)))
            graph.register_replay_start_hook(lambda g: seen.append(("own replay", g)))
            with cgraph.graph(graph):
                x + 1
            graph.replay()
            assert [name for name, _ in seen] == [
                "start",
                "end",
                "own end",
                "instantiate",
                "replay",
                "own replay",
                "replayed",
            ]
            assert all(g is graph for _, g in seen)
    seen.clear()
    graph.replay()
    assert seen == [("own replay", graph)]


def test_a_replay_start_hook_that_raises_prevents_launch_and_end_hook(lab: Lab) -> None:
    x = fresh(lab, 8)
    graph, y = captured(lab, x)
    seen: list[cgraph.CUDAGraph] = []

    def veto(_: cgraph.CUDAGraph) -> None:
        raise KeyError("not now")

    handle = graph.register_replay_start_hook(veto)
    graph.register_replay_end_hook(seen.append)
    y.fill_(7)
    with pytest.raises(KeyError, match="not now"):
        graph.replay()
    lab.sync()
    assert seen == []
    assert torch.equal(y, torch.full_like(y, 7))
    handle.remove()
    graph.replay()
    assert seen == [graph]
    assert torch.equal(y, x * 2 + 1)


def test_a_launch_that_fails_still_runs_the_end_hooks(sim: Lab) -> None:
    x = fresh(sim, 8)
    graph, _ = captured(sim, x)
    seen: list[cgraph.CUDAGraph] = []
    graph.register_replay_end_hook(seen.append)
    sim.simulator.fail_next("cuGraphLaunch", 999)  # type: ignore[attr-defined]
    with pytest.raises(cgraph.errors.DriverError, match="cuGraphLaunch"):
        graph.replay()
    assert seen == [graph]
    graph.replay()
    assert seen == [graph, graph]


def test_replay_end_hooks_run_when_the_work_is_enqueued() -> None:
    with cgraph.sim.use(asynchronous=True) as simulator:
        x = fresh(SimLab(simulator), 8)
        graph, y = captured(SimLab(simulator), x)
        simulator.synchronize()
        are_done: list[bool] = []
        graph.register_replay_end_hook(lambda _: are_done.append(simulator.default_stream.query()))
        graph.replay()
        assert are_done == [False]
        simulator.synchronize()
        assert torch.equal(y, x * 2 + 1)


def test_a_launch_error_comes_out_before_that_of_an_end_hook(
    sim: Lab, reported: list[BaseException]
) -> None:
    x = fresh(sim, 8)
    graph, _ = captured(sim, x)

    def broken(_: cgraph.CUDAGraph) -> None:
        raise KeyError("hook")

    graph.register_replay_end_hook(broken)
    with pytest.raises(KeyError):
        graph.replay()
    sim.simulator.fail_next("cuGraphLaunch", 999)  # type: ignore[attr-defined]
    with pytest.raises(cgraph.errors.DriverError):
        graph.replay()
    assert [type(error) for error in reported] == [KeyError]


def test_an_error_of_a_hook_for_all_is_reported_and_breaks_nothing(
    lab: Lab, reported: list[BaseException]
) -> None:
    def broken(_: object) -> None:
        raise KeyError("of all")

    x, seen = fresh(lab, 8), []
    handles = [getattr(cgraph.hooks, name)(broken) for name in cgraph.hooks.__all__]
    handles.append(cgraph.register_graph_replay_end_hook(seen.append))
    graph, y = captured(lab, x)
    graph.replay()
    assert torch.equal(y, x * 2 + 1)
    assert seen == [graph]
    graph.reset()
    assert [str(error) for error in reported] == ["'of all'"] * 6
    for handle in handles:
        handle.remove()


def test_what_a_capture_start_hook_enqueues_is_captured(lab: Lab) -> None:
    x, graph = fresh(lab, 8), cgraph.CUDAGraph()
    with graph.register_capture_start_hook(lambda _: x.add_(1)), cgraph.graph(graph):
        x.mul_(2)
    before = x.clone()
    graph.replay()
    assert torch.equal(x, (before + 1) * 2)


def test_a_capture_start_hook_that_raises_leaves_nothing_open(lab: Lab) -> None:
    x, graph = fresh(lab, 8), cgraph.CUDAGraph()
    before = lab.current()

    def broken(_: cgraph.CUDAGraph) -> None:
        raise KeyError("start")

    handle = graph.register_capture_start_hook(broken)
    with pytest.raises(KeyError, match="start"), cgraph.graph(graph):
        raise AssertionError("the body must not run")
    assert lab.current() == before
    assert not cgraph.is_current_stream_capturing()
    handle.remove()
    with cgraph.graph(graph):
        y = x + 1
    graph.replay()
    assert torch.equal(y, x + 1)


def test_a_hook_that_registers_another_hook_does_not_run_it_at_once(lab: Lab) -> None:
    x = fresh(lab, 8)
    graph, _ = captured(lab, x)
    seen: list[str] = []
    graph.register_replay_start_hook(
        lambda g: g.register_replay_start_hook(lambda _: seen.append("late")) and None
    )
    graph.replay()
    assert seen == []
    graph.replay()
    assert seen == ["late"]


def test_a_dead_input_is_found_before_any_hook_or_random_step(lab: Lab) -> None:
    graph, seen = cgraph.CUDAGraph(), []
    x = fresh(lab, 1 << 20)
    with cgraph.graph(graph, check_input_liveness=True):
        y = torch.nn.functional.dropout(x)
    graph.register_replay_start_hook(seen.append)
    state = torch.cuda.get_rng_state() if lab.device == "cuda" else torch.get_rng_state()
    del x
    with pytest.raises(cgraph.errors.LivenessError):
        graph.replay()
    assert seen == []
    after = torch.cuda.get_rng_state() if lab.device == "cuda" else torch.get_rng_state()
    assert torch.equal(state, after)
    del y


def test_a_hook_on_a_graph_that_was_reset_runs_for_the_next_capture(lab: Lab) -> None:
    x = fresh(lab, 8)
    graph, _ = captured(lab, x)
    graph.reset()
    seen: list[cgraph.CUDAGraph] = []
    graph.register_replay_start_hook(seen.append)
    with pytest.raises(StateError):
        graph.replay()
    assert seen == []
    with cgraph.graph(graph):
        x + 1
    graph.replay()
    assert seen == [graph]


def test_a_replay_start_hook_that_resets_the_graph_prevents_the_launch(lab: Lab) -> None:
    x = fresh(lab, 8)
    graph, y = captured(lab, x)
    y.fill_(7)
    with (
        graph.register_replay_start_hook(lambda g: g.reset()),
        pytest.raises(StateError, match="reset the graph"),
    ):
        graph.replay()
    lab.sync()
    assert torch.equal(y, torch.full_like(y, 7))


def test_a_replay_start_hook_that_instantiates_again_has_the_new_exec_launched(lab: Lab) -> None:
    x = fresh(lab, 8)
    graph, y = captured(lab, x, keep_graph=True)
    graph.instantiate()
    with graph.register_replay_start_hook(lambda g: g.instantiate()):
        graph.replay()
    lab.sync()
    assert torch.equal(y, x * 2 + 1)


def test_a_subclass_may_have_its_own_instantiate(lab: Lab) -> None:
    seen: list[cgraph.CUDAGraph] = []

    class Own(cgraph.CUDAGraph):
        def instantiate(self) -> None:
            seen.append(self)
            super().instantiate()

    x, graph = fresh(lab, 8), Own()
    with cgraph.graph(graph):
        y = x + 1
    assert seen == [graph]
    graph.replay()
    assert torch.equal(y, x + 1)
