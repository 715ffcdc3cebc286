"""Lookups of functions that the graphed one calls: methods, forward, hooks, Python modules."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from graphed_calls import Case, Change, alike_after, exchanges, sets, states, twins_agree
from lab import Lab, fresh

WEIGHT: Any = None
NORM: Any = None


@pytest.fixture(autouse=True)
def _own_weight(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "WEIGHT", fresh(lab, 4))


class Forward(nn.Module):
    """A module whose forward names globals."""

    def forward(self, x: Tensor) -> Tensor:
        return x * WEIGHT


class Normed(nn.Module):
    """A module whose forward names a module outside itself."""

    def forward(self, x: Tensor) -> Tensor:
        return NORM(x)  # type: ignore[no-any-return]


class Host:
    """Methods of all kinds that name a global."""

    def outer(self, x: Tensor) -> Tensor:
        return self.inner(x)

    def inner(self, x: Tensor) -> Tensor:
        return x * WEIGHT

    @property
    def scaled(self) -> Tensor:
        return WEIGHT * 2  # type: ignore[no-any-return]

    @staticmethod
    def plain(x: Tensor) -> Tensor:
        return x * WEIGHT

    @classmethod
    def of_class(cls, x: Tensor) -> Tensor:
        return x * WEIGHT

    def __call__(self, x: Tensor) -> Tensor:
        return x * WEIGHT


class Derived(Forward):
    """A module whose forward is that of another module."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def patched() -> nn.Module:
    """Return a module with a forward of its own."""
    net = nn.Sequential(nn.Identity())
    net[0].forward = lambda x: x * WEIGHT
    return net


def with_function() -> Callable[..., Any]:
    """Return a function that calls an object's attribute."""
    host = types.SimpleNamespace(function=lambda x: x * WEIGHT)
    return lambda x: host.function(x)


class Times(torch.autograd.Function):
    """A user-defined operator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * WEIGHT

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


HOST = Host()
LISTED = [lambda x: x * WEIGHT]

OF_A_WEIGHT: dict[str, Callable[..., Any]] = {
    "forward": Forward(),
    "another method": HOST.outer,
    "a method of an object": lambda x: HOST.inner(x),
    "a property": lambda x: x * HOST.scaled,
    "a call of an object": lambda x: HOST(x),
    "a static method": lambda x: Host.plain(x),
    "a method of a class": lambda x: Host.of_class(x),
    "a method of what it makes": lambda x: Host().inner(x),
    "an operator of autograd": lambda x: Times.apply(x),
    "the forward of another class": Derived(),
    "a forward that was put in": patched(),
    "a function that an object has": with_function(),
    "a function in a list": lambda x: LISTED[0](x),
}


@pytest.mark.parametrize("through", OF_A_WEIGHT)
def test_a_global_tensor_is_followed_through(lab: Lab, through: str) -> None:
    changes = exchanges(globals(), "WEIGHT")
    graphed = alike_after(lab, OF_A_WEIGHT[through], *changes, shape=(3, 4))
    assert states(graphed) == ["captured"]


def test_a_module_that_a_forward_names_is_followed(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (nn.BatchNorm1d(4).to(lab.device) for _ in range(2))
    function = Normed()
    graphed = cgraph.graphed(function)
    with torch.no_grad():
        for norm, training in ((first, True), (first, False), (second, False), (first, True)):
            monkeypatch.setitem(globals(), "NORM", norm.train(training))
            x = fresh(lab, 5, 4)
            for _ in range(2):
                found = graphed(x).clone()
                before = [one.clone() for one in norm.buffers()]
                torch.testing.assert_close(found, function(x))
                for one, value in zip(norm.buffers(), before, strict=True):
                    one.copy_(value)
    assert set(states(graphed)) == {"captured"}


def classed(lab: Lab) -> Case:
    class Scaling:
        factor = fresh(lab, 4)

    one = Scaling()
    return Case(lambda x: x * one.factor, exchanges(Scaling, "factor"), shape=(3, 4))


def hooked(lab: Lab, hook: Callable[..., Tensor], changes: list[Change]) -> Case:
    net = nn.Linear(4, 4).to(lab.device)
    net.register_forward_hook(hook)
    return Case(net, changes, shape=(3, 4))


def by_closure(lab: Lab) -> Case:
    steered = {"by": fresh(lab, 4)}
    changes = exchanges(steered, "by")
    return hooked(lab, lambda module, args, result: result + steered["by"], changes)


class Steering:
    """An object whose method is a hook."""

    def __init__(self, by: Tensor) -> None:
        self.by = by

    def hook(self, module: nn.Module, args: Any, result: Tensor) -> Tensor:
        return result + self.by


def by_object(lab: Lab) -> Case:
    steering = Steering(fresh(lab, 4))
    return hooked(lab, steering.hook, exchanges(steering, "by"))


def beside_hooks(lab: Lab) -> Case:
    net = nn.Sequential(*(nn.Identity() for _ in range(600)), Forward())
    for one in net[:600]:
        one.register_forward_hook(lambda module, args, result: None)
    return Case(net, exchanges(globals(), "WEIGHT"), shape=(3, 4))


TENSORS: dict[str, Callable[[Lab], Case]] = {
    "the class of an object": classed,
    "the closure of a hook": by_closure,
    "the object of a hook": by_object,
    "the global of a forward behind hundreds of hooks": beside_hooks,
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("place", TENSORS)
def test_a_tensor_is_followed_that_is_exchanged_in(lab: Lab, place: str, grad: bool) -> None:
    assert states(twins_agree(lab, TENSORS[place], grad=grad)) == ["captured"]


@pytest.mark.parametrize("decorate", [torch.no_grad(), torch.enable_grad()])
def test_the_cell_of_a_function_under_a_decorator_of_torchs_is_guarded(
    lab: Lab, decorate: Any
) -> None:
    scale = 2.0

    def scaled(x: Tensor) -> Tensor:
        return x * scale

    (cell,) = scaled.__closure__ or ()
    alike_after(lab, decorate(scaled), *sets(cell, "cell_contents", 5.0, 7.0))


def test_the_attributes_of_an_object_under_a_decorator_of_torchs_are_guarded(lab: Lab) -> None:
    class Scale:
        factor = 2.0

        def __call__(self, x: Tensor) -> Tensor:
            return x * self.factor

    scale = Scale()
    alike_after(lab, torch.no_grad()(scale), *sets(scale, "factor", 5.0, 7.0))
