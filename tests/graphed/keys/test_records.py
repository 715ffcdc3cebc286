"""Dataclasses and named tuples with tensors, in arguments and in results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import cgraph
from lab import Lab, fresh


@dataclass
class Lengths:
    """An engine's data about the sequences of a batch."""

    each: Tensor
    most: int = 4

    @property
    def doubled(self) -> Tensor:
        return self.each * 2


@dataclass(frozen=True)
class Batch:
    """A batch with lengths inside, and a later result of them."""

    tokens: Tensor
    lengths: Lengths
    extra: list[Any] = field(default_factory=list)

    @cached_property
    def total(self) -> Tensor:
        return self.lengths.each.sum()


@dataclass
class Loop:
    """A dataclass that may lead back to itself."""

    tensor: Tensor
    other: Any = None


def batch(lab: Lab, most: int = 4) -> Batch:
    return Batch(fresh(lab, 3), Lengths(fresh(lab, 3), most), [fresh(lab, 3), 2.0])


def scored(one: Lengths) -> Lengths:
    return Lengths(one.each.sin() * one.most, one.most)


def agree_on_gradients(lab: Lab, function: Callable[[Lengths], Lengths]) -> None:
    """Compare gradients through a function with those through :func:`scored`."""
    for _ in range(3):
        each = fresh(lab, 3).requires_grad_()
        other = each.detach().clone().requires_grad_()
        function(Lengths(each)).each.square().sum().backward()
        scored(Lengths(other)).each.square().sum().backward()
        assert_close(each.grad, other.grad)


def test_callables_of_make_graphed_callables_take_and_return_dataclasses(lab: Lab) -> None:
    sample = Lengths(fresh(lab, 3).requires_grad_())
    function = cgraph.make_graphed_callables(scored, (sample,))
    agree_on_gradients(lab, function)


def test_a_module_in_a_list_that_keeps_the_tensor_of_the_call_replays(lab: Lab) -> None:
    class Last(nn.Module):
        last: Any = None

        def forward(self, x: Tensor) -> Tensor:
            self.last = x
            return x * 2

    parts = [Last()]
    graphed = cgraph.graphed(lambda x: parts[0](x))
    with torch.no_grad():
        for _ in range(3):
            x = fresh(lab, 3)
            assert_close(graphed(x), x * 2)
            assert_close(parts[0].last, x)


@pytest.mark.parametrize("grad", [False, True])
def test_a_function_that_keeps_a_tensor_of_the_call_in_a_list_of_its_own_is_as_ever(
    lab: Lab, grad: bool
) -> None:
    kept: list[Tensor] = []

    def function(x: Tensor) -> Tensor:
        kept.clear()
        kept.append(x)
        return x * 2

    graphed = cgraph.graphed(function)
    for _ in range(3):
        x = fresh(lab, 3).requires_grad_(grad)
        assert_close(graphed(x), x * 2)
        assert_close(kept[0].detach(), x.detach())


class Counted(NamedTuple("Counted", [("first", Tensor)])):  # type: ignore[misc]
    """A named tuple with a constructor of its own."""

    number: int

    def __new__(cls, first: Tensor) -> Counted:
        made = super().__new__(cls, first)
        made.number = 3
        return made


def test_large_trees_of_dataclasses_are_looked_through_once(lab: Lab) -> None:
    root = Loop(None)  # type: ignore[arg-type]
    root.other = [Loop(None, [root, place]) for place in range(300)]  # type: ignore[arg-type]
    function = cgraph.graphed(lambda x, one: x * len(one.other))
    for _ in range(2):
        x = fresh(lab, 3)
        assert_close(function(x, root), x * 300)
