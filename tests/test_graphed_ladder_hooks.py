"""Hooks, callbacks, interrupts and refusals while the graphs of a ladder become ready."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from cgraph._functions import capturing
from cgraph._functions.limits import Limits
from cgraph.errors import CgraphError, InstantiateError, StateError
from graphed_calls import near, states
from lab import Lab, SimLab, fresh
from ladders import SIZES, doubled, nth, refuse, require_right, require_whole


def test_hooks_run_once_for_each_graph_in_the_thread_that_captures(
    lab: Lab, ladder: dict[str, Any]
) -> None:
    seen: list[tuple[str, int]] = []

    def note(what: str) -> None:
        seen.append((what, threading.get_ident()))

    with (
        cgraph.register_graph_capture_end_hook(lambda graph: note("captured")),
        cgraph.register_graph_instantiate_hook(lambda graph: note("instantiated")),
    ):
        cgraph.graphed(doubled, sizes=SIZES, **ladder).capture(fresh(lab, 3, 5))
    words = [what for what, _ in seen]
    assert words == ["captured"] * len(SIZES) + ["instantiated"] * len(SIZES)
    assert {thread for _, thread in seen} == {threading.get_ident()}


@pytest.mark.parametrize("given", [3, 8])  # rows that are made up, or cut
def test_an_interrupt_leaves_no_key_half_done(lab: Lab, ladder: dict[str, Any], given: int) -> None:
    interrupt = nth(2, lambda graph: refuse(KeyboardInterrupt, "the user's"))
    function = cgraph.graphed(doubled, sizes=SIZES, **ladder)
    with (
        cgraph.register_graph_instantiate_hook(interrupt),
        pytest.raises(KeyboardInterrupt, match="the user's"),
    ):
        function.capture(fresh(lab, given, 5))
    assert states(function) == ["captured"] + ["eager"] * (len(SIZES) - 1)
    require_whole(function, lab)


@pytest.mark.parametrize("given", [3, 8])
def test_graphs_that_a_hook_lets_go_keep_no_others_from_being_instantiated(
    lab: Lab, ladder: dict[str, Any], given: int
) -> None:
    seen: list[cgraph.CUDAGraph] = []

    def reset_second(graph: cgraph.CUDAGraph) -> None:
        seen.append(graph)
        if len(seen) == 4:
            seen[1].reset()

    function = cgraph.graphed(doubled, sizes=SIZES, **ladder)
    with (
        cgraph.register_graph_capture_end_hook(reset_second),
        pytest.raises(CgraphError, match=r"no live template") as caught,
    ):
        function.capture(fresh(lab, given, 5))
    assert "float32[6, 5]" in str(getattr(caught.value, "__notes__", caught.value))
    seen.clear()
    assert states(function).count("captured") == len(SIZES) - 1
    require_right(function, lab, SIZES)


@pytest.mark.parametrize("given", [3, 8])
def test_a_key_whose_graph_is_let_go_as_it_is_ready_is_captured_at_its_next_call(
    lab: Lab, ladder: dict[str, Any], given: int
) -> None:
    function = cgraph.graphed(doubled, sizes=SIZES, **ladder)
    with (
        cgraph.register_graph_instantiate_hook(nth(3, lambda graph: graph.reset())),
        pytest.raises(StateError, match=r"in no hook") as caught,
    ):
        function.capture(fresh(lab, given, 5))
    assert "float32[4, 5]" in str(getattr(caught.value, "__notes__", caught.value))
    assert states(function).count("captured") == len(SIZES) - 1
    require_whole(function, lab)


@pytest.mark.parametrize("given", [3, 8])  # rows that are made up, or cut
def test_a_function_that_a_hook_resets_forgets_the_graphs_that_wait(
    lab: Lab, ladder: dict[str, Any], given: int
) -> None:
    count, destroyed = 0, []

    def reset(graph: cgraph.CUDAGraph) -> None:
        nonlocal count
        count += 1
        number = count
        graph.register_destroy_callback(lambda *_: destroyed.append(number))
        if count == 3:
            function.reset()

    function = cgraph.graphed(doubled, sizes=SIZES, **ladder)
    with cgraph.register_graph_capture_end_hook(reset):
        function.capture(fresh(lab, given, 5))
    assert sorted(destroyed) == [1, 2, 3]
    assert states(function) == ["captured"] * (len(SIZES) - 3)
    require_whole(function, lab)


@pytest.mark.parametrize("given", [3, 8])
def test_a_function_that_a_hook_resets_as_the_first_graph_is_ready_forgets_all(
    lab: Lab, ladder: dict[str, Any], given: int
) -> None:
    def reset(graph: cgraph.CUDAGraph) -> None:
        function.reset()

    function = cgraph.graphed(doubled, sizes=SIZES, **ladder)
    with cgraph.register_graph_instantiate_hook(reset):
        function.capture(fresh(lab, given, 5))
    assert states(function) == []
    require_whole(function, lab)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_key_that_cannot_be_given_its_graph_runs_eagerly_until_its_next_call(
    lab: Lab, ladder: dict[str, Any], monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    make, fail = capturing.entry_of_graph, nth(2, lambda: refuse(error, "no entry"))

    def fail_once(*args: Any, **kwargs: Any) -> Any:
        fail()
        return make(*args, **kwargs)

    function = cgraph.graphed(doubled, sizes=SIZES, **ladder)
    with monkeypatch.context() as patch, pytest.raises(error, match="no entry"):
        patch.setattr(capturing, "entry_of_graph", fail_once)
        function.capture(fresh(lab, 8, 5))
    # An interrupt leaves none.
    left = len(SIZES) - 1 if error is MemoryError else 0
    assert states(function).count("captured") == left
    require_whole(function, lab)


@pytest.mark.parametrize("given", [4, 8])
def test_a_graph_that_a_callback_has_called_for_is_captured_once_more_and_kept_once(
    lab: Lab, ladder: dict[str, Any], given: int
) -> None:
    net, x = nn.Linear(5, 5, device=lab.device), fresh(lab, 8, 5)
    captures: list[int] = []
    found: list[bool] = []
    call = nth(3, lambda *_: found.append(near(function(x), net(x))))
    function = cgraph.graphed(net, sizes=SIZES, **ladder)
    with torch.no_grad():
        with cgraph.register_graph_capture_end_hook(lambda g: g.register_destroy_callback(call)):
            function.capture(fresh(lab, given, 5), progress=False)
        net.weight = nn.Parameter(torch.randn_like(net.weight))
        with cgraph.register_graph_capture_end_hook(lambda graph: captures.append(1)):
            function.capture(fresh(lab, 8, 5), progress=False)
        assert found == [True]
        # Captures alone have let all graphs go before the first of them.
        assert len(captures) == len(SIZES) + ("warmup" not in ladder)
        assert states(function) == ["captured"] * len(SIZES)
        for rows in SIZES:
            assert near(function(x[:rows]), net(x[:rows]))


@pytest.mark.parametrize("given", [3, 8])
@pytest.mark.parametrize("keep_templates", [False, True])
def test_graphs_that_go_for_others_as_they_are_ready_are_captured_at_their_next_call(
    lab: Lab, ladder: dict[str, Any], keep_templates: bool, given: int
) -> None:
    def call_others(graph: cgraph.CUDAGraph) -> None:
        for width in (7, 8, 9):
            y = fresh(lab, 2, width)
            assert torch.equal(function(y), torch.relu(y * 2))

    options: dict[str, Any] = {"max_graphs": len(SIZES), "keep_templates": keep_templates}
    function = cgraph.graphed(doubled, sizes=SIZES, **ladder, **options)
    with cgraph.register_graph_instantiate_hook(nth(1, call_others)):
        function.capture(fresh(lab, given, 5), progress=False)
    for _ in range(2):
        require_right(function, lab, SIZES)
    assert states(function).count("captured") == len(SIZES)


@pytest.mark.parametrize("given", [3, 8])
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_key_that_is_given_its_graph_by_half_lets_it_go(
    lab: Lab,
    ladder: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException],
    given: int,
) -> None:
    evict, fail = Limits.evict, nth(2, lambda: refuse(error, "no room"))

    def fail_once(self: Limits, key: Any) -> None:
        fail()
        evict(self, key)

    function = cgraph.graphed(doubled, sizes=SIZES, **ladder)
    with monkeypatch.context() as patch, pytest.raises(error, match="no room"):
        patch.setattr(Limits, "evict", fail_once)
        function.capture(fresh(lab, given, 5))
    require_whole(function, lab)


def test_an_error_of_a_ladder_keeps_no_argument_of_its_call(
    lab: Lab, ladder: dict[str, Any]
) -> None:
    def fail(graph: cgraph.CUDAGraph) -> None:
        raise ValueError("a hook's")

    def capture() -> weakref.ref[Tensor]:
        x = fresh(lab, 8, 5)
        with (
            cgraph.register_graph_capture_end_hook(
                lambda g: g.register_post_instantiate_hook(fail)
            ),
            pytest.raises(ValueError, match="a hook's"),
        ):
            function.capture(x, progress=False)
        return weakref.ref(x)

    function = cgraph.graphed(doubled, sizes=SIZES, **ladder)
    gc.collect()
    gc.disable()
    try:
        assert capture()() is None
    finally:
        gc.enable()


def with_one_refused(
    sim: SimLab, ladder: dict[str, Any], x: Tensor, made: list[cgraph.functions.GraphedFunction]
) -> cgraph.functions.GraphedFunction:
    """A function with a ladder of which one graph is not instantiated; ``made`` gets it before."""
    simulator = sim.simulator
    cgraph.graphed(doubled, sizes=SIZES, **ladder).capture(x)
    start = len(simulator.calls())
    cgraph.graphed(doubled, sizes=SIZES, **ladder).capture(x)
    calls = simulator.calls()[start:]
    fallible = [n for n, call in enumerate(calls) if "Instantiate" in str(call)]
    assert len(fallible) == len(SIZES)
    # What went before is let go among these calls, now here, now there.
    for number in range(fallible[2], fallible[-1] + 20):
        function = cgraph.graphed(doubled, sizes=SIZES, **ladder)
        made[:] = [function]
        simulator.fail_call(number, 2)
        try:
            function.capture(x)
        except InstantiateError:
            return function
        except CgraphError:
            pass
        finally:
            simulator.clear_faults()
    pytest.fail("no instantiation has failed")


@pytest.mark.parametrize("given", [3, 8])  # rows that are made up, or cut
def test_a_graph_that_the_driver_refuses_is_let_go_and_the_others_serve_calls(
    sim: SimLab, ladder: dict[str, Any], given: int
) -> None:
    x = fresh(sim, given, 5)
    cgraph.graphed(doubled, sizes=SIZES, **ladder).capture(x)
    gc.collect()
    baseline = sim.simulator.live()
    function = with_one_refused(sim, ladder, x, [])
    assert states(function).count("captured") == len(SIZES) - 1
    require_whole(function, sim)
    del function
    gc.collect()
    sim.simulator.synchronize()
    assert sim.simulator.live() == baseline


@pytest.mark.parametrize("given", [3, 8])
def test_hooks_of_graphs_that_are_ready_call_also_for_the_one_that_the_driver_refuses(
    sim: SimLab, ladder: dict[str, Any], given: int
) -> None:
    made: list[cgraph.functions.GraphedFunction] = []

    def call_all(graph: cgraph.CUDAGraph) -> None:
        if made:
            require_right(made.pop(), sim, SIZES)

    with cgraph.register_graph_instantiate_hook(call_all):
        function = with_one_refused(sim, ladder, fresh(sim, given, 5), made)
    assert states(function) == ["captured"] * len(SIZES)
