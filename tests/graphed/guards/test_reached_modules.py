"""Modules and tensors that a graphed function reaches, wherever it finds them."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import cgraph
from graphed_calls import agree, states
from lab import Lab, fresh

Function = Callable[[Tensor], Any]
HELD: Any = None


def named(x: Tensor) -> Tensor:
    return HELD(x)  # type: ignore[no-any-return]


def in_global(_: Any) -> Function:
    return named


def in_helper(_: Any) -> Function:
    return lambda x: named(x)


def in_inner_function(held: Any) -> Function:
    return lambda x: (lambda y: held(y))(x)


def in_global_of_inner_function(_: Any) -> Function:
    return lambda x: (lambda y: HELD(y))(x)


def in_default(held: Any) -> Function:
    return lambda x, part=held: part(x)


def in_keyword_default(held: Any) -> Function:
    def function(x: Tensor, *, part: Any = held) -> Any:
        return part(x)

    return function


def in_partial(held: Any) -> Function:
    return functools.partial(lambda part, x: part(x), held)


def in_partial_keyword(held: Any) -> Function:
    return functools.partial(lambda x, part: part(x), part=held)


def in_graphed_function(held: Any) -> Function:
    inner = cgraph.graphed(lambda x: held(x))
    return lambda x: inner(x) + 0


class Calls:
    def __init__(self, held: Any) -> None:
        self.held = held

    def __call__(self, x: Tensor) -> Any:
        return self.held(x)


PLACES = [
    in_global,
    in_helper,
    in_inner_function,
    in_global_of_inner_function,
    in_default,
    in_keyword_default,
    in_partial,
    in_partial_keyword,
    in_graphed_function,
    Calls,
]


class Switch(nn.Module):
    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.scale = nn.Parameter(scale)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale if self.training else x - self.scale


@pytest.mark.parametrize("place", PLACES)
def test_a_module_is_followed_wherever_the_function_finds_it(
    lab: Lab, place: Callable[[Any], Function], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Switch(fresh(lab, 4))
    monkeypatch.setitem(globals(), "HELD", module)
    function = place(module)
    graphed = cgraph.graphed(function)
    with torch.no_grad():
        for _ in range(2):
            agree(graphed, function, fresh(lab, 4))
        module.scale = nn.Parameter(fresh(lab, 4))
        for _ in range(2):
            agree(graphed, function, fresh(lab, 4))
        module.eval()
        for _ in range(2):
            agree(graphed, function, fresh(lab, 4))
    assert states(graphed) == ["captured", "captured"]


@pytest.mark.parametrize("place", PLACES)
def test_a_tensor_that_moves_is_followed_wherever_the_function_finds_it(
    lab: Lab, place: Callable[[Any], Function], monkeypatch: pytest.MonkeyPatch
) -> None:
    scale = fresh(lab, 4)
    # Called as `held(x)`, which multiplies.
    held = functools.partial(torch.mul, scale)
    monkeypatch.setitem(globals(), "HELD", held)
    function = place(held)
    graphed = cgraph.graphed(function)
    for _ in range(2):
        agree(graphed, function, fresh(lab, 4))
    scale.data = fresh(lab, 4)
    for _ in range(2):
        agree(graphed, function, fresh(lab, 4))
    assert states(graphed) == ["captured"]


@pytest.mark.parametrize("place", [in_global, in_helper, in_global_of_inner_function])
def test_a_module_that_is_exchanged_is_noticed_in_what_the_function_calls(
    lab: Lab, place: Callable[[Any], Function], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "HELD", Switch(fresh(lab, 4)))
    function = place(None)
    graphed = cgraph.graphed(function)
    with torch.no_grad():
        agree(graphed, function, fresh(lab, 4))
        monkeypatch.setitem(globals(), "HELD", Switch(fresh(lab, 4)))
        agree(graphed, function, fresh(lab, 4))


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
    "form", [lambda one: one, lambda one: one.method, lambda one: functools.partial(one.method)]
)
def test_what_the_first_call_makes_in_the_functions_object_has_no_trace_of_the_warm_up(
    lab: Lab, form: Callable[[Counter], Function]
) -> None:
    graphed, eager = cgraph.graphed(form(Counter())), form(Counter())
    for _ in range(4):
        agree(graphed, eager, fresh(lab, 4))
    assert states(graphed) == ["captured"]


@pytest.mark.parametrize("grad", [False, True])
def test_padded_calls_follow_tensors_as_others_do(lab: Lab, grad: bool) -> None:
    scale = fresh(lab, 1)

    def function(x: Tensor) -> Tensor:
        return x * scale

    graphed = cgraph.graphed(function, sizes=[4])
    for rows in (3, 4, 3):
        agree(graphed, function, fresh(lab, rows).requires_grad_(grad))
    scale = fresh(lab, 1)
    for rows in (3, 4, 3):
        agree(graphed, function, fresh(lab, rows).requires_grad_(grad))
    scale.data = fresh(lab, 1)
    for rows in (3, 4, 3):
        agree(graphed, function, fresh(lab, rows).requires_grad_(grad))
    assert states(graphed) == ["captured"]


class Named:
    def __call__(self, x: Tensor) -> Any:
        return HELD(x)


def test_a_module_is_followed_that_the_call_of_an_object_names(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Switch(fresh(lab, 4))
    monkeypatch.setitem(globals(), "HELD", module)
    graphed = cgraph.graphed(Named())
    with torch.no_grad():
        for training in (True, False, True):
            module.train(training)
            agree(graphed, named, fresh(lab, 4))


def test_a_global_of_the_name_of_an_attribute_is_no_concern(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Owner:
        HELD = Switch(fresh(lab, 4))

    owner = Owner()

    def function(x: Tensor) -> Any:
        return owner.HELD(x)

    graphed = cgraph.graphed(function)
    with torch.no_grad():
        for _ in range(8):
            monkeypatch.setitem(globals(), "HELD", nn.Linear(2, 2))
            agree(graphed, function, fresh(lab, 4))
    (key,) = graphed.report().keys
    assert (key.state, key.rerecorded) == ("captured", ())


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

    def function(x: Tensor) -> Tensor:
        return net(x) * things[place]

    graphed = cgraph.graphed(function)
    for _ in range(3):
        x = fresh(lab, 2, 4)
        assert_close(graphed(x), function(x))
    assert states(graphed) == ["captured"]
    if make is not deque_in_a_list_in_itself:  # deques are not followed
        things[place] = fresh(lab, 4)
        assert_close(graphed(x), function(x))
