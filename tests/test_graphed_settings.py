"""Settings of optimizers that change between calls."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import cgraph
from graphed_calls import near
from lab import Lab, fresh

Make = Callable[[Any], Optimizer]


class Trainer:
    """A module and what trains it."""

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
