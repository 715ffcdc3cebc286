"""What breaks count and draw is that of the calls, and not of those before a capture."""

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
