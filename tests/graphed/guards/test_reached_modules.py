"""Modules and tensors that a graphed function reaches, wherever it finds them."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from graphed_calls import Case, Table, agree, alike_after, exchanges, sets, states, twins_agree
from lab import Lab, fresh

Function = Callable[[Tensor], Any]
HELD: Any = None
MODULES = Table()


def named(x: Tensor) -> Tensor:
    return HELD(x)  # type: ignore[no-any-return]


class Calls:
    def __init__(self, held: Any) -> None:
        self.held = held

    def __call__(self, x: Tensor) -> Any:
        return self.held(x)


def in_graphed_function(held: Any) -> Function:
    inner = cgraph.graphed(lambda x: held(x))
    return lambda x: inner(x) + 0


class Named:
    def __call__(self, x: Tensor) -> Any:
        return HELD(x)


# Functions that call what they are given, or the same global.
NAMING: dict[str, Callable[[Any], Function]] = {
    "a global": lambda held: named,
    "a global of a function that it calls": lambda held: lambda x: named(x),
    "a global of an inner function": lambda held: lambda x: (lambda y: HELD(y))(x),
    "a global of the call of an object": lambda held: Named(),
}
PLACES: dict[str, Callable[[Any], Function]] = {
    **NAMING,
    "the closure of an inner function": lambda held: lambda x: (lambda y: held(y))(x),
    "a default": lambda held: lambda x, part=held: part(x),
    "a default of a keyword": lambda held: lambda x, *, part=held: part(x),
    "an argument of a partial call": lambda held: partial(lambda part, x: part(x), held),
    "a keyword of a partial call": lambda held: partial(lambda x, part: part(x), part=held),
    "another graphed function": in_graphed_function,
    "an object that is called": Calls,
}


class Switch(nn.Module):
    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.scale = nn.Parameter(scale)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale if self.training else x - self.scale


@pytest.mark.parametrize("place", PLACES)
def test_a_module_is_followed_that_is_found_in(
    lab: Lab, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Switch(fresh(lab, 3))
    monkeypatch.setitem(globals(), "HELD", module)
    changes = [*sets(module, "scale", nn.Parameter(fresh(lab, 3))), module.eval, module.train]
    assert states(alike_after(lab, PLACES[place](module), *changes)) == ["captured", "captured"]


@pytest.mark.parametrize("place", PLACES)
def test_a_tensor_that_moves_is_followed_that_is_found_in(
    lab: Lab, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale = fresh(lab, 3)
    # Called as `held(x)`, which multiplies.
    held = partial(torch.mul, scale)
    monkeypatch.setitem(globals(), "HELD", held)
    graphed = alike_after(lab, PLACES[place](held), *sets(scale, "data", fresh(lab, 3)), grad=True)
    assert states(graphed) == ["captured"]


@pytest.mark.parametrize("place", NAMING)
def test_a_module_is_noticed_that_is_exchanged_in(
    lab: Lab, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "HELD", Switch(fresh(lab, 3)))
    alike_after(lab, NAMING[place](None), *sets(globals(), "HELD", Switch(fresh(lab, 3))), calls=1)


class Holder:
    net: nn.Module

    @cgraph.graphed
    def run(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]


def through(module: nn.Module) -> Function:
    return lambda x: module(x)


@MODULES
def a_list(lab: Lab) -> Case:
    layers = [linear(lab), linear(lab)]

    def run(x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x)
        return x

    return Case(run, sets(layers, 1, linear(lab), linear(lab)))


@MODULES
def an_object(lab: Lab) -> Case:
    holder = Holder()
    holder.net = linear(lab)
    return Case(holder.run, sets(holder, "net", linear(lab), linear(lab)))


@MODULES
def a_closure(lab: Lab) -> Case:
    run = through(linear(lab))
    (cell,) = run.__closure__ or ()
    return Case(run, sets(cell, "cell_contents", linear(lab), linear(lab)))


@MODULES
def the_closure_of_another_function(lab: Lab) -> Case:
    one, other = through(linear(lab)), through(linear(lab))
    call = one

    def choose(which: Function) -> None:
        nonlocal call
        call = which

    changes = [partial(choose, which) for which in (one, other, other, one)]
    return Case(lambda x: call(x) * 2, changes)


def linear(lab: Lab) -> nn.Module:
    return nn.Linear(3, 3).to(lab.device)


@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("place", MODULES)
def test_another_module_is_used_once_it_is_in(lab: Lab, place: str, calls: int) -> None:
    twins_agree(lab, MODULES[place], grad=False, calls=calls)


class Counter:
    def __init__(self) -> None:
        self.count: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.count is None:
            self.count = torch.zeros_like(x)
        self.count += x
        return self.count.clone()

    def method(self, x: Tensor) -> Tensor:
        return self(x)


@pytest.mark.parametrize(
    "form", [lambda one: one, lambda one: one.method, lambda one: partial(one.method)]
)
def test_what_the_first_call_makes_in_the_functions_object_has_no_trace_of_the_warm_up(
    lab: Lab, form: Callable[[Counter], Function]
) -> None:
    graphed = twins_agree(lab, lambda lab: Case(form(Counter())), calls=4)
    assert states(graphed) == ["captured"]


@pytest.mark.parametrize("grad", [False, True])
def test_padded_calls_follow_tensors_as_others_do(lab: Lab, grad: bool) -> None:
    def scaled(lab: Lab) -> Case:
        scale, rows = fresh(lab, 1), itertools.cycle((3, 4, 3))

        def exchange() -> None:
            nonlocal scale
            scale = fresh(lab, 1)

        def move() -> None:
            scale.data = fresh(lab, 1)

        def inputs() -> tuple[Tensor]:
            return (fresh(lab, next(rows)).requires_grad_(grad),)

        return Case(lambda x: x * scale, [exchange, move], inputs=inputs)

    assert states(twins_agree(lab, scaled, sizes=[4])) == ["captured"]


def test_a_module_that_is_deleted_is_missed_as_without_graphs(lab: Lab) -> None:
    module = Switch(fresh(lab, 4))

    def function(x: Tensor) -> Any:
        return module(x)

    graphed = cgraph.graphed(function)
    with torch.no_grad():
        agree(graphed, function, fresh(lab, 4))
        assert function.__closure__ is not None
        del function.__closure__[0].cell_contents  # as `del module` does
        for _ in range(2):
            with pytest.raises(NameError, match="module"):
                graphed(fresh(lab, 4))


def list_in_itself(tensor: Tensor) -> tuple[Any, Any]:
    things: list[Any] = [tensor]
    things.append(things)
    return things, 0


def dictionary_of_parent_and_child(tensor: Tensor) -> tuple[Any, Any]:
    parent: dict[str, Any] = {"scale": tensor}
    parent["child"] = {"parent": parent, "scale": 3}
    return parent, "scale"


def deque_in_a_list_in_itself(tensor: Tensor) -> tuple[Any, Any]:
    things: Any = deque([[], tensor])
    things[0].append(things)
    return things, 1


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "make", [list_in_itself, dictionary_of_parent_and_child, deque_in_a_list_in_itself]
)
def test_what_a_function_names_may_contain_itself(
    lab: Lab, make: Callable[[Tensor], tuple[Any, Any]], grad: bool
) -> None:
    things, place = make(fresh(lab, 4))
    net = nn.Linear(4, 4, device=lab.device).requires_grad_(grad)
    graphed = alike_after(
        lab,
        lambda x: net(x) * things[place],
        *exchanges(things, place, 1),
        shape=(2, 4),
        grad=True,
    )
    assert states(graphed) == ["captured"]
