"""Optimizers, their settings, hooks and frozen parameters that callers change between steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.testing import assert_close

import cgraph
from graphed_calls import near
from lab import Lab, fresh

Wrap = Callable[[Any], Any]


def plain(function: Any) -> Any:
    """Return the function itself."""
    return function


def both(lab: Lab, run: Callable[[Wrap], list[Any]]) -> None:
    """Compare the results of a run with graphed functions and without."""
    for got, right in zip(run(cgraph.graphed), run(plain), strict=True):
        assert_close(got, right)


def after_steps(
    wrap: Wrap,
    weight: nn.Parameter,
    optimizer: torch.optim.Optimizer,
    change: Callable[[bool], None],
) -> Tensor:
    """Return a weight after four steps, with a change before the last two."""

    @wrap
    def step(x: Tensor) -> None:
        weight.grad = None
        (weight * x).sum().backward()
        optimizer.step()

    for place in range(4):
        change(place >= 2)
        step(torch.ones_like(weight))
    return weight.detach()


def test_a_frozen_parameter_with_a_gradient_that_comes_later_steps(lab: Lab) -> None:
    def run(wrap: Wrap) -> list[Any]:
        one, other = (nn.Parameter(torch.ones(1, device=lab.device)) for _ in range(2))
        other.requires_grad_(False)
        optimizer = torch.optim.SGD([one, other], lr=0.1)
        step = wrap(lambda: optimizer.step())
        found: list[Any] = []
        for place in range(4):
            one.grad = torch.ones_like(one)
            other.grad = torch.ones_like(other) if place >= 2 else None
            step()
            found += [one.detach().clone(), other.detach().clone()]
        return found

    both(lab, run)


class Sign(torch.optim.Optimizer):
    """A user-defined optimizer with an attribute of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.k = 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                one.sub_(one.grad.sign() * self.k, alpha=group["lr"])


def test_attributes_of_an_optimizer_of_the_users_are_followed(lab: Lab) -> None:
    def run(wrap: Wrap) -> list[Any]:
        weight = nn.Parameter(torch.ones(1, device=lab.device))
        optimizer = Sign([weight])

        def change(is_later: bool) -> None:
            optimizer.k = 10.0 if is_later else 1.0

        return [after_steps(wrap, weight, optimizer, change)]

    both(lab, run)


def test_settings_of_optimizers_and_schedulers_that_code_reads_are_followed(lab: Lab) -> None:
    def run(wrap: Wrap) -> list[Any]:
        weight = nn.Parameter(torch.ones(1, device=lab.device))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        decay = wrap(lambda x: x * optimizer.param_groups[0]["lr"])
        last = wrap(lambda x: x * scheduler.get_last_lr()[0] + scheduler.last_epoch)
        found = []
        for place in range(4):
            if place == 2:
                optimizer.step()
                scheduler.step()
            x = torch.ones(1, device=lab.device)
            found += [decay(x).clone(), last(x).clone()]
        return found

    both(lab, run)


Make = Callable[[Any], Optimizer]


class Trainer:
    """A module and its trainer."""

    def __init__(self, lab: Lab, make: Make, net: nn.Module | None = None) -> None:
        self.net = nn.Linear(4, 4).to(lab.device) if net is None else net
        self.optimizer = make(self.net.parameters())

    def step(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.net(x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def pair(lab: Lab, make: Make) -> tuple[Trainer, Trainer]:
    ours = Trainer(lab, make)
    return ours, Trainer(lab, make, copy.deepcopy(ours.net))


def momentum(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.1, momentum=0.9)


def test_a_group_that_is_added_between_steps_is_trained(lab: Lab) -> None:
    ours, theirs = pair(lab, momentum)
    graphed = cgraph.graphed(ours.step)
    graphed(x := fresh(lab, 2, 4))
    theirs.step(x)
    for one in (ours, theirs):
        one.net = nn.Sequential(one.net, nn.Linear(4, 4, bias=False).to(lab.device))
        with torch.no_grad():
            one.net[1].weight.fill_(0.25)
        one.optimizer.add_param_group({"params": [*one.net[1].parameters()]})
    for _ in range(3):
        x = fresh(lab, 2, 4)
        assert near(graphed(x), theirs.step(x))
        assert near(ours.net[1].weight, theirs.net[1].weight)  # type: ignore[index]


@pytest.mark.parametrize("is_deep", [False, True])
def test_an_optimizer_that_is_exchanged_between_steps_is_the_one_that_steps(
    lab: Lab, is_deep: bool
) -> None:
    ours, theirs = pair(lab, momentum)
    engine = SimpleNamespace(trainer=ours)
    step = (lambda x: engine.trainer.step(x)) if is_deep else ours.step
    graphed = cgraph.graphed(step)
    for turn in range(6):
        if turn == 3:
            for one in (ours, theirs):
                one.optimizer = SGD(one.net.parameters(), lr=0.02)
        x = fresh(lab, 2, 4)
        assert near(graphed(x), theirs.step(x))
        assert near(ours.net.weight, theirs.net.weight)  # type: ignore[arg-type]
