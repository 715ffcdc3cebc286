"""Other reads of a training function than its arguments, and changes of them between calls."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from lab import Lab, fresh


def are_alike(one: nn.Module, other: nn.Module) -> bool:
    """Return whether parameters and gradients of two modules are alike."""

    def near(a: Tensor | None, b: Tensor | None) -> bool:
        return a is b if a is None or b is None else torch.allclose(a, b, rtol=1e-4, atol=1e-6)

    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(near(a, b) and near(a.grad, b.grad) for a, b in pairs)


def twins(lab: Lab, net: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Return a module, and a copy of it."""
    net = net.to(lab.device)
    return net, copy.deepcopy(net)


class Tasks(nn.Module):
    """A module with one body and two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 6)
        self.heads = nn.ModuleList(nn.Linear(6, 3) for _ in range(2))


def test_tasks_that_take_turns_clear_the_gradients_of_one_another(lab: Lab) -> None:
    mine, other = twins(lab, Tasks())

    def make(net: Any, is_graphed: bool) -> tuple[torch.optim.Optimizer, list[Any]]:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def of(head: nn.Module) -> Any:
            def task(x: Tensor) -> None:
                optimizer.zero_grad()
                head(net.body(x)).square().mean().backward()

            return cgraph.graphed(task) if is_graphed else task

        return optimizer, [of(head) for head in net.heads]

    (first, graphed), (second, eager) = make(mine, True), make(other, False)
    for turn in range(8):
        x = fresh(lab, 4, 6)
        graphed[turn % 2](x)
        eager[turn % 2](x)
        assert are_alike(mine, other)
        first.step()
        second.step()
    assert all(task.report().keys[-1].replays >= 3 for task in graphed)


class Stack:
    """A module with modules in a Python container."""

    def __init__(self, lab: Lab, kind: str) -> None:
        self.lab, self.kind = lab, kind
        self.layers: Any = None
        self.renew()

    def made(self) -> nn.Module:
        """Make another layer."""
        return nn.Linear(3, 3).to(self.lab.device)

    def renew(self) -> None:
        """Give it another container with other layers."""
        made = self.made(), self.made()
        self.layers = {"list": list, "tuple": tuple}.get(self.kind, lambda x: dict(enumerate(x)))(
            made
        )

    def exchange(self) -> None:
        """Give it another first layer."""
        if self.kind == "tuple":
            self.renew()
        else:
            self.layers[0] = self.made()

    def __call__(self, x: Tensor) -> Tensor:
        """Run both layers."""
        return self.layers[1](self.layers[0](x))


@pytest.mark.parametrize("kind", ["list", "tuple", "dict"])
def test_modules_in_containers_that_are_exchanged_are_those_of_the_call(
    lab: Lab, kind: str
) -> None:
    stack = Stack(lab, kind)
    graphed = cgraph.graphed(stack.__call__)
    for change in (lambda: None, stack.renew, lambda: None, stack.exchange, lambda: None):
        change()
        x = fresh(lab, 4, 3)
        result = graphed(x)
        assert torch.allclose(result, stack(x), atol=1e-6)
        result.square().sum().backward()
        for place in (0, 1):
            weight = stack.layers[place].weight
            (expected,) = torch.autograd.grad(stack(x).square().sum(), [weight])
            assert torch.allclose(weight.grad, expected, rtol=1e-4, atol=1e-5)
            stack.layers[place].zero_grad()
    (key,) = graphed.report().keys
    assert key.state == "captured"


@pytest.mark.parametrize("change", ["longer", "shorter", "last"])
def test_parameters_of_a_group_that_come_and_go_are_those_of_the_call(
    lab: Lab, change: str
) -> None:
    mine, other = twins(lab, nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)]))

    def make(net: Any) -> tuple[torch.optim.Optimizer, Callable[[Tensor], None]]:
        first, second = net
        more = () if change == "longer" else second.parameters()
        optimizer = torch.optim.SGD([*first.parameters(), *more], lr=0.1)

        def step(x: Tensor) -> None:
            net.zero_grad()
            (first(x) + second(x)).square().mean().backward()
            optimizer.step()

        return optimizer, step

    (optimizer, step), (others, eager) = make(mine), make(other)
    graphed = cgraph.graphed(step)
    for call in range(5):
        if call == 2:
            for one, net in ((optimizer, mine), (others, other)):
                group = one.param_groups[0]["params"]
                if change == "longer":
                    group.extend(net[1].parameters())
                elif change == "shorter":
                    del group[2:]
                else:
                    group[-1] = nn.Parameter(torch.ones(2, device=lab.device))
        x = fresh(lab, 4, 3)
        graphed(x)
        eager(x)
        assert are_alike(mine, other)
