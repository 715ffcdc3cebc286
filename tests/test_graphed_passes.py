"""Backward passes inside graphed functions, and the gradients that they leave in ``.grad``."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import cgraph
from cgraph.errors import CaptureError
from graphed_calls import misses, near, states
from lab import Lab, fresh

Step = Callable[[Tensor], Tensor]


def step_of(net: nn.Module, optimizer: torch.optim.Optimizer, *, is_whole: bool = False) -> Step:
    """A training step, with or without that of the optimizer."""

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


@pytest.mark.parametrize("is_first", [False, True])
def test_without_gradients_a_tensor_still_says_whether_it_requires_one(
    lab: Lab, is_first: bool
) -> None:
    graphed = cgraph.graphed(lambda x: x + (1 if x.requires_grad else 2))
    with torch.no_grad():
        for call in range(6):
            requires = (call % 2 == 0) is is_first
            x = fresh(lab, 4).requires_grad_(requires)
            assert near(graphed(x), x.detach() + (1 if requires else 2))
    assert states(graphed) == ["captured"] * 2
    assert graphed.report().replays == 6


def test_without_gradients_a_tensor_with_a_history_is_replayed_natively(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda x: x * 2)
    x = fresh(lab, 4).requires_grad_() * 3
    with torch.no_grad():
        graphed(x)
        with misses() as missed:
            for _ in range(3):
                assert near(graphed(x), x * 2)
    assert not missed


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


def test_gradients_of_a_pass_inside_outlast_replays_of_other_keys(lab: Lab) -> None:
    net, other = nets(lab)
    ours, theirs = (torch.optim.SGD(one.parameters(), 0.1) for one in (net, other))

    def either(net: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Tensor]:
        step = step_of(net, optimizer)

        def run(x: Tensor, trains: bool) -> Tensor:
            if trains:
                return step(x)
            with torch.no_grad():
                return net(x).square().mean().sin().cos()

        return run

    graphed, eager = cgraph.graphed(either(net, ours)), either(other, theirs)
    graphed(fresh(lab, 3, 5), False)
    for _ in range(4):
        x, held_out = fresh(lab, 3, 5), fresh(lab, 3, 5)
        assert near(graphed(x, True), eager(x, True))
        assert near(graphed(held_out, False), eager(held_out, False))
        require_same(net, other)
        ours.step()
        theirs.step()
    # Of the same function, which clears gradients, the first call has found none.
    assert states(graphed) == ["captured"] * 3


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("creates_graph", [False, True])
def test_a_gradient_that_is_computed_from_the_one_before_is_as_in_eager(
    lab: Lab, creates_graph: bool
) -> None:
    def momentum(weight: Tensor) -> Step:
        def run(x: Tensor) -> Tensor:
            loss = (weight * x).square().sum()
            if creates_graph:
                loss.backward(create_graph=True)
            else:
                (gradient,) = torch.autograd.grad(loss, weight)
                assert weight.grad is not None
                weight.grad = weight.grad * 0.5 + gradient
            return loss.detach()

        return run

    start = fresh(lab, 3)
    own, other = (start.clone().requires_grad_() for _ in range(2))
    own.grad, other.grad = torch.zeros_like(own), torch.zeros_like(own)
    graphed, eager = cgraph.graphed(momentum(own)), momentum(other)
    for _ in range(4):
        x = fresh(lab, 3)
        assert near(graphed(x), eager(x))
        assert own.grad is not None and other.grad is not None
        assert near(own.grad, other.grad)


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
def test_gradients_that_a_pass_adds_to_may_be_replaced(lab: Lab) -> None:
    net, other = nets(lab)

    def add(net: nn.Module) -> Step:
        def run(x: Tensor) -> Tensor:
            loss = net(x).square().mean()
            loss.backward()
            return loss.detach()

        return run

    graphed, eager = cgraph.graphed(add(net)), add(other)
    for call in range(6):
        for parameter in (*net.parameters(), *other.parameters()):
            if call in (0, 2):
                parameter.grad = torch.zeros_like(parameter)
            elif call == 4:
                parameter.grad = None
        x = fresh(lab, 3, 5)
        assert near(graphed(x), eager(x))
        require_same(net, other)
    if lab.device == "cpu":
        keys = graphed.report().keys
        assert any(one.argument == "a gradient" for key in keys for one in key.rerecorded)


def test_an_argument_that_a_pass_inside_would_give_a_gradient_is_refused(lab: Lab) -> None:
    def function(x: Tensor) -> Tensor:
        y = (x * 2).sum()
        y.backward()
        return y.detach()

    x = fresh(lab, 3).requires_grad_()
    with pytest.raises(CaptureError, match="gradient"):
        cgraph.graphed(function, warmup=0, measure=False, on_fail="raise")(x)
    with pytest.warns(UserWarning, match="gradient"):
        cgraph.graphed(function, warmup=0, measure=False)(x)
    assert x.grad is not None and torch.equal(x.grad, torch.full_like(x, 2))


class Sum(nn.Module):
    """Adds its arguments up, in memory that the first call makes."""

    total: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.total is None:
            self.total = torch.zeros_like(x)
        self.total.add_(x)
        return self.total * 1


class Buffered(nn.Module):
    """The same in a buffer, which is watched."""

    total: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.total is None:
            self.total = torch.zeros_like(x)
        self.total.add_(x)
        return self.total * 1


@pytest.mark.parametrize("options", [{}, {"measure": False}, {"warmup": 1}])
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


def test_a_capture_ahead_of_the_call_that_makes_state_says_so(lab: Lab) -> None:
    graphed = cgraph.graphed(Sum())
    with torch.no_grad():
        with pytest.raises(CaptureError, match="call the function once before"):
            graphed.capture(fresh(lab, 3))
        eager = Sum()
        for _ in range(3):
            x = fresh(lab, 3)
            assert torch.equal(graphed(x), eager(x))
        graphed.capture(fresh(lab, 3))


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
def test_a_function_that_makes_new_state_in_each_call_runs_eagerly(lab: Lab) -> None:
    kept: list[Tensor] = []

    def function(x: Tensor) -> Tensor:
        kept.append(x * 2)
        for one in kept:
            one.add_(1)
        return kept[-1] * 1

    graphed = cgraph.graphed(function)
    with torch.no_grad():
        for _ in range(6):
            x = fresh(lab, 3)
            assert torch.equal(graphed(x), x * 2 + 1)
    (key,) = graphed.report().keys
    assert key.state == "eager" and "anew each time" in (key.reason or "")
