"""What is exchanged, added and taken away between calls of a captured step or function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import cgraph
from graphed_calls import numbers
from lab import Lab, fresh

Make = Callable[[Callable[..., Any]], Callable[..., Any]]


def network(lab: Lab) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(lab.device)


def inputs(lab: Lab, count: int) -> list[Tensor]:
    torch.manual_seed(8)
    return [fresh(lab, 5, 3) for _ in range(count)]


def tripled(leaf: Tensor) -> None:
    assert leaf.grad is not None
    leaf.grad.mul_(3)


def cleared_one_by_one(module: nn.Module) -> None:
    for one in module.parameters():
        one.grad = None


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


CLEARED: dict[str, Callable[[nn.Module, torch.optim.Optimizer], None]] = {
    "optimizer": lambda _, optimizer: optimizer.zero_grad(),
    "module": lambda module, _: module.zero_grad(),
    "attribute": lambda module, _: cleared_one_by_one(module),
}
HOOKS: dict[str, Callable[[Tensor], Any]] = {
    "hook": lambda leaf: leaf.register_hook(lambda grad: grad * 3),
    "after": lambda leaf: leaf.register_post_accumulate_grad_hook(tripled),
}


@pytest.mark.parametrize("cleared", CLEARED)
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_of_parameters_come_and_go_where_the_step_clears_gradients_last(
    lab: Lab, kind: str, cleared: str
) -> None:
    def train(make: Make) -> list[Tensor]:
        module = network(lab)
        optimizer = torch.optim.SGD(module.parameters(), 0.1)

        def step(x: Tensor) -> Tensor:
            loss = module(x).square().sum()
            loss.backward()
            given = module[0].weight.grad.clone()
            optimizer.step()
            CLEARED[cleared](module, optimizer)
            return given

        handles: list[Any] = []
        between: dict[int, Callable[[], object]] = {
            3: lambda: handles.append(HOOKS[kind](module[0].weight)),
            5: lambda: handles[0].remove(),
        }
        return trained(lab, make, step, module, between)

    assert_close(train(cgraph.graphed), train(eager))


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


class Holding:
    def __init__(self, by: Tensor) -> None:
        self.by = by

    def scale(self, x: Tensor) -> Tensor:
        return x * self.by


holders: dict[int, Holding] = {}


def holding(by: Tensor) -> Holding:
    return holders.setdefault(id(by), Holding(by))


def recursive(by: Tensor) -> Callable[..., Tensor]:
    def once(x: Tensor, count: int = 1) -> Tensor:
        return other(x, count - 1) if count else x * by

    def other(x: Tensor, count: int) -> Tensor:
        return once(x, count)

    return once


def applied(x: Tensor) -> Tensor:
    return helper(x) + 1


helper: Callable[[Tensor], Tensor]


@pytest.mark.parametrize("make", [scaled, lambda by: functools.partial(torch.mul, by)])
def test_a_function_that_a_variable_gets_is_called_from_then_on(
    lab: Lab, make: Callable[[Tensor], Callable[[Tensor], Tensor]]
) -> None:
    global helper
    first, second = fresh(lab, 3), fresh(lab, 3)
    closed = helper = make(first)
    of_closure = cgraph.graphed(lambda x: closed(x) + 1)
    of_module = cgraph.graphed(applied)
    holder: dict[str, Any] = {}

    class Model:
        def __init__(self) -> None:
            self.act = make(first)

        def run(self, x: Tensor) -> Tensor:
            return self.act(x) + 1

    model = Model()
    of_object = cgraph.graphed(model.run)
    for by in (first, first, second, second, first):
        if by is not holder.get("by"):
            closed = helper = model.act = make(by)
        holder["by"] = by
        for _ in range(2):
            x = fresh(lab, 3)
            for graphed in (of_closure, of_module, of_object):
                assert_close(graphed(x), x * by + 1)
    for graphed in (of_closure, of_module, of_object):
        captured, replays, eager = numbers(graphed)
        assert (captured, eager) == (1, 0)
        assert replays == 10


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


@pytest.mark.parametrize(
    "make",
    [
        scaled,
        lambda by: functools.partial(torch.mul, by),
        lambda by: lambda x, y=by: x * y,
        lambda by: holding(by).scale,
        lambda by: recursive(by),
    ],
)
def test_a_function_that_is_made_anew_for_each_call_is_the_same(
    lab: Lab, make: Callable[[Tensor], Callable[[Tensor], Tensor]]
) -> None:
    global helper
    by = fresh(lab, 3)
    graphed = cgraph.graphed(applied)
    for _ in range(20):
        helper = make(by)
        x = fresh(lab, 3)
        assert_close(graphed(x), x * by + 1)
    assert numbers(graphed) == (1, 20, 0)
    by = fresh(lab, 3)
    for _ in range(3):
        helper = make(by)
        x = fresh(lab, 3)
        assert_close(graphed(x), x * by + 1)
    assert numbers(graphed) == (1, 23, 0)


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


def test_hooks_of_leaves_that_get_no_gradient_in_the_step_are_nobodys_concern(lab: Lab) -> None:
    one, other = network(lab), network(lab)
    optimizer = torch.optim.SGD(one.parameters(), 0.1)

    def step(x: Tensor) -> Tensor:
        assert other is not one
        optimizer.zero_grad()
        loss = one(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    graphed = cgraph.graphed(step)
    handle = None
    for x in inputs(lab, 12):
        if handle is not None:
            handle.remove()
        handle = other[0].weight.register_hook(lambda grad: grad * 2)
        graphed(x)
    captured, replays, eager = numbers(graphed)
    assert (captured, replays, eager) == (1, 12, 0)


def test_gradients_that_are_there_before_a_step_that_clears_them_last_are_added_to(
    lab: Lab,
) -> None:
    def train(make: Make) -> list[Tensor]:
        module = network(lab)
        optimizer = torch.optim.SGD(module.parameters(), 0.1)

        def step(x: Tensor) -> Tensor:
            loss = module(x).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        other = fresh(lab, 5, 3)
        return trained(lab, make, step, module, {3: lambda: module(other).sum().backward()})

    right = train(eager)
    with pytest.warns(UserWarning, match="takes it away"):
        assert_close(train(cgraph.graphed), right)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("part", ["", "0"])
def test_hooks_and_parts_of_modules_behind_objects_come_and_go(
    lab: Lab, depth: int, part: str
) -> None:
    module = nn.Sequential(nn.Linear(3, 3)).to(lab.device)
    holder: Any = SimpleNamespace(module=module)
    holder = SimpleNamespace(inner=holder) if depth == 2 else holder

    def function(x: Tensor) -> Tensor:
        found: Any = holder.inner if depth == 2 else holder
        result: Tensor = found.module(x)
        return result

    graphed = cgraph.graphed(function)
    with torch.no_grad():
        for call, x in enumerate(inputs(lab, 9)):
            if call == 2:
                hook = module.get_submodule(part).register_forward_hook(lambda *args: args[2] * 3)
            if call == 4:
                hook.remove()
            if call == 6:
                module.append(nn.Tanh())
            assert_close(graphed(x), function(x))
    assert numbers(graphed) == (1, 9, 0)


def test_a_tensor_that_a_function_has_as_its_attribute_is_followed(lab: Lab) -> None:
    def outer(x: Tensor) -> Tensor:
        by: Tensor = outer.by  # type: ignore[attr-defined]
        return x * by

    outer.by = fresh(lab, 3)  # type: ignore[attr-defined]
    graphed = cgraph.graphed(lambda x: outer(x) + 1)
    for call in range(5):
        if call == 2:
            outer.by = fresh(lab, 3)  # type: ignore[attr-defined]
        x = fresh(lab, 3)
        assert_close(graphed(x), outer(x) + 1)
