"""What is exchanged, added and taken away between calls of a captured step or function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import cgraph
from lab import Lab, fresh

Make = Callable[[Callable[..., Any]], Callable[..., Any]]


def network(lab: Lab) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(lab.device)


def inputs(lab: Lab, count: int) -> list[Tensor]:
    torch.manual_seed(8)
    return [fresh(lab, 5, 3) for _ in range(count)]


def trained(
    lab: Lab,
    make: Make,
    step: Callable[[Tensor], Tensor],
    module: nn.Module,
    between: dict[int, Callable[[], object]],
) -> list[Tensor]:
    """What steps return, with something done before some of them; then the parameters."""
    made, found = make(step), []
    for call, x in enumerate(inputs(lab, 7)):
        between.get(call, lambda: None)()
        found.append(made(x).clone())
    return [*found, *(one.detach() for one in module.parameters())]


def eager(step: Callable[..., Any]) -> Callable[..., Any]:
    return step


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("when", [1, 3])
def test_parameters_of_a_group_that_an_optimizer_gets_are_trained(
    lab: Lab, momentum: float, when: int
) -> None:
    def train(make: Make) -> list[Tensor]:
        module = network(lab)
        optimizer = torch.optim.SGD(module[0].parameters(), 0.1, momentum=momentum)

        def step(x: Tensor) -> Tensor:
            module.zero_grad()
            loss = module(x).square().sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        group = {"params": [*module[2].parameters()], "lr": 0.05}
        between = {when: lambda: optimizer.add_param_group(group)}
        return trained(lab, make, step, module, between)

    assert_close(train(cgraph.graphed), train(eager))


@pytest.mark.parametrize("kind", ["pre", "post"])
def test_hooks_of_an_optimizer_come_and_go(lab: Lab, kind: str) -> None:
    def train(make: Make) -> list[Tensor]:
        module = network(lab)
        optimizer = torch.optim.SGD(module.parameters(), 0.1)

        def halve(optimizer: torch.optim.Optimizer, *_: object) -> None:
            with torch.no_grad():
                for one in optimizer.param_groups[0]["params"]:
                    (one.grad if kind == "pre" else one).mul_(0.5)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = module(x).square().sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        handles: list[Any] = []
        register = getattr(optimizer, f"register_step_{kind}_hook")
        between: dict[int, Callable[[], object]] = {
            2: lambda: handles.append(register(halve)),
            5: lambda: handles[0].remove(),
        }
        return trained(lab, make, step, module, between)

    assert_close(train(cgraph.graphed), train(eager))


def scaled(by: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: x * by


def test_a_module_that_another_function_names_is_used_from_then_on(lab: Lab) -> None:
    modules = [nn.Linear(3, 3).to(lab.device) for _ in range(2)]

    def through(module: nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda x: module(x)

    call = through(modules[0])
    graphed = cgraph.graphed(lambda x: call(x) * 2)
    for place in (0, 0, 1, 1, 0):
        call = through(modules[place])
        with torch.no_grad():
            x = fresh(lab, 2, 3)
            assert_close(graphed(x), modules[place](x) * 2)


def test_all_ways_to_a_tensor_through_functions_are_followed(lab: Lab) -> None:
    first, second = fresh(lab, 3), fresh(lab, 3)

    def both(one: Callable[..., Tensor], other: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x: one(x) + other(x)

    a = b = scaled(first)
    twice = cgraph.graphed(lambda x: a(x) - b(x) * 2)
    named = cgraph.graphed(lambda x: first.sum() + c(x))
    c = scaled(first)
    nested = cgraph.graphed(lambda x: both(d, e)(x) + d(x) * 2)
    d = scaled(first)
    e = both(d, d)
    for call in range(6):
        if call == 2:
            b = c = scaled(second)
            e = both(scaled(second), d)
        x = fresh(lab, 3)
        assert_close(twice(x), a(x) - b(x) * 2)
        assert_close(named(x), first.sum() + c(x))
        assert_close(nested(x), both(d, e)(x) + d(x) * 2)
