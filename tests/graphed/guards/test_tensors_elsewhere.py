"""Tensors that a graphed function finds elsewhere than in its arguments, parameters and buffers."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import cgraph
from graphed_calls import Case, alike_after, exchanges, method, twins_agree
from lab import Lab, fresh

SCALE: Any = None


class Scaled:
    def __init__(self, scale: Tensor) -> None:
        self.scale = scale

    @cgraph.graphed
    def run(self, x: Tensor) -> Tensor:
        return x * self.scale


class Plain(nn.Module):
    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.inner = SimpleNamespace()
        self.part = nn.Module()
        self.part.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return x * self.part.scale


PLACES: dict[str, Callable[[Tensor], Any]] = {
    "an object": lambda scale: Scaled(scale).run,
    "a module": Plain,
    "a closure": lambda scale: lambda x: x * scale,
    "a global": lambda scale: lambda x: x * SCALE,
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("is_moved", [False, True])
def test_a_tensor_that_moves_or_is_written_is_read_where_it_lies_in(
    lab: Lab, place: str, is_moved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale = fresh(lab, 3)
    monkeypatch.setitem(globals(), "SCALE", scale)

    def change() -> None:
        if is_moved:
            scale.data = fresh(lab, 3)
        else:
            scale.copy_(fresh(lab, 3))

    (key,) = alike_after(lab, PLACES[place](scale), change, change, grad=True).report().keys
    assert is_moved or key.rerecorded == ()


def test_a_tensor_that_the_graph_does_not_use_may_be_replaced(lab: Lab) -> None:
    class Cell:
        def __init__(self) -> None:
            self.h = fresh(lab, 4)

        @cgraph.graphed
        def step(self, h: Tensor) -> Tensor:
            return h * 2

    cell = Cell()
    start = cell.h
    for _ in range(8):
        cell.h = cell.step(cell.h)
    assert_close(cell.h, start * 256)
    (key,) = cell.step.report().keys
    assert (key.state, key.rerecorded) == ("captured", ())


def weighted(lab: Lab) -> Any:
    module: Any = nn.Module()
    module.weight = nn.Parameter(fresh(lab, 3))
    module.last = module.weight.detach()
    return module


def view_again(module: Any) -> None:
    module.last = module.weight.detach()


def served(lab: Lab) -> Any:
    pages = fresh(lab, 3)
    request = SimpleNamespace(pages=pages)
    return SimpleNamespace(pool=SimpleNamespace(pages=pages), live={0: request}, request=request)


def exchange_request(engine: Any) -> None:
    engine.request = SimpleNamespace(pages=engine.pool.pages)


def serve_another(engine: Any) -> None:
    turn = 1 + max(engine.live)
    engine.live = {turn: SimpleNamespace(pages=engine.pool.pages)}
    setattr(engine, f"current{turn}", engine.live[turn])


class Owner:
    SCALE: Any

    def __init__(self, lab: Lab) -> None:
        Owner.SCALE = fresh(lab, 3)


HARMLESS: dict[str, Callable[[Lab], Case]] = {
    "a view of a weight": method(
        weighted, lambda one, x: x * one.weight, lambda one: [lambda: view_again(one)] * 7
    ),
    "a view of a frozen weight": method(
        lambda lab: weighted(lab).requires_grad_(False),
        lambda one, x: x * one.weight,
        lambda one: [lambda: view_again(one)] * 7,
    ),
    "an object that leads to what is found nearby": method(
        served, lambda one, x: x * one.pool.pages, lambda one: [lambda: exchange_request(one)] * 7
    ),
    "requests that have a shared cache": method(
        served, lambda one, x: x * one.pool.pages, lambda one: [lambda: serve_another(one)] * 11
    ),
    "a global of the name of an attribute": method(
        Owner, lambda one, x: x * one.SCALE, lambda one: exchanges(globals(), "SCALE", 7)
    ),
}


@pytest.mark.parametrize("which", HARMLESS)
def test_nothing_is_captured_again_after_an_exchange_of(
    lab: Lab, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "SCALE", fresh(lab, 2))
    (key,) = twins_agree(lab, HARMLESS[which], calls=1).report().keys
    assert (key.state, key.rerecorded) == ("captured", ())


@pytest.mark.parametrize("kind", ["gru", "list", "dict"])
def test_parameters_that_a_module_also_has_in_a_container_have_not_moved(
    lab: Lab, kind: str
) -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.weights: Any = []

        def forward(self, x: Tensor) -> Tensor:
            if kind == "list":
                self.weights = [self.linear.weight]
                return nn.functional.linear(x, self.weights[0])
            self.weights = dict(self.named_parameters())
            return nn.functional.linear(x, self.weights["linear.weight"])

    net = (nn.GRU(4, 4) if kind == "gru" else Listed()).to(lab.device)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    graphed = cgraph.graphed(net)
    for _ in range(8):
        x = fresh(lab, 5, 2, 4)
        y, right = (run(x)[0] if kind == "gru" else run(x) for run in (graphed, net))
        torch.testing.assert_close(y, right)
        optimizer.zero_grad()
        y.sum().backward()
        optimizer.step()
        del y, right
    (key,) = graphed.report().keys
    assert key.state == "captured" and not key.rerecorded
