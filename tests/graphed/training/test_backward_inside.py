"""Backward passes inside graphed functions: their gradients, hooks of leaves, accumulation."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from graphed_calls import near, same_gradients, states
from lab import Lab, fresh
from networks import network

Step = Callable[[Tensor], Tensor]


def step_of(net: nn.Module, optimizer: torch.optim.Optimizer, *, is_whole: bool = False) -> Step:
    """Return a training step, with or without the optimizer's."""

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        if is_whole:
            optimizer.step()
        return loss.detach()

    return step


def nets(lab: Lab) -> tuple[nn.Module, nn.Module]:
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).to(lab.device)
    return net, copy.deepcopy(net)


def require_same(net: nn.Module, other: nn.Module) -> None:
    for one, two in zip(net.parameters(), other.parameters(), strict=True):
        assert near(one, two)
        assert one.grad is not None and two.grad is not None
        assert near(one.grad, two.grad)


@pytest.mark.parametrize("had_gradients", [False, True])
@pytest.mark.parametrize("is_whole", [False, True])
def test_gradients_that_a_pass_inside_makes_are_those_of_the_parameters(
    lab: Lab, is_whole: bool, had_gradients: bool
) -> None:
    net, other = nets(lab)
    ours, theirs = (torch.optim.SGD(one.parameters(), 0.1) for one in (net, other))
    if had_gradients:
        for parameter in (*net.parameters(), *other.parameters()):
            parameter.grad = torch.full_like(parameter, 7)
    graphed = cgraph.graphed(step_of(net, ours, is_whole=is_whole))
    eager = step_of(other, theirs, is_whole=is_whole)
    for _ in range(4):
        x = fresh(lab, 3, 5)
        assert near(graphed(x), eager(x))
        require_same(net, other)
        if not is_whole:
            ours.step()
            theirs.step()
    assert states(graphed) == ["captured"]


def test_gradients_of_a_pass_inside_are_there_after_somebody_took_them_away(lab: Lab) -> None:
    net, other = nets(lab)
    ours, theirs = (torch.optim.SGD(one.parameters(), 0.1) for one in (net, other))
    graphed, eager = cgraph.graphed(step_of(net, ours)), step_of(other, theirs)
    for _ in range(4):
        x = fresh(lab, 3, 5)
        assert near(graphed(x), eager(x))
        require_same(net, other)
        net.zero_grad()
        other.zero_grad()
    assert states(graphed) == ["captured"]


class Sum(nn.Module):
    """A module that adds its arguments up, in memory that the first call makes."""

    total: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.total is None:
            self.total = torch.zeros_like(x)
        self.total.add_(x)
        return self.total * 1


class Buffered(nn.Module):
    """A module that adds its arguments up in a buffer, which is watched."""

    total: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.total is None:
            self.total = torch.zeros_like(x)
        self.total.add_(x)
        return self.total * 1


@pytest.mark.parametrize("options", [{}, {}, {"warmup": 1}])
def test_state_that_the_first_call_makes_has_nothing_of_warm_up_calls(
    lab: Lab, options: dict[str, int]
) -> None:
    graphed, eager = cgraph.graphed(Sum(), **options), Sum()
    with torch.no_grad():
        for _ in range(4):
            x = fresh(lab, 3)
            assert torch.equal(graphed(x), eager(x))
    assert states(graphed) == ["captured"]


def test_state_that_is_made_anew_now_and_then_is_captured_anew(lab: Lab) -> None:
    own, eager = Buffered(), Buffered()
    graphed = cgraph.graphed(own)
    with torch.no_grad():
        for call in range(12):
            if call % 4 == 0:
                own.total = eager.total = None
            x = fresh(lab, 3)
            assert torch.equal(graphed(x), eager(x))


def test_a_layer_that_is_frozen_between_steps_loses_its_gradient(lab: Lab) -> None:
    first, second = (nn.Linear(3, 3, device=lab.device) for _ in range(2))
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        second(first(x)).sum().backward()
        optimizer.step()

    function = cgraph.graphed(step)
    function(fresh(lab, 2, 3))
    assert first.weight.grad is not None
    first.requires_grad_(False)
    for _ in range(2):
        before = second.weight.detach().clone()
        function(fresh(lab, 2, 3))
        assert first.weight.grad is None
        assert not torch.equal(second.weight, before)
    assert set(states(function)) == {"captured"}


class Twin:
    """A network with a step that leaves gradients, graphed or not."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def passes(self, x: Tensor) -> Tensor:
        return self.as_it_is(x).detach()

    def as_it_is(self, x: Tensor) -> Tensor:
        loss: Tensor = self.net(x).square().mean()
        loss.backward()
        return loss


def twins(lab: Lab, **options: Any) -> tuple[Twin, Any, Twin]:
    mine = Twin(network(lab))
    eager = Twin(copy.deepcopy(mine.net))
    return mine, cgraph.graphed(mine.passes, **options), eager


@pytest.mark.parametrize("turn", [0, 1, 2])
def test_gradients_that_some_parameters_have_are_added_to(lab: Lab, turn: int) -> None:
    mine, graphed, eager = twins(lab)
    for step in range(4):
        for one in (mine, eager):
            one.optimizer.zero_grad()
            if step == turn:
                weight = next(one.net.parameters())
                weight.grad = torch.full_like(weight, 0.5)
        x = fresh(lab, 4, 6)
        assert near(graphed(x), eager.passes(x))
        assert same_gradients(mine.net, eager.net)


@pytest.mark.filterwarnings("ignore:.*return the loss detached")  # with torch 2.8
def test_a_loss_whose_backward_pass_is_inside_is_returned_without_history(lab: Lab) -> None:
    mine, _, eager = twins(lab)
    graphed = cgraph.graphed(mine.as_it_is)
    for _ in range(3):
        for one in (mine, eager):
            one.optimizer.zero_grad()
        x = fresh(lab, 4, 6)
        loss = graphed(x)
        assert not loss.requires_grad
        assert near(loss, eager.passes(x))
    assert states(graphed) == ["captured"]


@pytest.mark.filterwarnings("ignore:.*return the loss detached")
def test_a_prediction_beside_its_loss_is_returned_without_history(lab: Lab) -> None:
    mine = network(lab)
    eager = copy.deepcopy(mine)

    def both(net: nn.Module, x: Tensor) -> dict[str, Tensor]:
        net.zero_grad()
        prediction = net(x)
        loss = prediction.square().mean()
        loss.backward()
        return {"loss": loss, "prediction": prediction}

    graphed = cgraph.graphed(lambda x: both(mine, x))
    for _ in range(3):
        x = fresh(lab, 4, 6)
        found, right = graphed(x), both(eager, x)
        assert all(near(found[name], right[name]) for name in right)
        assert same_gradients(mine, eager)
        del found
    assert states(graphed) == ["captured"]


def test_a_batch_norm_that_was_called_before_a_capture_has_its_backward_pass_after_it(
    lab: Lab,
) -> None:
    mine = network(lab, nn.BatchNorm1d(8))
    eager = copy.deepcopy(mine)
    graphed = cgraph.graphed(mine)
    for _ in range(3):
        given = [fresh(lab, 4, 6) for _ in range(2)]
        (mine(given[0]).square().sum() + graphed(given[1]).sum()).backward()
        (eager(given[0]).square().sum() + eager(given[1]).sum()).backward()
        assert same_gradients(mine, eager)
