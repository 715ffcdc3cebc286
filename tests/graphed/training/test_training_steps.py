"""Training steps in graphed functions: optimizers, gradients and leaves that they write."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer
from torch.testing import assert_close

import cgraph
from cgraph._torch import modules
from graphed_calls import near, states
from lab import Lab, SimLab, fresh

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1, capturable=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.1, capturable=True),
}


def linear(lab: Lab) -> nn.Linear:
    return nn.Linear(3, 2).to(lab.device)


def training(module: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = module(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def test_steps_are_seen_by_hooks_of_torchs_where_its_list_of_them_is_gone(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = linear(lab)
    other = copy.deepcopy(module)
    graphed = cgraph.graphed(training(module, OPTIMIZERS["momentum"](module.parameters())))
    eager = training(other, OPTIMIZERS["momentum"](other.parameters()))
    # Warnings of cgraph; torch's own code uses its own.
    hidden = SimpleNamespace(
        register_optimizer_step_pre_hook=torch_optimizer.register_optimizer_step_pre_hook
    )
    monkeypatch.setattr(modules, "torch_optimizer", hidden)
    for _ in range(4):
        x = fresh(lab, 4, 3)
        expected = eager(x)
        assert near(graphed(x), expected)
        assert near(module.weight, other.weight)
    assert not torch_optimizer._global_optimizer_pre_hooks


# torch 2.8 warns about its own LBFGS.
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
def test_an_optimizer_that_cannot_be_captured_keeps_its_history(lab: Lab) -> None:
    def stepping() -> tuple[Tensor, torch.optim.Optimizer, Callable[[Tensor], Tensor]]:
        weight = nn.Parameter(torch.tensor([3.0, -2.0, 1.0], device=lab.device))
        optimizer = torch.optim.LBFGS([weight], lr=0.1, max_iter=2)

        def step(x: Tensor) -> Tensor:
            def loss() -> Tensor:
                optimizer.zero_grad()
                value = ((weight * x - 1) ** 4).sum()
                value.backward()
                return value

            optimizer.step(loss)  # type: ignore[arg-type]
            return weight.detach().clone()

        return weight, optimizer, step

    weight, optimizer, step = stepping()
    other, expected, eager = stepping()
    x = torch.tensor([1.0, 2.0, 3.0], device=lab.device)
    step(x), eager(x)
    state = optimizer.state[weight]
    graphed = cgraph.graphed(step)
    with pytest.warns(UserWarning, match="runs eagerly"):
        for _ in range(5):
            assert near(graphed(x), eager(x))
    assert optimizer.state[weight] is state
    assert len(state["old_dirs"]) == len(expected.state[other]["old_dirs"])


def test_a_leaf_that_requires_a_gradient_is_written_as_without_graphs(lab: Lab) -> None:
    def descend(weight: Tensor, gradient: Tensor) -> Tensor:
        with torch.no_grad():
            weight.sub_(gradient)
        return gradient * 2

    graphed, weight = cgraph.graphed(descend), fresh(lab, 3).requires_grad_()
    expected = weight.detach().clone()
    for _ in range(3):
        gradient = fresh(lab, 3)
        expected -= gradient
        assert torch.equal(graphed(weight, gradient), gradient * 2)
        assert torch.equal(weight, expected) and weight.is_leaf and weight.requires_grad
    assert states(graphed) == ["captured"]


@pytest.mark.parametrize("rows", [(8, 5, 5, 8), (4, 7, 3, 8)])
def test_gradients_add_up_over_calls_of_several_sizes(lab: Lab, rows: tuple[int, ...]) -> None:
    module = linear(lab)
    other = copy.deepcopy(module)
    graphed = cgraph.graphed(module, sizes=[4, 8])
    for count in rows:
        x = fresh(lab, count, 3)
        graphed(x).square().sum().backward()
        other(x).square().sum().backward()
        assert near(module.weight.grad, other.weight.grad)  # type: ignore[arg-type]


def test_gradients_add_up_around_a_dry_run(lab: Lab) -> None:
    module = linear(lab)
    other = copy.deepcopy(module)
    graphed = cgraph.graphed(module)
    for _ in range(3):
        x = fresh(lab, 4, 3)
        cgraph.dry_run(graphed, x)
        graphed(x).square().sum().backward()
        other(x).square().sum().backward()
        assert near(module.weight.grad, other.weight.grad)  # type: ignore[arg-type]


def test_forces_are_padded_in_the_mode_of_the_call(lab: Lab) -> None:
    module = linear(lab)

    def forces(x: Tensor) -> Tensor:
        place = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(module(place).square().sum(), place)
        return -gradient if torch.is_grad_enabled() else gradient

    graphed = cgraph.graphed(forces, sizes=[4])
    for rows in (3, 4, 2):
        x = fresh(lab, rows, 3)
        assert near(graphed(x), forces(x))
    assert states(graphed) == ["captured"]


@pytest.mark.parametrize("is_contiguous", [False, True])
def test_a_function_without_gradients_may_take_some_inside(lab: Lab, is_contiguous: bool) -> None:
    def force(x: Tensor) -> Tensor:
        with torch.enable_grad():
            return torch.autograd.grad((x**2).sum(), x)[0]

    graphed = cgraph.graphed(force)
    for _ in range(3):
        x = fresh(lab, 3, 4) if is_contiguous else fresh(lab, 4, 3).t()
        x = x.detach().requires_grad_()
        with torch.no_grad():
            assert_close(graphed(x), force(x))
    assert states(graphed) == ["captured"]


class Half(nn.Parameter):
    def halved(self) -> Tensor:
        return self * 0.5


class Attributed(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        return x * (weight.halved() if isinstance(weight, Half) else weight * weight.factor)


@pytest.mark.parametrize("kind", [nn.Parameter, Half])
def test_parameters_have_their_class_and_attributes_in_a_capture_with_gradients(
    lab: Lab, kind: type[nn.Parameter]
) -> None:
    parameter: Any = kind(fresh(lab, 3))
    parameter.factor = 3.0
    module = Attributed(parameter)
    graphed = cgraph.graphed(module)
    for _ in range(3):
        x = fresh(lab, 3)
        module.zero_grad()
        result = graphed(x)
        assert_close(result, module(x))
        result.sum().backward()
        assert_close(parameter.grad, x * (0.5 if kind is Half else 3))
    assert states(graphed) == ["captured"]


def test_an_optimizer_that_the_first_call_makes_steps_the_modules_parameters(lab: Lab) -> None:
    module = linear(lab)
    other = copy.deepcopy(module)

    def lazily(module: nn.Module) -> Callable[[Tensor], Tensor]:
        made: list[Callable[[Tensor], Tensor]] = []

        def step(x: Tensor) -> Tensor:
            if not made:
                made.append(training(module, torch.optim.SGD(module.parameters(), lr=0.1)))
            return made[0](x)

        return step

    graphed, eager = cgraph.graphed(lazily(module)), lazily(other)
    for _ in range(4):
        x = fresh(lab, 4, 3)
        assert near(graphed(x), eager(x))
        assert near(module.weight, other.weight)


def test_gradients_of_another_thread_add_up_while_functions_are_captured(sim: SimLab) -> None:
    module, is_over = linear(sim), threading.Event()
    graphed, x = cgraph.graphed(module), fresh(sim, 4, 3)
    graphed(x).sum().backward()
    expected = torch.autograd.grad(module(x).sum(), module.weight)[0] * 3
    wrong: list[bool] = []

    def train() -> None:
        while not is_over.is_set():
            module.zero_grad()
            for _ in range(3):
                graphed(x).sum().backward()
            wrong.append(not near(module.weight.grad, expected))  # type: ignore[arg-type]

    thread = threading.Thread(target=train)
    thread.start()
    try:
        for _ in range(40):
            y = fresh(sim, 3)
            assert torch.equal(cgraph.graphed(lambda x: x * 2, warmup=1)(y), y * 2)
    finally:
        is_over.set()
        thread.join()
    assert wrong and not any(wrong)


def stepping(net: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def test_an_optimizer_with_a_constant_beside_its_states_is_captured(lab: Lab) -> None:
    net = nn.Linear(3, 2).to(lab.device)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    optimizer.state["name"] = "mine"  # type: ignore[index, assignment]

    graphed = cgraph.graphed(stepping(net, optimizer))
    for _ in range(3):
        before, x = copy.deepcopy(net), fresh(lab, 4, 3)
        assert near(graphed(x), before(x).square().mean().detach())
    assert states(graphed) == ["captured"]
    assert optimizer.state["name"] == "mine"  # type: ignore[index]
