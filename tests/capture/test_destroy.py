"""Effects at the end of a capture: destroy callbacks, retained objects."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch

import cgraph
from cgraph import _core, _torch
from lab import Lab, SimLab, captured, fresh


class Thing:
    """An object with weak references."""

    graph: Any = None


def test_callbacks_run_once_in_order_at_reset_and_are_used_up(lab: Lab) -> None:
    x, seen = fresh(lab, 8), []
    graph, _ = captured(lab, x)
    for name in ("first", "second"):
        graph.register_destroy_callback(lambda name=name: seen.append(name))
    graph.register_destroy_callback(lambda: seen.append("removed")).remove()
    graph.reset()
    assert seen == ["first", "second"]
    graph.reset()
    with cgraph.graph(graph):
        x + 1
    graph.register_destroy_callback(lambda: seen.append("second cycle"))
    del graph
    gc.collect()
    assert seen == ["first", "second", "second cycle"]


def test_a_destroy_hook_runs_once_for_each_capture_before_the_callbacks(
    lab: Lab,
) -> None:
    x, seen = fresh(lab, 8), []

    def destroyed(ids: set[int]) -> None:
        assert isinstance(ids, set)
        seen.append("hook")

    with cgraph.register_graph_destroy_hook(destroyed):
        graph, _ = captured(lab, x)
        graph.register_destroy_callback(lambda: seen.append("callback"))
        graph.reset()
        graph.reset()
        with cgraph.graph(graph):
            x + 1
        del graph
        gc.collect()
    assert seen == ["hook", "callback", "hook"]


def test_callbacks_run_before_the_graph_is_freed(lab: Lab) -> None:
    x = fresh(lab, 8)
    graph, _ = captured(lab, x, keep_graph=True)
    handles: list[int] = []
    graph.register_destroy_callback(lambda: handles.append(graph.raw_cuda_graph()))
    expected = graph.raw_cuda_graph()
    graph.reset()
    assert handles == [expected]


@pytest.mark.parametrize("registered", ["callback", "object", "hook"])
def test_what_refers_to_its_graph_does_not_keep_it_alive(lab: Lab, registered: str) -> None:
    x = fresh(lab, 8)
    graph, _ = captured(lab, x)
    seen: list[str] = []
    thing = Thing()
    thing.graph = graph
    if registered == "callback":
        graph.register_destroy_callback(lambda thing=thing: seen.append(repr(thing.graph)))
    elif registered == "object":
        graph.retain_object(thing)
    else:
        graph.register_replay_end_hook(lambda g, thing=thing: None)
    dead, dead_thing = weakref.ref(graph), weakref.ref(thing)
    graph.replay()
    lab.sync()
    del graph, thing
    gc.collect()
    assert dead() is None
    assert len(seen) == (registered == "callback")
    fresh(lab, 8)
    gc.collect()
    assert dead_thing() is None


def test_an_error_in_a_callback_is_reported_and_the_others_run(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: reported.append(args.exc_type))
    x = fresh(lab, 8)
    graph, _ = captured(lab, x)
    seen: list[str] = []

    def broken() -> None:
        raise KeyError("callback")

    graph.register_destroy_callback(broken)
    graph.register_destroy_callback(lambda: seen.append("after"))
    graph.reset()
    assert seen == ["after"]
    assert reported == [KeyError]


def test_a_retained_object_lives_until_reset(lab: Lab) -> None:
    x = fresh(lab, 8)
    graph, _ = captured(lab, x)
    thing = Thing()
    dead = weakref.ref(thing)
    graph.retain_object(thing)
    early = Thing()
    dead_early = weakref.ref(early)
    handle = graph.retain_object(early)
    del thing, early
    gc.collect()
    assert dead() is not None
    handle.remove()
    assert dead_early() is None
    graph.replay()
    lab.sync()
    graph.reset()
    assert dead() is None


def test_synchronize_before_release_waits_for_replays_on_every_stream(lab: Lab) -> None:
    x = fresh(lab, 1 << 22)
    graph, y = captured(lab, x, keep_graph=True)
    streams = [lab.stream(), lab.stream()]
    seen: list[bool] = []
    for stream in streams:
        with lab.use(stream):
            for _ in range(20):
                graph.replay()
        graph.instantiate()
    graph.register_destroy_callback(
        lambda: seen.extend(stream.query() for stream in streams),
        synchronize_before_release=True,
    )
    graph.reset()
    assert seen == [True, True]
    lab.sync()
    assert torch.equal(y, x * 2 + 1)


def test_a_failed_wait_does_not_keep_the_callbacks_from_running(
    sim: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", reported.append)
    x = fresh(sim, 8)
    graph, _ = captured(sim, x)
    graph.replay()
    seen: list[str] = []
    graph.register_destroy_callback(lambda: seen.append("ran"), synchronize_before_release=True)
    sim.simulator.fail_next("cuStreamSynchronize", 999)
    graph.reset()
    assert seen == ["ran"]
    assert len(reported) == 1


def test_callbacks_of_a_graph_that_is_alive_run_at_exit() -> None:
    program = """if True:
        import torch, cgraph
        # Held, since it ends when it goes.
        using = cgraph.sim.use()
        using.__enter__()
        x, graph = torch.ones(4), cgraph.CUDAGraph()
        with cgraph.graph(graph):
            y = x + 1
        graph.register_destroy_callback(lambda: print("at exit"))
        other = cgraph.CUDAGraph()
        other.register_destroy_callback(lambda: print("not captured"))
    """
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert sorted(ended.stdout.split("\n")) == ["", "at exit", "not captured"]
    assert ended.stderr == ""


def test_a_subclass_whose_constructor_raised_dies_quietly(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", reported.append)

    class Broken(cgraph.CUDAGraph):
        def __new__(cls) -> Broken:
            self = super().__new__(cls)
            raise ValueError(type(self).__name__)

    with pytest.raises(ValueError):
        Broken()
    gc.collect()
    assert reported == []


def test_what_is_no_callable_is_no_callback(lab: Lab) -> None:
    with pytest.raises(TypeError, match="42"):
        cgraph.CUDAGraph().register_destroy_callback(42)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="43"):
        cgraph.register_graph_destroy_hook(43)  # type: ignore[arg-type]


def test_a_graph_that_the_collector_frees_during_another_capture_breaks_nothing(
    lab: Lab,
) -> None:
    x = fresh(lab, 64)
    doomed, _ = captured(lab, x)
    doomed.retain_object(doomed)
    doomed.replay()
    graph = cgraph.CUDAGraph()
    with cgraph.graph(graph):
        y = x + 1
        del doomed
        gc.collect()
        y = y * 3
    x.normal_()
    graph.replay()
    assert torch.equal(y, (x + 1) * 3)


def test_destroy_hooks_get_the_drivers_numbers_of_template_and_execs() -> None:
    seen: list[set[int]] = []
    with cgraph.sim.use(driver_version=13_010) as simulator:
        lab = SimLab(simulator)
        x = fresh(lab, 8)
        with cgraph.register_graph_destroy_hook(seen.append):
            graph, _ = captured(lab, x, keep_graph=True)
            graph.instantiate()
            first = graph.get_graph_data()["exec_graph_id"]
            graph.instantiate()
            second = graph.get_graph_data()["exec_graph_id"]
            graph.reset()
    assert len(seen) == 1
    assert seen[0] > {first, second}
    assert len(seen[0]) == 3


def test_replays_of_an_earlier_exec_in_flight_keep_retained_objects_alive() -> None:
    with cgraph.sim.use(asynchronous=True) as simulator:
        lab = SimLab(simulator)
        x = fresh(lab, 8)
        graph, _ = captured(lab, x, keep_graph=True)
        thing = Thing()
        dead = weakref.ref(thing)
        graph.retain_object(thing)
        del thing
        graph.replay()
        graph.instantiate()
        graph.reset()
        gc.collect()
        assert dead() is not None
        simulator.synchronize()
        simulator.device.collect()
        assert dead() is None


def test_a_replay_in_flight_keeps_objects_alive_that_refer_to_their_graph() -> None:
    with cgraph.sim.use(asynchronous=True) as simulator:
        lab = SimLab(simulator)
        x = fresh(lab, 8)
        graph, _ = captured(lab, x)
        memory = torch.ones(8)
        # The collector kills weak references of Python's in any case.
        weak = _torch.WeakStorage(memory)
        graph.retain_object({"memory": memory, "graph": graph})
        graph.replay()
        del memory, graph
        gc.collect()
        assert weak.get() is not None
        simulator.synchronize()
        simulator.device.collect()
        gc.collect()
        assert weak.get() is None


def test_the_stream_of_the_last_replay_may_be_destroyed_before_the_graph() -> None:
    with cgraph.sim.use() as simulator:
        lab = SimLab(simulator)
        x = fresh(lab, 8)
        graph, y = captured(lab, x)
        theirs = simulator.new_stream()
        with simulator.stream(_core.Stream(simulator.device, handle=theirs.handle)):
            graph.replay()
        del theirs
        gc.collect()
        assert torch.equal(y, x * 2 + 1)
        graph.replay()
        graph.reset()


def test_a_callback_that_exits_at_exit_does_not_stop_the_others() -> None:
    program = """if True:
        import sys, torch, cgraph
        kept = cgraph.sim.use()
        kept.__enter__()
        graphs = [cgraph.CUDAGraph() for _ in range(3)]
        for i, graph in enumerate(graphs):
            graph.register_destroy_callback(lambda i=i: (print(i), sys.exit(0)))
    """
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert sorted(ended.stdout.split()) == ["0", "1", "2"]
