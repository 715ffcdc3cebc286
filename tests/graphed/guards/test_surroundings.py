"""Objects that a graphed function reaches besides tensor arguments: no change is overlooked."""

from __future__ import annotations

import copy
import types
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from cgraph.errors import ArgumentError
from graphed_calls import Case, alike_after, near, sets, states, twins_agree
from lab import Lab, fresh
from networks import network


def accumulating(lab: Lab) -> Case:
    net = network(lab)
    for one in net.parameters():
        one.grad = torch.zeros_like(one)

    def accumulate(x: Tensor) -> Tensor:
        loss = net(x).sum()
        loss.backward()
        return loss.detach()  # type: ignore[no-any-return]

    return Case(accumulate, state=lambda: [one.grad for one in net.parameters()], shape=(4, 6))


def test_a_backward_pass_inside_the_function_adds_to_gradients(lab: Lab) -> None:
    twins_agree(lab, accumulating, rtol=1e-4)


def test_a_capture_with_gradients_leaves_tensors_as_one_call_does(lab: Lab) -> None:
    net, count = network(lab), torch.zeros((), device=lab.device)

    def counted(x: Tensor) -> Tensor:
        count.add_(1)
        return net(x)

    graphed = cgraph.graphed(counted)
    for calls in (1, 2, 3):
        graphed(fresh(lab, 4, 6)).sum().backward()
        assert count.item() == calls


def test_a_capture_of_a_shape_that_writes_is_put_back_after_one_that_does_not(lab: Lab) -> None:
    count = torch.zeros((), device=lab.device)

    def sometimes(x: Tensor) -> Tensor:
        if x.shape[0] > 4:
            count.add_(1)
        return x * 2

    graphed = cgraph.graphed(sometimes)
    graphed(fresh(lab, 3))
    graphed(fresh(lab, 5))
    assert count.item() == 1


def test_keys_of_a_dictionary_that_read_alike_are_told_apart(lab: Lab) -> None:
    class Name:
        def __repr__(self) -> str:
            return "name"

    one, other = Name(), Name()
    graphed = cgraph.graphed(lambda d: d[one] * 10 + d[other])
    for _ in range(2):
        given = {one: fresh(lab, 3), other: fresh(lab, 3)}
        assert near(graphed(given), given[one] * 10 + given[other])


class Flagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return x * (2 if is_training(self.part) else 1)


def is_training(module: nn.Module) -> bool:
    return module.training


def test_a_flag_that_only_a_helper_reads_is_noticed(lab: Lab) -> None:
    net = Flagged()
    graphed = alike_after(
        lab, net, *sets(net.part, "training", False, True, False), grad=True, calls=1
    )
    assert states(graphed) == ["captured"] * 2


@torch.no_grad()
def test_a_module_among_the_arguments_is_followed(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda net, x: net(x))
    one, other, x = network(lab), network(lab), fresh(lab, 4, 6)
    for net in (one, other, one):
        assert near(graphed(net, x), net(x))
    one[0].weight.data = one[0].weight.data * 2
    assert near(graphed(one, x), one(x))
    dropout, ones = nn.Dropout(0.5), torch.ones(1000, device=lab.device)
    graphed = cgraph.graphed(lambda net, x: net(x) + 0)
    for training in (False, True, False):
        dropout.train(training)
        assert bool((graphed(dropout, ones) == 0).any()) == training


def generator(x: Tensor) -> Iterator[Tensor]:
    yield x


async def coroutine(x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize("function", [generator, coroutine])
def test_a_function_whose_body_runs_later_is_refused(function: Any) -> None:
    with pytest.raises(ArgumentError, match="whose body runs after the call"):
        cgraph.graphed(function)


def test_a_shape_that_comes_again_is_captured_after_many_that_did_not(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda x: x * 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for width in range(1, 10):
            graphed(fresh(lab, width))
        alike_after(lab, graphed, grad=True, shape=(20,), calls=5)
    assert graphed.report().keys[-1].state == "captured"


def test_new_objects_at_each_call_do_not_stay_alive(lab: Lab) -> None:
    class Thing:
        alive = 0

        def __init__(self) -> None:
            Thing.alive += 1

        def __del__(self) -> None:
            Thing.alive -= 1

    graphed = cgraph.graphed(lambda x, thing: x * 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(600):
            graphed(fresh(lab, 2), Thing())
    assert Thing.alive < 300


def test_as_many_graphs_stay_as_there_are_sizes(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda x: x * 2, sizes=range(1, 71))
    graphed.capture(fresh(lab, 3), progress=False).freeze()
    assert graphed.report().captured == 70


def test_a_break_is_no_finding_and_a_graphed_function_is_seen_through(lab: Lab) -> None:
    @cgraph.eager_break
    def largest(x: Tensor) -> Tensor:
        return x / x.max().item()

    graphed = cgraph.graphed(lambda x: largest(x + 1) * 2)
    for function in (graphed, graphed.__wrapped__):
        explanation = cgraph.explain(function, fresh(lab, 4))
        assert explanation.ok, explanation
        assert not explanation.findings


def test_a_trial_of_padding_tells_of_results_before_it_overwrites_them(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda x: x * 2, sizes=[4])
    x = fresh(lab, 4)
    kept = graphed(x)
    graphed(fresh(lab, 3))
    assert torch.equal(kept, x * 2)


class Recurrent:
    def __init__(self, lab: Lab) -> None:
        self.h = torch.zeros(3, device=lab.device)

    def step(self, x: Tensor) -> Tensor:
        self.h = torch.tanh(x + self.h)
        return self.h


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_state_that_the_function_keeps_in_an_attribute_goes_on(lab: Lab, is_broken: bool) -> None:
    one, other = Recurrent(lab), Recurrent(lab)

    graphed = cgraph.graphed(one.step if not is_broken else types.MethodType(broken, one))
    with pytest.warns(UserWarning, match="runs eagerly") if is_broken else nullcontext():
        for _ in range(6):
            x = fresh(lab, 3)
            found, expected = graphed(x), other.step(x)
            assert near(one.h, expected)
            assert near(found, expected if not is_broken else expected * 2)
    assert (graphed.report().replays > 2) is not is_broken


def broken(self: Recurrent, x: Tensor) -> Tensor:
    self.step(x)
    self.h.sum().item()
    return self.h * 2


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(x.shape[-1], device=x.device) * 2.0
        return x * self.table


def test_a_table_that_the_first_call_makes_is_no_obstacle(lab: Lab) -> None:
    twins_agree(lab, lambda lab: Case(Cached()), on_fail="raise")


def test_what_the_simulator_cannot_capture_trains_eagerly() -> None:
    with cgraph.sim.use():
        net = nn.LSTM(2, 3)
        eager, graphed = copy.deepcopy(net), cgraph.graphed(net)
        with pytest.warns(UserWarning, match="the simulator cannot capture aten.mkldnn_rnn"):
            for _ in range(2):
                x = torch.randn(4, 1, 2)
                for run in (graphed, eager):
                    run(x)[0].sum().backward()
        for one, other in zip(net.parameters(), eager.parameters(), strict=True):
            assert one.grad is not None
            assert other.grad is not None
            assert near(one.grad, other.grad)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_arguments_that_python_refuses_leave_no_key(lab: Lab, is_frozen: bool) -> None:
    graphed = cgraph.graphed(lambda x, y: x + y)
    if is_frozen:
        graphed.freeze()
    for given in ((), (fresh(lab, 3),), (fresh(lab, 3),) * 3):
        with pytest.raises(TypeError, match="argument"):
            graphed(*given)
    with pytest.raises(TypeError, match="z"):
        graphed(fresh(lab, 3), y=fresh(lab, 3), z=1)
    assert graphed.report().keys == ()
