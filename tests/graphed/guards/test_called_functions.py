"""Lookups of functions that the graphed one calls: methods, forward, hooks, Python modules."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from graphed_calls import agree, states
from lab import Lab, fresh

WEIGHT: Any = None
NORM: Any = None


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

    factor: Any = None

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
def test_a_global_tensor_is_followed_through(
    lab: Lab, through: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = OF_A_WEIGHT[through]
    graphed, kept = cgraph.graphed(function), []
    with torch.no_grad():
        for _ in range(3):
            kept.append(fresh(lab, 4))
            monkeypatch.setitem(globals(), "WEIGHT", kept[-1])
            for _ in range(2):
                agree(graphed, function, fresh(lab, 3, 4))
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


def test_a_tensor_of_the_class_of_an_object_is_followed(lab: Lab) -> None:
    one, kept = Host(), []
    graphed = cgraph.graphed(lambda x: x * one.factor)
    for _ in range(3):
        kept.append(fresh(lab, 4))
        Host.factor = kept[-1]
        for _ in range(2):
            agree(graphed, lambda x: x * Host.factor, fresh(lab, 4))
    assert states(graphed) == ["captured"]


def test_what_a_hook_closes_over_is_followed(lab: Lab) -> None:
    net, steered, kept = nn.Linear(4, 4).to(lab.device), {"by": fresh(lab, 4)}, []
    net.register_forward_hook(lambda module, args, result: result + steered["by"])
    graphed = cgraph.graphed(net)
    with torch.no_grad():
        for _ in range(3):
            kept.append(steered["by"])
            steered["by"] = fresh(lab, 4)
            for _ in range(2):
                agree(graphed, net, fresh(lab, 3, 4))
    assert states(graphed) == ["captured"]


class Steering:
    """An object whose method is a hook."""

    def __init__(self, by: Tensor) -> None:
        self.by = by

    def hook(self, module: nn.Module, args: Any, result: Tensor) -> Tensor:
        return result + self.by


def test_what_the_object_of_a_hook_has_is_followed(lab: Lab) -> None:
    net, steering, kept = nn.Linear(4, 4).to(lab.device), Steering(fresh(lab, 4)), []
    net.register_forward_hook(steering.hook)
    graphed = cgraph.graphed(net)
    with torch.no_grad():
        for _ in range(3):
            kept.append(steering.by)
            steering.by = fresh(lab, 4)
            for _ in range(2):
                agree(graphed, net, fresh(lab, 3, 4))
    assert states(graphed) == ["captured"]


def test_many_hooks_hide_nothing_of_what_the_forward_calls(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = nn.Sequential(*(nn.Identity() for _ in range(600)), Forward())
    for one in net[:600]:
        one.register_forward_hook(lambda module, args, result: None)
    graphed, kept = cgraph.graphed(net), []
    with torch.no_grad():
        for _ in range(2):
            kept.append(fresh(lab, 4))
            monkeypatch.setitem(globals(), "WEIGHT", kept[-1])
            agree(graphed, net, fresh(lab, 3, 4))
    assert states(graphed) == ["captured"]
