"""Graphs that are one too many keep their template where that was asked for."""

from __future__ import annotations

import gc
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import cgraph
from cgraph import _core
from cgraph.errors import StateError
from graphed_calls import states
from lab import Lab, SimLab, fresh


def affine(x: Tensor) -> Tensor:
    return x * 2 + 1


class Counted:
    """A function, and how often it was run."""

    def __init__(self) -> None:
        self._runs: list[int] = []

    def __call__(self, x: Tensor) -> Tensor:
        self._runs.append(1)
        return affine(x)

    @property
    def runs(self) -> int:
        return len(self._runs)


def call(graphed: Any, lab: Lab, *all_rows: int) -> None:
    for rows in all_rows:
        x = fresh(lab, rows)
        assert torch.equal(graphed(x), affine(x)), rows


def test_an_evicted_key_is_instantiated_again_and_its_function_is_not_run(lab: Lab) -> None:
    function = Counted()
    graphed = cgraph.graphed(function, max_graphs=1, keep_templates=True)
    call(graphed, lab, 3, 4)
    assert states(graphed) == ["evicted", "captured"]
    runs = function.runs
    call(graphed, lab, 3, 3, 4, 3)
    assert function.runs == runs
    assert states(graphed) == ["captured", "evicted"]
    report = graphed.report()
    assert [key.replays for key in report.keys] == [4, 2]
    assert [key.rerecorded for key in report.keys] == [(), ()]


def test_a_template_that_is_kept_has_no_exec(sim: SimLab) -> None:
    graphed = cgraph.graphed(affine, max_graphs=2, keep_templates=True)
    call(graphed, sim, 3, 4, 5, 6)
    live = sim.simulator.live()
    assert (live["graphs"], live["execs"]) == (4, 2)
    call(graphed, sim, 3, 4, 5)
    live = sim.simulator.live()
    assert (live["graphs"], live["execs"]) == (4, 2)


def test_results_of_a_graph_that_came_back_are_told_apart_from_those_before(lab: Lab) -> None:
    graphed = cgraph.graphed(affine, max_graphs=1, keep_templates=True, on_held="clone")
    first, second = fresh(lab, 3), fresh(lab, 3)
    held = graphed(first)
    call(graphed, lab, 4)
    found = graphed(second)
    assert torch.equal(held, affine(first))
    assert torch.equal(found, affine(second))


def test_a_graph_that_was_put_away_is_captured_anew_if_a_parameter_has_moved(lab: Lab) -> None:
    net = nn.Linear(4, 2, bias=False).to(lab.device).requires_grad_(False)
    graphed = cgraph.graphed(net, max_graphs=1, keep_templates=True)
    x = fresh(lab, 3, 4)
    graphed(x)
    graphed(fresh(lab, 2, 4))
    net.weight = nn.Parameter(fresh(lab, 2, 4), requires_grad=False)
    assert torch.equal(graphed(x), net(x))


def test_a_frozen_function_brings_back_what_it_has(lab: Lab) -> None:
    graphed = cgraph.graphed(affine, max_graphs=1, keep_templates=True)
    call(graphed, lab, 3, 4)
    graphed.freeze()
    call(graphed, lab, 3, 4, 3)


def test_a_padded_call_brings_its_size_back(lab: Lab) -> None:
    function = Counted()
    graphed = cgraph.graphed(function, sizes=[4, 8], max_graphs=1, keep_templates=True)
    call(graphed, lab, 3, 7)
    runs = function.runs
    call(graphed, lab, 3, 7, 4, 8, 3)
    assert function.runs == runs


def test_templates_go_first_when_graphs_hold_too_many_bytes(sim: SimLab) -> None:
    one = cgraph.graphed(affine)
    one(fresh(sim, 100))
    most = 3 * one.report().memory_bytes + 1300  # with what three calls are copied to
    graphed = cgraph.graphed(affine, max_graphs=2, max_bytes=most, keep_templates=True)
    call(graphed, sim, 100, 101, 102, 103)
    assert states(graphed) == ["evicted", "evicted", "captured", "captured"]
    held = [key.memory_bytes for key in graphed.report().keys]
    assert held[0] is None and held[1] is not None
    assert graphed.report().memory_bytes <= most
    call(graphed, sim, 100, 101, 102, 103)


def test_a_template_that_cannot_be_instantiated_makes_room_for_a_new_capture(sim: SimLab) -> None:
    function = Counted()
    graphed = cgraph.graphed(function, max_graphs=1, keep_templates=True)
    call(graphed, sim, 3, 4)
    runs = function.runs
    sim.simulator.fail_next("cuGraphInstantiate", 2)
    call(graphed, sim, 3)
    assert function.runs > runs
    assert states(graphed) == ["captured", "evicted"]


def test_graphs_with_gradients_are_evicted_whole(lab: Lab) -> None:
    graphed = cgraph.graphed(affine, max_graphs=1, keep_templates=True)
    for rows in (3, 4, 3):
        x = fresh(lab, rows).requires_grad_()
        graphed(x).sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, torch.full_like(x, 2))


def test_a_reset_lets_templates_go(sim: SimLab) -> None:
    graphed = cgraph.graphed(affine, max_graphs=1, keep_templates=True)
    call(graphed, sim, 3, 4)
    graphed.reset()
    gc.collect()
    sim.simulator.synchronize()
    sim.simulator.device.collect()
    assert not any(sim.simulator.live().values())


@pytest.mark.parametrize("keep_templates", [False, True])
def test_padded_calls_that_no_native_entry_fits_share_one_entry(
    lab: Lab, keep_templates: bool
) -> None:
    graphed = cgraph.graphed(affine, sizes=[4], keep_templates=keep_templates)

    def with_gaps() -> int:
        x = fresh(lab, 3, 8)[:, ::2]
        assert torch.equal(graphed(x), affine(x))
        return sum(type(one) is _core.Entry for one in gc.get_objects())

    with_gaps()
    assert with_gaps() == with_gaps() == with_gaps()


class Point(NamedTuple):
    """A container that only Python can match."""

    x: Tensor
    factor: int


def test_the_least_recent_key_goes_first_however_its_calls_are_matched(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda point: point[0] * point[1], max_graphs=2)
    for rows in (4, 5, 5, 5, 6):
        graphed(Point(fresh(lab, rows), 2))
    assert states(graphed) == ["evicted", "captured", "captured"]
    graphed((fresh(lab, 3), 2))
    graphed(Point(fresh(lab, 6), 2))
    graphed(Point(fresh(lab, 5), 2))
    assert states(graphed) == ["evicted", "captured", "captured", "evicted"]


def test_a_call_that_is_refused_is_no_use_of_its_key(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda x: x * 2, max_graphs=2, on_held="raise")
    kept = graphed(fresh(lab, 3))
    other = graphed(fresh(lab, 4))
    with pytest.raises(StateError, match="still referenced"):
        graphed(fresh(lab, 3))
    del kept, other
    graphed(fresh(lab, 5))
    assert states(graphed) == ["evicted", "captured", "captured"]


def test_a_key_is_not_evicted_nor_reset_by_its_own_break(lab: Lab) -> None:
    inside: list[Any] = []

    @cgraph.eager_break
    def pause(y: Tensor) -> Tensor:
        for act in inside:
            act()
        return y + 1

    graphed = cgraph.graphed(lambda x, b: pause(x * 2) * 3 if b else x - 1, max_graphs=2)
    x = fresh(lab, 4)
    graphed(x, True)
    inside.extend(lambda rows=rows: graphed(fresh(lab, rows), False) for rows in (5, 6, 7))
    assert torch.equal(graphed(x, True), (x * 2 + 1) * 3)
    assert states(graphed)[0] == "captured"
    inside[:] = [graphed.reset]
    with pytest.raises(StateError, match="inside one of its own breaks"):
        graphed(x, True)
    inside.clear()
    assert torch.equal(graphed(x, True), (x * 2 + 1) * 3)
    graphed.reset()
    assert torch.equal(graphed(x, True), (x * 2 + 1) * 3)


def test_a_frozen_function_says_that_a_graph_had_to_go_for_others(lab: Lab) -> None:
    function = cgraph.graphed(lambda x: x * 2, sizes=[2, 4], max_graphs=1)
    function.capture(fresh(lab, 4), progress=False).freeze()
    assert torch.equal(function(x := fresh(lab, 2)), x * 2)
    with pytest.raises(StateError, match=r"x: float32\[4\].*had to go for others.*max_graphs="):
        function(fresh(lab, 4))
