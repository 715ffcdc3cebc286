"""Tensors that a graphed function finds elsewhere than in its arguments, parameters and buffers."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor, nn
from torch.testing import assert_close

import cgraph
from lab import Lab, fresh

SCALE: Tensor | None = None


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


Replace = Callable[[Tensor], None]


def of_object(scale: Tensor) -> tuple[Any, Replace]:
    scaled = Scaled(scale)
    return scaled.run, lambda other: setattr(scaled, "scale", other)


def of_module(scale: Tensor) -> tuple[Any, Replace]:
    module = Plain(scale)
    return cgraph.graphed(module), lambda other: setattr(module.part, "scale", other)


def of_closure(scale: Tensor) -> tuple[Any, Replace]:
    def replace(other: Tensor) -> None:
        nonlocal scale
        scale = other

    return cgraph.graphed(lambda x: x * scale), replace


def of_global(scale: Tensor) -> tuple[Any, Replace]:
    def replace(other: Tensor) -> None:
        global SCALE
        SCALE = other

    replace(scale)
    return cgraph.graphed(lambda x: x * SCALE), replace


KINDS = [of_object, of_module, of_closure, of_global]


@pytest.mark.parametrize("make", KINDS)
def test_a_tensor_that_lies_elsewhere_is_noticed(lab: Lab, make: Any) -> None:
    scale = fresh(lab, 4)
    graphed, _ = make(scale)
    for _ in range(3):
        x = fresh(lab, 4)
        assert_close(graphed(x), x * scale)
        scale.data = fresh(lab, 4)


@pytest.mark.parametrize("make", KINDS)
def test_a_tensor_that_is_written_in_place_is_read_where_it_lies(lab: Lab, make: Any) -> None:
    scale = fresh(lab, 4)
    graphed, _ = make(scale)
    for _ in range(3):
        x = fresh(lab, 4)
        assert_close(graphed(x), x * scale)
        scale.copy_(fresh(lab, 4))
    (key,) = graphed.report().keys
    assert key.rerecorded == ()


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


@pytest.mark.parametrize("needs_grad", [False, True])
def test_a_view_of_what_the_graph_uses_may_be_replaced(lab: Lab, needs_grad: bool) -> None:
    class Logged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(fresh(lab, 4), requires_grad=needs_grad)
            self.last = self.weight.detach()

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    module = Logged()
    graphed = cgraph.graphed(module)
    for _ in range(8):
        x = fresh(lab, 4)
        assert_close(graphed(x), x * module.weight)
        module.last = module.weight.detach()
    (key,) = graphed.report().keys
    assert (key.state, key.rerecorded) == ("captured", ())
