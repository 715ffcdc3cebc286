"""Calls of any number of rows, padded to captured sizes."""

from __future__ import annotations

import warnings
from contextlib import suppress

import pytest
import torch
from torch import Tensor

import cgraph
from cgraph.errors import ArgumentError
from graphed_calls import near, numbers
from lab import Lab, fresh

SIZES = [1, 2, 4, 8]


def affine(x: Tensor) -> Tensor:
    return x * 2 + 1


def test_larger_calls_run_eagerly_with_one_warning(lab: Lab) -> None:
    graphed = cgraph.graphed(affine, sizes=SIZES)
    x = fresh(lab, 9, 3)
    with pytest.warns(UserWarning, match=r"larger than all sizes.*8.*Fix: add a size") as caught:
        assert torch.equal(graphed(x), affine(x))
        for rows in (9, 10, 31, 9, 10):
            x = fresh(lab, rows, 3)
            assert torch.equal(graphed(x), affine(x))
    assert len(caught) == 1
    assert numbers(graphed) == (0, 0, 6)
    assert all("larger than all sizes" in (key.reason or "") for key in graphed.report().keys)


def test_a_result_of_a_padded_call_has_only_the_rows_of_the_call(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda x: {"a": [x + 1, (x.sum(1), "word", 7)]}, sizes=SIZES)
    for rows in (3, 5, 7, 3):
        x = fresh(lab, rows, 4)
        result = graphed(x)
        assert torch.equal(result["a"][0], x + 1)
        total, word, number = result["a"][1]
        assert near(total, x.sum(1))
        assert (word, number) == ("word", 7)
        del result, total


def test_an_argument_that_is_written_and_returned_is_the_callers_own(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda x: x.mul_(2), sizes=[4])
    for rows in (3, 2, 4, 3):
        x = fresh(lab, rows, 5)
        expected = x * 2
        assert graphed(x) is x
        assert torch.equal(x, expected)


def test_a_held_result_of_a_padded_call_keeps_its_values_by_policy(lab: Lab) -> None:
    graphed = cgraph.graphed(affine, sizes=[8])
    held = []
    for rows in (3, 3, 5, 8, 2, 8, 3):
        x = fresh(lab, rows, 2)
        held.append((graphed(x), affine(x)))
    are_equal = all(torch.equal(*pair) for pair in held)
    del held, graphed
    assert are_equal


@pytest.mark.parametrize("more", [3, 5])
def test_a_held_result_of_a_padded_call_can_be_an_error(lab: Lab, more: int) -> None:
    graphed = cgraph.graphed(affine, sizes=[8])
    held = graphed(fresh(lab, 3, 2))
    expected = held.clone()
    with suppress(cgraph.errors.StateError):
        graphed(fresh(lab, more, 2))
    is_kept = torch.equal(held, expected)
    del held, graphed
    assert is_kept


def test_copies_of_padded_results_stay_as_they_are(lab: Lab) -> None:
    graphed = cgraph.graphed(affine, sizes=[8])
    held = []
    for rows in (3, 3, 5, 8, 2):
        x = fresh(lab, rows, 2)
        held.append((graphed(x), affine(x)))
    assert all(torch.equal(*pair) for pair in held)


def test_no_rows_give_a_result_without_rows(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda x: (x * 2).sum(1), sizes=SIZES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            assert graphed(fresh(lab, 0, 3)).shape == (0,)
    x = fresh(lab, 3, 3)
    assert near(graphed(x), (x * 2).sum(1))


def test_of_a_slice_with_gaps_are_padded(lab: Lab) -> None:
    graphed = cgraph.graphed(affine, sizes=[4, 8])
    for rows in (3, 7, 3):
        for x in (fresh(lab, rows, 6)[:, ::2], fresh(lab, 6, rows).t(), fresh(lab, 1, 6)):
            assert torch.equal(graphed(x), affine(x))
            given = x.expand(rows, 6) if len(x) == 1 else x
            assert torch.equal(graphed(given), affine(given))


def test_sizes_that_count_nothing_are_told_of_once(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda x: x * 2, sizes=[2, 4], dim=3)
    with pytest.warns(UserWarning, match=r"sizes= has no effect on \(x: .* dim=3") as caught:
        for rows in (2, 3, 3):
            x = fresh(lab, rows, 5)
            assert torch.equal(graphed(x), x * 2)
    assert len(caught) == 1


def test_a_dimension_that_an_argument_has_not_is_refused(lab: Lab) -> None:
    padded = cgraph.graphed(lambda x, y: (x + 1, y + 1), sizes=[4], dim={"x": 0, "y": 5})
    with pytest.raises(ArgumentError, match=r"rows of y are along dimension 5.*\(3, 2\)"):
        padded(fresh(lab, 3, 2), fresh(lab, 3, 2))
