"""Exchanges by a function or between its calls: modules, generators, frames, flags."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import cgraph
from lab import Lab, fresh

# Some of these functions run eagerly, and warn.
pytestmark = pytest.mark.filterwarnings("ignore:.*runs eagerly")


def test_a_generator_that_is_exchanged_is_drawn_from(lab: Lab) -> None:
    host = types.SimpleNamespace(by=torch.Generator(lab.device).manual_seed(3))

    def function(x: Tensor) -> Tensor:
        return x + torch.rand(3, device=lab.device, generator=host.by)

    graphed = cgraph.graphed(function)
    for seed in (4, 5):
        host.by = torch.Generator(lab.device).manual_seed(seed)
        same = torch.Generator(lab.device).manual_seed(seed)
        for _ in range(3):
            x = fresh(lab, 3)
            expected = x + torch.rand(3, device=lab.device, generator=same)
            torch.testing.assert_close(graphed(x), expected)


def test_a_window_of_frames_is_followed(lab: Lab) -> None:
    frames = deque([fresh(lab, 3) for _ in range(3)], maxlen=3)
    kept: list[Tensor] = []
    graphed = cgraph.graphed(lambda x: x + torch.stack([*frames]).sum(0))
    for _ in range(8):
        x = fresh(lab, 3)
        torch.testing.assert_close(graphed(x), x + torch.stack([*frames]).sum(0))
        kept.append(frames[0])
        frames.append(fresh(lab, 3))


def test_frames_that_a_function_turns_are_turned_in_each_call(lab: Lab) -> None:
    frames = deque([fresh(lab, 3) for _ in range(3)])
    expected = [*frames]

    def function(x: Tensor) -> Tensor:
        frames.rotate()
        return x + frames[0]

    graphed = cgraph.graphed(function)
    for number in range(5):
        x = fresh(lab, 3)
        torch.testing.assert_close(graphed(x), x + expected[-1 - number % 3])


@pytest.mark.parametrize("grad", [False, True])
def test_attributes_of_a_weight_are_those_of_eager(lab: Lab, grad: bool) -> None:
    net: Any = nn.Linear(3, 3, device=lab.device)
    net.weight.steps, net.weight.scale = 0, fresh(lab, 1)
    kept = []

    def counted(x: Tensor) -> Tensor:
        net.weight.steps += 1
        return net(x) * net.weight.steps  # type: ignore[no-any-return]

    graphed, scaled = cgraph.graphed(counted), cgraph.graphed(lambda x: net(x) * net.weight.scale)
    with torch.set_grad_enabled(grad):
        for number in range(1, 5):
            x = fresh(lab, 2, 3)
            torch.testing.assert_close(graphed(x), net(x) * number)
            assert net.weight.steps == number
            kept.append(net.weight.scale)
            torch.testing.assert_close(scaled(x), net(x) * net.weight.scale)
            net.weight.scale = fresh(lab, 1)


def test_a_result_whose_gradient_is_to_be_kept_keeps_it(lab: Lab) -> None:
    net = nn.Linear(3, 3, device=lab.device)

    def function(x: Tensor) -> Tensor:
        y = net(x)
        y.retain_grad()
        return y  # type: ignore[no-any-return]

    graphed = cgraph.graphed(function)
    for _ in range(3):
        y = graphed(fresh(lab, 2, 3))
        (y * 3).sum().backward()
        assert torch.equal(y.grad, torch.full_like(y, 3))


@pytest.mark.parametrize("where", ["module", "method", "argument"])
def test_a_buffer_that_gets_other_memory_gets_it_once_a_call(lab: Lab, where: str) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(3, device=lab.device))

        def forward(self, x: Tensor) -> Tensor:
            self.count.data = self.count.data + 1
            return x * self.count

    net = Counting()
    functions: dict[str, Any] = {"module": net, "method": net.forward}
    graphed = cgraph.graphed(functions.get(where, lambda x, net: net(x)))
    given = (net,) if where == "argument" else ()
    with torch.no_grad():
        for number in range(1, 5):
            x = fresh(lab, 3)
            torch.testing.assert_close(graphed(x, *given), x * number)


def test_hooks_of_a_parameter_that_a_call_does_not_use_are_not_called(lab: Lab) -> None:
    net: Any = nn.Module()
    net.used, net.unused = nn.Linear(3, 3, device=lab.device), nn.Linear(3, 3, device=lab.device)
    heard: list[str] = []
    for name, one in net.named_parameters():
        one.register_hook(lambda grad, name=name: heard.append(name) or grad * 2)
        one.register_post_accumulate_grad_hook(lambda one, name=name: heard.append(f"{name} after"))

    graphed = cgraph.graphed(lambda x: net.used(x) * 3)
    x = fresh(lab, 2, 3)
    graphed(x)
    heard.clear()
    graphed(x).sum().backward()
    assert sorted(heard) == ["used.bias", "used.bias after", "used.weight", "used.weight after"]
    assert net.unused.weight.grad is None
    expected = 2 * 3 * x.sum(0).expand(3, 3)
    torch.testing.assert_close(net.used.weight.grad, expected)


@pytest.mark.parametrize("warmup", [1, 3])
@pytest.mark.parametrize("grad", [False, True])
def test_a_state_in_a_dictionary_that_begins_empty_is_that_of_eager(
    lab: Lab, grad: bool, warmup: int
) -> None:
    kept: dict[str, Tensor] = {}
    net = nn.Linear(3, 3, device=lab.device)

    def function(x: Tensor) -> Tensor:
        kept["sum"] = kept.get("sum", 0) + x.detach()
        return net(x) + kept["sum"]  # type: ignore[no-any-return]

    graphed, total = cgraph.graphed(function, warmup=warmup), torch.zeros(3, device=lab.device)
    with torch.set_grad_enabled(grad):
        for _ in range(4):
            x = fresh(lab, 3)
            total = total + x
            torch.testing.assert_close(graphed(x), net(x) + total)


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
    """Return the results of steps, with a change before some of them; then the parameters."""
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
