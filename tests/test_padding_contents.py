"""What trials put into padding rows shows what any padding would change, and does no harm."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import cgraph
from cgraph._functions.padding.contents import trials
from graphed_calls import near, numbers
from lab import Lab, fresh


def furthest_difference(x: Tensor) -> Tensor:
    """Rows of one value come to 2, which the largest of the call hides."""
    return x * ((x[:, 0] - x[:, 1]) - 2).abs().max()


def furthest_norm(x: Tensor) -> Tensor:
    """Rows of one value are normalised to zeros, and come to 2."""
    normalised = torch.nn.functional.layer_norm(x, x.shape[1:])
    return x * (normalised[:, 0] - normalised[:, 1] - 2).abs().max()


@pytest.mark.parametrize("function", [furthest_difference, furthest_norm])
def test_padding_that_rows_of_the_first_call_hide_equals_eager(
    lab: Lab, function: Callable[[Tensor], Tensor]
) -> None:
    graphed = cgraph.graphed(function, sizes=[8])
    first = fresh(lab, 2, 4)
    # Further apart than rows of one value, with less than all that rows can come to.
    first[:, :2] = torch.tensor([1.0, 2.0], device=first.device)
    with pytest.warns(UserWarning, match="depends on what the padding rows contain"):
        assert near(graphed(first), function(first))
    for rows in (2, 3, 5) * 4:
        x = fresh(lab, rows, 4) / 8
        assert near(graphed(x), function(x)), rows


@pytest.mark.parametrize("rows", [3, 5, 7])
def test_probabilities_are_tried_out_with_probabilities(lab: Lab, rows: int) -> None:
    graphed = cgraph.graphed(lambda p: (torch.bernoulli(p), p * 2), sizes=[4, 8])
    for _ in range(3):
        p = fresh(lab, rows, 5).sigmoid()
        draws, double = graphed(p)
        assert set(draws.flatten().tolist()) <= {0.0, 1.0}
        assert torch.equal(double, p * 2)
    assert numbers(graphed) == (1, 3, 0)


def test_probabilities_of_a_loss_are_tried_out_with_probabilities(lab: Lab) -> None:
    def loss(p: Tensor, wanted: Tensor) -> Tensor:
        return torch.nn.functional.binary_cross_entropy(p, wanted, reduction="none")

    graphed = cgraph.graphed(loss, sizes=[4])
    for _ in range(3):
        p, wanted = fresh(lab, 3, 5).sigmoid(), fresh(lab, 3, 5).sigmoid()
        assert near(graphed(p, wanted), loss(p, wanted))
    assert numbers(graphed) == (1, 3, 0)


def test_numbers_from_0_to_1_hide_no_padding_where_none_are_drawn(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda x: x - x.amax(), sizes=[8])
    first = torch.eye(4, device=lab.device)[:3]
    with pytest.warns(UserWarning, match="depends on what the padding rows contain"):
        assert torch.equal(graphed(first), first - 1)
    for _ in range(3):
        x = -fresh(lab, 3, 4).abs() - 1
        assert torch.equal(graphed(x), x - x.amax())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_numbers_that_are_infinite_or_none_do_not_keep_a_call_from_its_graph(
    lab: Lab, dtype: torch.dtype
) -> None:
    graphed = cgraph.graphed(lambda x, bias: (x + bias).softmax(-1), sizes=[4])
    for _ in range(3):
        x, bias = fresh(lab, 3, 5).to(dtype), fresh(lab, 3, 5).to(dtype)
        bias[:, 2], x[0, 1] = -torch.inf, torch.finfo(dtype).max
        assert torch.equal(graphed(x, bias), (x + bias).softmax(-1))
    assert numbers(graphed) == (1, 3, 0)


def test_a_break_that_refuses_numbers_of_a_trial_alone_takes_those_of_calls(lab: Lab) -> None:
    @cgraph.eager_break
    def checked(x: Tensor) -> Tensor:
        if float(x.abs().max()) > 100:
            raise ValueError("too large")
        return x * 3

    graphed = cgraph.graphed(lambda x: checked(x + 1) * 2, sizes=[4])
    for rows in (3, 2, 3):
        x = fresh(lab, rows, 5).clamp(-90, 90)
        x[0, 0] = 90
        assert torch.equal(graphed(x), (x + 1) * 3 * 2)
    assert numbers(graphed) == (1, 3, 0)
    with pytest.raises(ValueError, match="too large"):
        graphed(fresh(lab, 3, 5) + 200)


def test_a_call_whose_padding_raises_runs_eagerly_and_says_so(lab: Lab) -> None:
    @cgraph.eager_break
    def checked(x: Tensor) -> Tensor:
        if float(x.abs().sum(1).min()) == 0:
            raise ValueError("a row of zeros")
        return x * 3

    graphed = cgraph.graphed(lambda x: checked(x * 2), sizes=[4])
    graphed.capture(fresh(lab, 4, 5))
    with pytest.warns(UserWarning, match="it raises ValueError: a row of zeros") as caught:
        for rows in (3, 2, 3):
            x = fresh(lab, rows, 5)
            assert torch.equal(graphed(x), x * 2 * 3)
    assert "pad=" in str(caught[0].message)
    repeated = cgraph.graphed(lambda x: checked(x * 2), sizes=[4], pad="repeat")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rows in (3, 2, 3):
            x = fresh(lab, rows, 5)
            assert torch.equal(repeated(x), x * 2 * 3)


@pytest.mark.parametrize("rows", [1, 3])
def test_the_last_two_trials_differ_in_whole_numbers_alone(rows: int) -> None:
    (numbers, floats), (other_numbers, other_floats) = trials("zero", rows)[-2:]
    assert numbers != other_numbers
    assert floats == other_floats
