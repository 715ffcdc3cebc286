"""State that functions keep between calls: attributes, gradients, optimizers and scalers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from graphed_calls import near, states
from lab import Lab, fresh

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "once": {"warmup": 1},
    "never": {},
    "unmeasured": {},
    "bare": {},
}
each_way = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
ignored = pytest.mark.filterwarnings("ignore:.*runs eagerly")


class Running(nn.Module):
    """A module that assigns a new tensor to a buffer in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        self.mean = self.mean * 0.9 + y.detach().mean(0)
        return y + self.mean


class Table(nn.Module):
    """A module that makes a table that grows with the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or len(self.table) < len(x):
            self.table = torch.arange(1.0, len(x) + 1, device=x.device)[:, None]
        return self.inner(x) * self.table[: len(x)]


def both(lab: Lab, net: nn.Module) -> tuple[Any, Any]:
    net = net.to(lab.device)
    return net, copy.deepcopy(net)


@ignored
@each_way
def test_a_buffer_that_each_call_assigns_is_as_in_eager(lab: Lab, options: dict[str, Any]) -> None:
    net, eager = both(lab, Running())
    graphed = cgraph.graphed(net, **options)
    for _ in range(4):
        x = fresh(lab, 2, 3)
        assert near(graphed(x), eager(x)) and near(net.mean, eager.mean)


@ignored
@each_way
@pytest.mark.parametrize("grad", [False, True])
def test_a_table_that_grows_is_followed(lab: Lab, options: dict[str, Any], grad: bool) -> None:
    net, eager = both(lab, Table())
    graphed = cgraph.graphed(net, **options)
    with torch.set_grad_enabled(grad):
        for rows in (2, 3, 2, 5, 3, 2):
            x = fresh(lab, rows, 3)
            assert near(graphed(x), eager(x))


Step = Callable[[Tensor], Tensor]


def step_of(net: nn.Module, optimizer: torch.optim.Optimizer, *, clears_last: bool) -> Step:
    def step(x: Tensor) -> Tensor:
        if not clears_last:
            optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        if clears_last:
            optimizer.zero_grad()
        return loss.detach()

    return step


def pair(lab: Lab, **options: Any) -> list[tuple[nn.Module, torch.optim.Optimizer]]:
    nets = both(lab, nn.Linear(3, 2))
    return [(net, torch.optim.SGD(net.parameters(), lr=0.1, **options)) for net in nets]


@ignored
@each_way
def test_a_step_that_clears_gradients_last_adds_to_one_that_was_there(
    lab: Lab, options: dict[str, Any]
) -> None:
    (net, ours), (eager, theirs) = pair(lab)
    for one in (net, eager):
        one(torch.ones(1, 3, device=lab.device)).sum().backward()
    graphed = cgraph.graphed(step_of(net, ours, clears_last=True), **options)
    right = step_of(eager, theirs, clears_last=True)
    for _ in range(4):
        x = fresh(lab, 2, 3)
        assert near(graphed(x), right(x)) and near(net.weight, eager.weight)
        assert (net.weight.grad is None) == (eager.weight.grad is None)


@ignored
def test_a_step_that_returns_its_loss_as_it_is_is_captured(lab: Lab) -> None:
    ((net, optimizer), (eager, theirs)) = pair(lab)

    def step(one: nn.Module, stepped: torch.optim.Optimizer, x: Tensor) -> Tensor:
        stepped.zero_grad()
        loss = one(x).square().mean()
        loss.backward()
        stepped.step()
        return loss

    graphed = cgraph.graphed(lambda x: step(net, optimizer, x))
    for _ in range(3):
        x = fresh(lab, 2, 3)
        assert near(graphed(x), step(eager, theirs, x)) and near(net.weight, eager.weight)
    assert states(graphed) == ["captured"]


@ignored
@each_way
def test_the_state_of_an_optimizer_may_be_loaded_between_steps(
    lab: Lab, options: dict[str, Any]
) -> None:
    (net, ours), (eager, theirs) = pair(lab, momentum=0.9)
    graphed = cgraph.graphed(step_of(net, ours, clears_last=False), **options)
    right = step_of(eager, theirs, clears_last=False)
    for call in range(9):
        x = fresh(lab, 2, 3)
        for one in (ours, theirs):
            if call == 3:
                one.load_state_dict(copy.deepcopy(one.state_dict()))
            elif call == 5:
                for state in one.state.values():
                    state.update({name: value * 0 for name, value in state.items()})
            elif call == 7:
                one.state.clear()
        assert near(graphed(x), right(x)) and near(net.weight, eager.weight)


@ignored
@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "bare"])
def test_a_step_alone_reads_the_gradients_of_each_call(lab: Lab, name: str) -> None:
    (net, ours), (eager, theirs) = pair(lab)
    graphed = cgraph.graphed(lambda: ours.step(), **OPTIONS[name])
    for _ in range(5):
        x = fresh(lab, 2, 3)
        for one in (net, eager):
            one.zero_grad()
            one(x).square().sum().backward()
        graphed()
        theirs.step()
        assert near(net.weight, eager.weight)


@pytest.mark.parametrize("name", ["default", "once", "unmeasured"])
@pytest.mark.parametrize("was_used", [False, True])
@pytest.mark.parametrize("is_inside", [False, True])
def test_a_loss_that_a_scaler_scales_inside_is_captured(
    lab: Lab, name: str, was_used: bool, is_inside: bool
) -> None:
    pairs = pair(lab)
    scalers = [torch.amp.GradScaler(lab.device, init_scale=8.0) for _ in pairs]
    if was_used:
        for scaler in scalers:
            scaler.scale(fresh(lab, 1))

    def scaled(place: int) -> Callable[[Tensor], Tensor]:
        (net, optimizer), scaler = pairs[place], scalers[place]

        def function(x: Tensor) -> Tensor:
            if is_inside:
                optimizer.zero_grad()
            loss = scaler.scale(net(x).square().sum())
            if not is_inside:
                return loss
            loss.backward()
            return loss.detach()

        return function

    graphed = cgraph.graphed(scaled(0), **OPTIONS[name])
    for _ in range(4):
        x = fresh(lab, 2, 3)
        for place, call in enumerate((graphed, scaled(1))):
            (_, optimizer), scaler = pairs[place], scalers[place]
            result = call(x)
            if not is_inside:
                optimizer.zero_grad()
                result.backward()
            scaler.step(optimizer)
            scaler.update()
        assert near(pairs[0][0].weight, pairs[1][0].weight)
        assert scalers[0].get_scale() == scalers[1].get_scale()
    assert states(graphed) == ["captured"]


@ignored
@each_way
@pytest.mark.parametrize("was_used", [False, True])
def test_a_step_with_a_scaler_is_that_of_eager(
    lab: Lab, options: dict[str, Any], was_used: bool
) -> None:
    pairs = pair(lab)
    scalers = [torch.amp.GradScaler(lab.device, init_scale=8.0) for _ in pairs]

    def step(place: int, x: Tensor) -> Tensor:
        (net, optimizer), scaler = pairs[place], scalers[place]
        optimizer.zero_grad()
        loss = net(x).square().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    if was_used:
        x = fresh(lab, 2, 3)
        step(0, x), step(1, x)
    graphed = cgraph.graphed(lambda x: step(0, x), **options)
    for _ in range(4):
        x = fresh(lab, 2, 3)
        assert near(graphed(x), step(1, x))
        assert near(pairs[0][0].weight, pairs[1][0].weight)
        assert scalers[0].get_scale() == scalers[1].get_scale()
