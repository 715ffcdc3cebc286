"""Calls that begin with tensors, which are compared one right after the other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import cgraph
from graphed_calls import agree, states
from lab import Lab, fresh


def weighed(*tensors: Tensor | float) -> Tensor:
    """Return a sum that depends on each argument and its place."""
    total: Tensor | float = 0.0
    for place, one in enumerate(tensors, 2):
        total = total + place * (one.double().sum() if isinstance(one, Tensor) else one)
    assert isinstance(total, Tensor)
    return total


def row(lab: Lab, *shape: int) -> Tensor:
    """Return a view, of which torch notes something for autograd."""
    return fresh(lab, 3, *shape)[1]


# Tensors with and without notes for autograd, of several classes and dimensions. The last one has
# so many that it is compared in another way.
MIXED: list[Callable[[Lab], Tensor]] = [
    lambda lab: fresh(lab, 4),
    lambda lab: row(lab, 2, 3, 2),
    lambda lab: nn.Parameter(fresh(lab, 3), requires_grad=False),
    lambda lab: fresh(lab, 2, 3).t(),
    lambda lab: row(lab),
    lambda lab: fresh(lab, 2, 1, 2, 1, 2, 2),
]


def mixed(lab: Lab) -> list[Tensor]:
    return [make(lab) for make in MIXED]


@pytest.mark.parametrize("first", [False, True])
def test_whether_a_tensor_requires_a_gradient_counts_in_either_order(lab: Lab, first: bool) -> None:
    function = cgraph.graphed(weighed)
    with torch.no_grad():
        for number, asks in enumerate((first, not first), 1):
            for _ in range(2):
                given = [fresh(lab, 3).requires_grad_(asks), fresh(lab, 2)]
                agree(function, weighed, *given)
            assert len(states(function)) == number


@pytest.mark.parametrize("place", range(3))
def test_a_tensor_with_gaps_is_copied_anew_at_each_call(lab: Lab, place: int) -> None:
    # Only on CUDA does one native call compare the present and earlier addresses of tensors.
    function = cgraph.graphed(weighed)
    given = [fresh(lab, 4, 2) for _ in range(3)]
    agree(function, weighed, *given)
    given[place] = fresh(lab, 4, 5)[:, 1:3]
    for _ in range(3):
        for one in given:
            one.normal_()
        agree(function, weighed, *given)


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
