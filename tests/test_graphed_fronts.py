"""Calls that begin with tensors, which are compared one right after the other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import cgraph
from graphed_calls import agree, misses, states
from lab import Lab, fresh


def weighed(*tensors: Tensor | float) -> Tensor:
    """Depends on each argument and its place."""
    total: Tensor | float = 0.0
    for place, one in enumerate(tensors, 2):
        total = total + place * (one.double().sum() if isinstance(one, Tensor) else one)
    assert isinstance(total, Tensor)
    return total


def row(lab: Lab, *shape: int) -> Tensor:
    """A view, of which torch notes something for autograd."""
    return fresh(lab, 3, *shape)[1]


# Tensors with and without anything that is noted for autograd, of several classes and dimensions.
MIXED: list[Callable[[Lab], Tensor]] = [
    lambda lab: fresh(lab, 4),
    lambda lab: row(lab, 2, 2),
    lambda lab: nn.Parameter(fresh(lab, 3), requires_grad=False),
    lambda lab: fresh(lab, 2, 1, 2, 1, 2, 2),
    lambda lab: fresh(lab, 2, 3).t(),
    lambda lab: row(lab),
]


def of_other_class(copy: Tensor, one: Tensor) -> Tensor:
    is_parameter = isinstance(one, nn.Parameter)
    return copy if is_parameter else nn.Parameter(copy, requires_grad=False)


OTHERS: list[Callable[[Tensor], Tensor | float]] = [
    lambda one: one.double(),
    lambda one: one.clone().unsqueeze(0),
    lambda one: of_other_class(one.detach().clone(), one),
    lambda one: one.detach().clone().requires_grad_(),
    lambda one: one.sum().item(),
]


def mixed(lab: Lab) -> list[Tensor]:
    return [make(lab) for make in MIXED]


def test_tensors_of_any_kind_beside_each_other_are_copied_at_each_call(lab: Lab) -> None:
    function = cgraph.graphed(weighed)
    agree(function, weighed, *mixed(lab))
    with misses() as seen:
        for _ in range(4):
            agree(function, weighed, *mixed(lab))
    assert not seen
    assert states(function) == ["captured"]


@pytest.mark.parametrize("place", range(len(MIXED)))
def test_what_is_another_tensor_at_any_place_is_not_answered_by_the_first_graph(
    lab: Lab, place: int
) -> None:
    function = cgraph.graphed(weighed)
    with torch.no_grad():
        agree(function, weighed, *mixed(lab))
        for number, other in enumerate(OTHERS, 2):
            given: list[Tensor | float] = list(mixed(lab))
            one = given[place]
            assert isinstance(one, Tensor)
            given[place] = other(one)
            agree(function, weighed, *given)
            assert len(states(function)) == number
        with misses() as seen:
            agree(function, weighed, *mixed(lab))
        assert not seen


@pytest.mark.parametrize("count", [1, 5, 63, 64, 65, 130])
def test_calls_of_fewer_and_of_more_tensors_are_other_calls(lab: Lab, count: int) -> None:
    function = cgraph.graphed(weighed)
    counts = [count, count + 1, 2 * count + 1]
    for _ in range(2):
        for number in counts:
            agree(function, weighed, *(fresh(lab, 2) for _ in range(number)))
    assert states(function) == ["captured"] * len(counts)


def test_a_constant_between_tensors_counts(lab: Lab) -> None:
    function = cgraph.graphed(weighed)
    for constant in (1.5, 2.5, 1.5, 2.5):
        agree(function, weighed, fresh(lab, 3), constant, row(lab, 2), fresh(lab, 2))
    assert states(function) == ["captured", "captured"]


def test_a_tensor_that_lies_where_the_one_before_lay_is_copied_again(lab: Lab) -> None:
    function, all_of = cgraph.graphed(weighed), mixed(lab)
    for _ in range(4):
        for one in all_of:
            one.normal_()
        agree(function, weighed, *all_of)
        # One of them elsewhere, and then there again.
        agree(function, weighed, *all_of[:2], all_of[2].clone(), *all_of[3:])
