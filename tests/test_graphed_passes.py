"""Backward passes inside graphed functions, and the gradients that they leave in ``.grad``."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import cgraph
from graphed_calls import near, states
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
