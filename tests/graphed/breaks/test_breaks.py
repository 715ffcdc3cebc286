"""Breaks write state, count and draw once in each call, also where they call their own function."""

from __future__ import annotations

import random
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from cgraph import eager_break
from graphed_calls import states
from lab import Lab, fresh


class Counting(nn.Module):
    """A counter of its calls in a buffer, before a break, inside it or after it."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.register_buffer("count", torch.zeros(1))

    def add(self, where: str) -> None:
        if where == self.where:
            self.count.add_(1)

    def forward(self, x: Tensor) -> Tensor:
        self.add("before")
        y = self.broken(x)
        self.add("behind")
        return y + self.count

    @cgraph.eager_break
    def broken(self, x: Tensor) -> Tensor:
        self.add("inside")
        return x * 2


def test_a_ladder_of_captures_with_breaks_writes_no_state(lab: Lab) -> None:
    net = Counting("before").to(lab.device)
    function = cgraph.graphed(net, sizes=[1, 2, 4])
    with torch.no_grad():
        function.capture(fresh(lab, 4))
        assert not net.count.any()
        x = fresh(lab, 2)
        assert torch.equal(function(x), x * 2 + 1)


def numbers() -> Iterator[float]:
    yield from map(float, range(100))


def test_a_break_may_take_from_an_iterator(lab: Lab) -> None:
    given = numbers()
    scale = torch.zeros((), device=lab.device)

    @eager_break
    def load() -> None:
        scale.fill_(next(given))

    def function(x: Tensor) -> Tensor:
        load()
        return x * scale

    graphed = cgraph.graphed(function)
    x = fresh(lab, 3)
    graphed(x)
    for _ in range(3):
        before = float(scale)
        torch.testing.assert_close(graphed(x), x * (before + 1))
    assert states(graphed) == ["captured"]


@pytest.mark.parametrize("grad", [False, True])
def test_what_a_break_sets_up_once_stays_for_the_code_behind_it(lab: Lab, grad: bool) -> None:
    kept: dict[str, Any] = {"ready": False}

    @eager_break
    def prepare(x: Tensor) -> Tensor:
        if not kept["ready"]:
            kept["ready"], kept["table"] = True, torch.arange(3.0, device=x.device)
        return x * 2

    graphed = cgraph.graphed(lambda x: prepare(x) + kept["table"])
    table = torch.arange(3.0, device=lab.device)
    for _ in range(4):
        x = fresh(lab, 3).requires_grad_(grad)
        torch.testing.assert_close(graphed(x), x * 2 + table)


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("where", ["module", "attribute", "variable"])
def test_modules_that_a_function_exchanges_beside_a_break_take_turns(
    lab: Lab, where: str, grad: bool
) -> None:
    one, two = nn.Linear(3, 3, device=lab.device), nn.Linear(3, 3, device=lab.device)
    net, host, mine = nn.Module(), types.SimpleNamespace(part=one), one
    net.part = one

    @eager_break
    def noted(x: Tensor) -> Tensor:
        return x * 1

    def function(x: Tensor) -> Tensor:
        nonlocal mine
        if where == "module":
            net.part = two if net.part is one else one
        mine = two if mine is one else one
        host.part = two if host.part is one else one
        part: Any = {"module": net.part, "attribute": host.part, "variable": mine}[where]
        return noted(part(x))

    graphed = cgraph.graphed(function)
    for number in range(5):
        x = fresh(lab, 2, 3).requires_grad_(grad)
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(graphed(x), (one if number % 2 else two)(x))


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
def test_random_numbers_beside_a_break_are_drawn_in_each_call(lab: Lab) -> None:
    generator, expected = random.Random(3), random.Random(3)

    @eager_break
    def noted(x: Tensor) -> Tensor:
        return x * 1

    graphed = cgraph.graphed(lambda x: noted(x) * generator.random())
    for _ in range(4):
        x = fresh(lab, 3)
        torch.testing.assert_close(graphed(x), x * expected.random())


def test_two_functions_that_call_each_other_spoil_nothing(lab: Lab) -> None:
    first: Any = None
    second: Any = None

    @eager_break
    def by_first(x: Tensor) -> Tensor:
        return second(x[:2]).sum(0) if len(x) > 1 else x[0] * 1  # type: ignore[no-any-return]

    @eager_break
    def by_second(x: Tensor) -> Tensor:
        return first(x[:1]).sum(0)  # type: ignore[no-any-return]

    def one(x: Tensor) -> Tensor:
        y = x * 3
        return y + by_first(x * 2)

    def other(x: Tensor) -> Tensor:
        y = x * 5
        return y + by_second(x * 2)

    graphs = cgraph.graphed(one), cgraph.graphed(other)
    with torch.no_grad():
        for _ in range(4):
            x = fresh(lab, 4, 3)
            first, second = one, other
            expected = one(x)
            first, second = graphs
            assert torch.equal(first(x), expected)


def test_a_capture_ahead_puts_back_what_a_break_has_written(lab: Lab) -> None:
    @cgraph.eager_break
    def count(total: Tensor) -> None:
        total.add_(1)

    def function(x: Tensor, total: Tensor) -> Tensor:
        count(total)
        return x + 1

    x, total = fresh(lab, 4), torch.zeros(4, device=lab.device)
    graphed = cgraph.graphed(function, static_args="total").capture(x, total)
    assert not total.any()
    assert torch.equal(graphed(x, total), x + 1)
