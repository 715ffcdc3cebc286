"""Settings of optimizers that change between calls."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim import lr_scheduler as schedulers

import cgraph
from cgraph.errors import StateError
from graphed_calls import near, states
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


def capturable(parameters: Any) -> Optimizer:
    return AdamW(parameters, lr=0.1, capturable=True)


def of_tensor(parameters: Any) -> Optimizer:
    parameters = [*parameters]
    rate = torch.tensor(0.1, device=parameters[0].device)
    return Adam(parameters, lr=rate, capturable=True)


SCHEDULES = {
    "steps": lambda one: schedulers.StepLR(one, 3),
    "cycle": lambda one: schedulers.OneCycleLR(one, 0.3, total_steps=40, cycle_momentum=False),
    "same": lambda one: schedulers.ConstantLR(one, 1.0),
}


@pytest.mark.filterwarnings("ignore:.*runs eagerly for:UserWarning")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("make", [momentum, capturable, of_tensor])
@pytest.mark.parametrize("warmup", [0, 1, 3])
def test_a_learning_rate_that_changes_between_steps_is_the_one_that_is_used(
    lab: Lab, make: Make, schedule: str, warmup: int
) -> None:
    ours, theirs = pair(lab, make)
    first, second = (SCHEDULES[schedule](one.optimizer) for one in (ours, theirs))
    graphed = cgraph.graphed(ours.step, warmup=warmup, outputs="clone")
    for _ in range(10):
        x = fresh(lab, 2, 4)
        assert near(graphed(x), theirs.step(x))
        assert near(ours.net.weight, theirs.net.weight)  # type: ignore[arg-type]
        first.step()
        second.step()
    changes_often = schedule == "cycle" and make is not of_tensor
    assert states(graphed) == ["eager" if changes_often else "captured"]
    (key,) = graphed.report().keys
    if changes_often:
        assert key.reason is not None and "the setting lr of an optimizer" in key.reason
        assert key.advice is not None and "be a tensor" in key.advice
    else:
        changes = 3 if schedule == "steps" and make is not of_tensor else 0
        assert sum(one.count for one in key.rerecorded) == changes


@pytest.mark.parametrize(
    ("name", "value"), [("lr", 0.0), ("momentum", 0.5), ("weight_decay", 0.1), ("nesterov", True)]
)
def test_a_setting_that_is_assigned_between_steps_is_the_one_that_is_used(
    lab: Lab, name: str, value: Any
) -> None:
    ours, theirs = pair(lab, momentum)
    graphed = cgraph.graphed(ours.step, outputs="clone")
    for turn in range(6):
        if turn == 3:
            ours.optimizer.param_groups[0][name] = value
            theirs.optimizer.param_groups[0][name] = value
        x = fresh(lab, 2, 4)
        assert near(graphed(x), theirs.step(x))
        assert near(ours.net.weight, theirs.net.weight)  # type: ignore[arg-type]
    (key,) = graphed.report().keys
    assert [one.argument for one in key.rerecorded] == [f"the setting {name} of an optimizer"]


def test_a_setting_that_changes_after_many_steps_each_time_is_captured_each_time(
    lab: Lab,
) -> None:
    ours, theirs = pair(lab, momentum)
    graphed = cgraph.graphed(ours.step, max_recording=1)
    for rate in (0.1, 0.05, 0.03, 0.01):
        for one in (ours, theirs):
            one.optimizer.param_groups[0]["lr"] = rate
        for _ in range(66):
            x = fresh(lab, 2, 4)
            graphed(x)
            theirs.step(x)
        assert near(ours.net.weight, theirs.net.weight)  # type: ignore[arg-type]
    (key,) = graphed.report().keys
    assert key.state == "captured" and sum(one.count for one in key.rerecorded) == 3


def test_soon_changes_are_not_held_against_those_after_many_steps(lab: Lab) -> None:
    ours, theirs = pair(lab, momentum)
    graphed = cgraph.graphed(ours.step, max_recording=2)
    for rate, steps in ((0.1, 3), (0.05, 3), (0.04, 70), (0.03, 70), (0.02, 70), (0.01, 3)):
        for one in (ours, theirs):
            one.optimizer.param_groups[0]["lr"] = rate
        for _ in range(steps):
            x = fresh(lab, 2, 4)
            graphed(x)
            theirs.step(x)
        assert near(ours.net.weight, theirs.net.weight)  # type: ignore[arg-type]
    assert states(graphed) == ["captured"]


def test_settings_that_are_equal_are_the_same(lab: Lab) -> None:
    ours, theirs = pair(lab, capturable)
    graphed = cgraph.graphed(ours.step)
    for turn in range(8):
        group = ours.optimizer.param_groups[0]
        group["betas"] = tuple([0.9, 0.999])
        group["eps"] = float("1e-8")
        group["lr"] = float("0.1")
        # Which no optimizer reads.
        group["kept"] = int("1000"), "".join(["a", "b"])
        group["rate"] = np.float64(0.5)
        x = fresh(lab, 2, 4)
        assert near(graphed(x), theirs.step(x))
        assert turn == 0 or states(graphed) == ["captured"]
    (key,) = graphed.report().keys
    assert not key.rerecorded


def test_the_setting_that_has_changed_is_named_among_equal_ones(lab: Lab) -> None:
    ours, _ = pair(lab, momentum)
    graphed = cgraph.graphed(ours.step)
    for turn in range(4):
        group = ours.optimizer.param_groups[0]
        group["lr"] = float("0.1")
        if turn == 2:
            group["dampening"] = 0.5
        if turn == 3:
            group["more"] = None
        graphed(fresh(lab, 2, 4))
    (key,) = graphed.report().keys
    named = [one.argument for one in key.rerecorded]
    assert named == [f"the setting {name} of an optimizer" for name in ("dampening", "more")]


def test_a_frozen_step_refuses_another_learning_rate(lab: Lab) -> None:
    ours, _ = pair(lab, momentum)
    graphed = cgraph.graphed(ours.step)
    # The first one makes the momentum.
    for _ in range(2):
        graphed(fresh(lab, 2, 4))
    graphed.freeze()
    graphed(fresh(lab, 2, 4))
    ours.optimizer.param_groups[0]["lr"] = 0.01
    with pytest.raises(StateError, match="the setting lr of an optimizer is another one"):
        graphed(fresh(lab, 2, 4))
    ours.optimizer.param_groups[0]["lr"] = 0.1
    graphed(fresh(lab, 2, 4))


def test_a_group_that_is_added_between_steps_is_trained(lab: Lab) -> None:
    ours, theirs = pair(lab, momentum)
    graphed = cgraph.graphed(ours.step, outputs="clone")
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
