"""Random numbers, exceptions and ends of segmented graphs, and failures of the driver."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from broken import check_equal, fork_and_break, scaled, thrice
from cgraph import SegmentedGraph, _core, _driver, _torch, eager_break
from cgraph.errors import ArgumentError, CaptureError, CgraphError, StateError
from lab import Lab, SimLab, fresh


def state(lab: Lab) -> Tensor:
    return torch.cuda.get_rng_state() if lab.device == "cuda" else torch.get_rng_state()


def test_random_numbers_of_segments_and_breaks_are_those_of_eager(lab: Lab) -> None:
    noise = eager_break(lambda x: x + torch.rand(8, device=lab.device))

    def body(x: Tensor) -> Tensor:
        y = nn.functional.dropout(x, 0.5)
        z = noise(y) * torch.rand(8, device=lab.device)
        return noise(z) + torch.randn(8, device=lab.device)

    x = fresh(lab, 8)
    torch.manual_seed(77)
    graph, y = SegmentedGraph.capture(lambda: body(x))
    drawn = [y.clone()]
    for _ in range(3):
        graph.replay()
        drawn.append(y.clone())
    after = state(lab)
    torch.manual_seed(77)
    for one in drawn:
        assert torch.equal(one, body(x))
    assert torch.equal(after, state(lab))


def raising(lab: Lab, error: BaseException) -> tuple[Callable[[Tensor], Tensor], list[bool]]:
    """Return a function whose second break raises while the flag is set."""
    raises = [True]

    @eager_break
    def fails(x: Tensor) -> Tensor:
        if raises[0]:
            raise error
        return x + 1

    def body(x: Tensor) -> Tensor:
        y = scaled(x) + torch.rand(8, device=lab.device)
        return fails(y * 2) * 3

    return body, raises


@pytest.mark.parametrize("error", [ValueError("own"), KeyboardInterrupt()], ids=lambda e: repr(e))
def test_an_exception_of_a_break_in_a_capture_leaves_all_as_before(
    lab: Lab, error: BaseException
) -> None:
    x, (body, raises), before = fresh(lab, 8), raising(lab, error), lab.current()
    handle, random = cgraph.graph_pool_handle(), state(lab)
    with pytest.raises(type(error)) as caught:
        SegmentedGraph.capture(lambda: body(x), pool=handle)
    assert caught.value is error
    assert lab.current() == before
    assert not cgraph.is_current_stream_capturing()
    assert torch.equal(state(lab), random)
    assert not lab.in_pool(torch.empty(1 << 20, device=lab.device), handle)
    raises[0] = False
    torch.manual_seed(3)
    graph, y = SegmentedGraph.capture(lambda: body(x), pool=handle)
    torch.manual_seed(3)
    assert torch.equal(y, body(x))
    error.__traceback__ = None
    del graph, caught


def test_a_function_that_goes_on_after_a_break_has_raised_is_refused(lab: Lab) -> None:
    x, (body, _) = fresh(lab, 8), raising(lab, ValueError("own"))

    def swallows() -> Tensor:
        try:
            return body(x)
        except ValueError:
            return scaled(x)

    with pytest.raises(CaptureError, match="went on") as caught:
        SegmentedGraph.capture(swallows)
    assert str(caught.value.__cause__) == "own"


def test_an_exception_of_a_break_in_a_replay_comes_out_and_the_next_replay_works(lab: Lab) -> None:
    error = ValueError("own")
    x, (body, raises) = fresh(lab, 8), raising(lab, error)
    raises[0] = False
    graph, y = SegmentedGraph.capture(lambda: body(x))
    raises[0] = True
    with torch.no_grad(), pytest.raises(ValueError) as caught:
        graph.replay()
    assert caught.value is error
    assert torch.is_grad_enabled()
    raises[0] = False
    torch.manual_seed(4)
    x.normal_()
    again = x.clone()
    graph.replay()
    torch.manual_seed(4)
    assert torch.equal(x.normal_(), again)
    assert torch.equal(y, body(x))
    error.__traceback__ = None
    del caught


def test_a_body_that_breaks_the_capture_leaves_all_as_before(lab: Lab) -> None:
    x, before = fresh(lab, 8), lab.current()
    with pytest.raises(RuntimeError, match="captur"):
        SegmentedGraph.capture(lambda: scaled(x).sum().item())
    assert lab.current() == before
    graph, y = SegmentedGraph.capture(lambda: thrice(x))
    check_equal(graph.replay, y, thrice, x)


def test_a_replay_with_tensors_copies_them_to_the_static_inputs_first(lab: Lab) -> None:
    x = fresh(lab, 64)
    for body in (thrice, scaled):
        graph, y = SegmentedGraph.capture(lambda body=body: body(x) * 2, statics=(x,))
        for given in (fresh(lab, 64), fresh(lab, 128)[::2], x):
            graph.replay_with((given,))
            assert torch.equal(x, given)
            assert torch.equal(y, body(given) * 2)
        for refused in ((fresh(lab, 3),), (), (fresh(lab, 64), fresh(lab, 64))):
            with pytest.raises(ArgumentError):
                graph.replay_with(refused)


def test_hooks_of_segments_run_in_replays(lab: Lab) -> None:
    x, seen = fresh(lab, 8), []
    graph, _ = SegmentedGraph.capture(lambda: thrice(x))
    for number, segment in enumerate(graph.segments):
        segment.register_replay_start_hook(lambda _, number=number: seen.append(number))
    graph.replay()
    assert seen == [0, 1, 2, 3]


def test_after_reset_a_replay_is_refused_and_what_the_breaks_kept_is_gone(lab: Lab) -> None:
    x = fresh(lab, 8)
    token = nn.Module()
    keeping = eager_break(lambda token, x: x + 1)
    graph, y = SegmentedGraph.capture(lambda token=token: keeping(token, x) * 2)
    gone = weakref.ref(token)
    del token
    gc.collect()
    assert gone() is not None
    graph.reset()
    lab.sync()
    _driver.current().settle()
    gc.collect()
    assert gone() is None
    assert (graph.segments, graph.breaks) == ((), ())
    for refused in (graph.replay, graph.pool, graph.memory, partial(graph._replay_with, ())):
        with pytest.raises(StateError, match="reset"):
            refused()
    graph.reset()
    del y


def test_segments_that_an_argument_of_a_break_refers_to_do_not_live_for_ever(lab: Lab) -> None:
    x = fresh(lab, 8)

    class Runner:
        @eager_break
        def step(self, x: Tensor) -> Tensor:
            return x + 1

        def capture(self) -> None:
            self.graph, self.y = SegmentedGraph.capture(lambda: self.step(x) * 2)

    runner = Runner()
    runner.capture()
    gone = weakref.ref(runner)
    del runner
    gc.collect()
    lab.sync()
    _driver.current().settle()
    gc.collect()
    assert gone() is None


def test_steps_are_graphs_or_callables() -> None:
    modes = _torch.mode_functions()
    with pytest.raises(ArgumentError, match="step is 3"):
        _core.Segments([lambda: None, 3], modes)  # type: ignore[list-item]
    with pytest.raises(StateError, match="without a step"):
        _core.Segments([], modes).replay()
    seen: list[int] = []
    _core.Segments([lambda: seen.append(1), lambda: seen.append(2)], modes).replay()
    assert seen == [1, 2]


def scenario(sim: SimLab, x: Tensor, side: Any, stream: Any) -> None:
    graph, y = SegmentedGraph.capture(lambda: fork_and_break(sim, x, side), stream=stream)
    graph.replay()
    assert torch.equal(y, fork_and_break(sim, x, side))


def test_each_driver_call_failing_once_leaves_nothing_and_the_next_use_works(sim: SimLab) -> None:
    simulator, x, side, stream = sim.simulator, torch.randn(64), sim.stream(), sim.stream()

    def settled() -> dict[str, int]:
        gc.collect()
        simulator.core.drive()
        for one in (side, stream, simulator.default_stream):
            one.synchronize()  # frees the events that it has waited for
        simulator.device.collect()
        return simulator.live()

    scenario(sim, x, side, stream)
    settled()
    start = len(simulator.calls())
    scenario(sim, x, side, stream)
    calls = len(simulator.calls()) - start
    baseline, random, failures = settled(), torch.get_rng_state(), 0
    for n in range(calls):
        simulator.fail_call(n, 719)
        try:
            scenario(sim, x, side, stream)
        except CgraphError as error:
            assert "719" in str(error) or "cu" in str(error), error
            failures += 1
            error.__traceback__ = None
            del error
        simulator.clear_faults()
        assert settled() == baseline
        assert not cgraph.is_current_stream_capturing()
        assert sim.current() == simulator.default_stream
        assert torch.equal(torch.get_rng_state(), random)
        scenario(sim, x, side, stream)
    assert failures > 20
