"""State that a graphed function keeps elsewhere than in its arguments, and replaces."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from lab import Lab, fresh


def of_object(h: Tensor) -> tuple[Any, Any, Callable[[], Tensor]]:
    state = SimpleNamespace(h=h)

    def step(x: Tensor) -> Tensor:
        state.h = torch.tanh(x + state.h)
        return state.h * 2

    return step, lambda other: setattr(state, "h", other), lambda: state.h


def of_dictionary(h: Tensor) -> tuple[Any, Any, Callable[[], Tensor]]:
    kept = {"h": h}

    def step(x: Tensor) -> Tensor:
        kept["h"] = torch.tanh(x + kept["h"])
        return kept["h"] * 2

    return step, lambda other: kept.update(h=other), lambda: kept["h"]


def of_variable(h: Tensor) -> tuple[Any, Any, Callable[[], Tensor]]:
    def step(x: Tensor) -> Tensor:
        nonlocal h
        h = torch.tanh(x + h)
        return h * 2

    def put(other: Tensor) -> None:
        nonlocal h
        h = other

    return step, put, lambda: h


def of_tuple(h: Tensor) -> tuple[Any, Any, Callable[[], Tensor]]:
    state = SimpleNamespace(pair=(h, "name"))

    def step(x: Tensor) -> Tensor:
        state.pair = (torch.tanh(x + state.pair[0]), "name")
        return state.pair[0] * 2

    return step, lambda other: setattr(state, "pair", (other, "name")), lambda: state.pair[0]


class Cell(nn.Module):
    h: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.h = torch.tanh(x + self.h)
        return self.h * 2


def of_buffer(h: Tensor) -> tuple[Any, Any, Callable[[], Tensor]]:
    state = SimpleNamespace(cell=Cell())
    state.cell.register_buffer("h", h)
    return (
        lambda x: state.cell(x),
        lambda other: setattr(state.cell, "h", other),
        lambda: state.cell.h,
    )


@pytest.mark.filterwarnings("ignore:.*runs eagerly for:UserWarning")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("warmup", [0, 1, 3])
@pytest.mark.parametrize("make", [of_object, of_dictionary, of_variable, of_tuple, of_buffer])
def test_state_that_each_call_replaces_is_as_in_eager(
    lab: Lab, make: Any, warmup: int, grad: bool
) -> None:
    begin = fresh(lab, 4)
    step, put, now = make(begin)
    xs = [fresh(lab, 4).requires_grad_(grad) for _ in range(5)]
    wanted = [step(x).detach().clone() for x in xs]
    last = now()
    put(begin)
    graphed = cgraph.graphed(step, warmup=warmup)
    for x, right in zip(xs, wanted, strict=True):
        assert torch.equal(graphed(x), right)
    assert torch.equal(now(), last)
    (key,) = graphed.report().keys
    assert key.state == "eager" and key.reason is not None


@pytest.mark.filterwarnings("ignore:.*runs eagerly:UserWarning")
@pytest.mark.parametrize("begin", [None, "missing"])
@pytest.mark.parametrize("warmup", [0, 1, 3])
def test_state_that_the_first_call_makes_in_an_object_is_as_in_eager(
    lab: Lab, warmup: int, begin: str | None
) -> None:
    state = SimpleNamespace() if begin == "missing" else SimpleNamespace(h=None)

    def step(x: Tensor) -> Tensor:
        if getattr(state, "h", None) is None:
            state.h = torch.zeros_like(x)
        state.h = state.h + x
        return state.h * 2

    graphed = cgraph.graphed(step, warmup=warmup)
    total = torch.zeros(4, device=lab.device)
    for _ in range(5):
        x = fresh(lab, 4)
        total = total + x
        assert torch.equal(graphed(x), total * 2)
        assert torch.equal(state.h, total)


@pytest.mark.filterwarnings("ignore:.*runs eagerly:UserWarning")
@pytest.mark.parametrize("warmup", [0, 1, 3])
def test_state_of_a_class_that_each_call_replaces_is_as_in_eager(lab: Lab, warmup: int) -> None:
    class Cell:
        h = torch.zeros(4, device=lab.device)

        def step(self, x: Tensor) -> Tensor:
            type(self).h = self.h + x
            return self.h * 2

    cell = Cell()
    graphed = cgraph.graphed(cell.step, warmup=warmup)
    total = torch.zeros(4, device=lab.device)
    for _ in range(4):
        x = fresh(lab, 4)
        total = total + x
        assert torch.equal(graphed(x), total * 2)
        assert "h" not in vars(cell)
