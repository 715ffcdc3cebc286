"""State that a function makes in its first call, also in containers and objects, and makes anew."""

from __future__ import annotations

import collections
import copy
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import cgraph
from graphed_calls import states
from lab import Lab, fresh

# Each of these functions runs eagerly at times, and warns.
pytestmark = pytest.mark.filterwarnings("ignore:.*runs eagerly")


class Pair(NamedTuple):
    """A container of one tensor."""

    state: Tensor


class Box:
    """An object with a tensor."""

    def __init__(self, state: Tensor) -> None:
        self.state = state


Kind = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""Functions that put a tensor into something, and take it out."""

KINDS: dict[str, Kind] = {
    "tensor": (lambda one: one, lambda kept: kept),
    "tuple": (lambda one: (one, one * 1), lambda kept: kept[0]),
    "list": (lambda one: [one], lambda kept: kept[0]),
    "nested": (lambda one: [(one, {"h": one})], lambda kept: kept[0][1]["h"]),
    "dict": (lambda one: {"h": one}, lambda kept: kept["h"]),
    "deque": (lambda one: collections.deque([one]), lambda kept: kept[0]),
    "named tuple": (Pair, lambda kept: kept.state),
    "namespace": (lambda one: types.SimpleNamespace(h=one), lambda kept: kept.h),
    "object": (Box, lambda kept: kept.state),
}


class Recurrent(nn.Module):
    """A module that keeps a state, of one of these kinds, and assigns it or writes to it."""

    def __init__(self, kind: str, empty: Any, is_in_place: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.inner, self.kept = nn.Linear(3, 3), empty
        self._put, self._take = KINDS[kind]
        self._is_in_place = is_in_place

    @property
    def state(self) -> Tensor:
        return self._take(self.kept)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        with torch.no_grad():
            if not self.kept if isinstance(self.kept, list | dict) else self.kept is None:
                self.kept = self._put(torch.zeros_like(y))
            if self._is_in_place:
                self.state.mul_(0.5).add_(y)
            else:
                self.kept = self._put(self.state * 0.5 + y)
        return y + self.state


@pytest.mark.parametrize("warmup", [1, 3])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("is_in_place", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_that_begins_as_none_is_that_of_eager(
    lab: Lab, kind: str, is_in_place: bool, grad: bool, warmup: int
) -> None:
    net = Recurrent(kind, None, is_in_place).to(lab.device)
    eager = copy.deepcopy(net)
    graphed = cgraph.graphed(net, warmup=warmup)
    with torch.set_grad_enabled(grad):
        for number in range(7):
            if number == 4:
                # As a new request does, or a new sequence.
                net.kept = eager.kept = None
            x = fresh(lab, 2, 3)
            y = graphed(x)
            expected = eager(x)
            torch.testing.assert_close(y, expected)
            torch.testing.assert_close(net.state, eager.state)
            if grad:
                y.sum().backward()
                expected.sum().backward()
    torch.testing.assert_close(net.inner.weight.grad, eager.inner.weight.grad)


@pytest.mark.parametrize("empty", [[], {}])
def test_a_state_that_begins_as_an_empty_container_is_that_of_eager(lab: Lab, empty: Any) -> None:
    kind = "list" if isinstance(empty, list) else "dict"
    net = Recurrent(kind, empty, is_in_place=False).to(lab.device)
    eager = copy.deepcopy(net)
    graphed = cgraph.graphed(net)
    with torch.no_grad():
        for _ in range(4):
            x = fresh(lab, 2, 3)
            torch.testing.assert_close(graphed(x), eager(x))
            torch.testing.assert_close(net.state, eager.state)


@pytest.mark.parametrize("kind", ["tuple", "dict", "namespace", "object"])
def test_what_a_module_leaves_in_a_container_is_that_of_the_last_call(lab: Lab, kind: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.left = nn.Linear(3, 3, device=lab.device), None

        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x)
            self.left = KINDS[kind][0](y.detach().var())
            return y  # type: ignore[no-any-return]

    net = Net()
    graphed = cgraph.graphed(net)
    for _ in range(4):
        x = fresh(lab, 2, 3)
        y = graphed(x)
        torch.testing.assert_close(KINDS[kind][1](net.left), net.inner(x).var())
        y.sum().backward()


def test_counts_in_an_object_that_a_first_call_makes_begin_with_it(lab: Lab) -> None:
    host = types.SimpleNamespace(meter=None)

    def function(x: Tensor) -> Tensor:
        if host.meter is None:
            host.meter = types.SimpleNamespace(calls=0)
        host.meter.calls += 1
        return x * host.meter.calls

    graphed = cgraph.graphed(function)
    for number in range(1, 5):
        x = fresh(lab, 3)
        torch.testing.assert_close(graphed(x), x * number)
        assert host.meter.calls == number


@pytest.mark.parametrize("kind", ["tensor", "tuple", "dict", "object"])
def test_what_a_break_keeps_is_that_of_the_calls(lab: Lab, kind: str) -> None:
    host = types.SimpleNamespace(kept=None)
    put, take = KINDS[kind]

    @cgraph.eager_break
    def remember(x: Tensor) -> Tensor:
        state = torch.zeros_like(x) if host.kept is None else take(host.kept)
        host.kept = put(state * 0.5 + x)
        return x + take(host.kept)

    graphed = cgraph.graphed(lambda x: remember(x * 2) + 1)
    state = torch.zeros(3, device=lab.device)
    for _ in range(4):
        x = fresh(lab, 3)
        state = state * 0.5 + x * 2
        torch.testing.assert_close(graphed(x), x * 2 + state + 1)
    assert states(graphed) == ["captured"]
