"""Padding is compared before it is trusted; where it shows, calls run eagerly."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import cgraph
from cgraph._padding import comparison
from graphed_calls import near, states
from lab import Lab, fresh


def affine(x: Tensor) -> Tensor:
    return x * 2 + 1


def test_statistics_of_a_batch_are_those_of_eager(lab: Lab) -> None:
    graphed_norm, eager_norm = (nn.BatchNorm1d(3, device=lab.device) for _ in range(2))
    graphed = cgraph.graphed(graphed_norm, sizes=[4, 8])
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for rows in (3, 7, 4, 5, 3, 8):
            x = fresh(lab, rows, 3) + 5
            assert near(graphed(x), eager_norm(x))
            for one, other in zip(graphed_norm.buffers(), eager_norm.buffers(), strict=True):
                assert near(one, other)


def test_what_the_function_raises_in_the_trial_comes_out_and_the_next_call_works(lab: Lab) -> None:
    is_broken = False

    def function(x: Tensor) -> Tensor:
        if is_broken:
            raise KeyError("mine")
        return x * 2

    graphed = cgraph.graphed(function, sizes=[4]).capture(fresh(lab, 4, 2))
    is_broken = True
    with pytest.raises(KeyError, match="mine"):
        graphed(fresh(lab, 3, 2))
    is_broken = False
    x = fresh(lab, 3, 2)
    assert torch.equal(graphed(x), x * 2)


# On a GPU other numbers of rows draw other random numbers.
@pytest.mark.filterwarnings("ignore:.*padding shows")
def test_the_trial_of_a_size_draws_no_random_number_of_the_caller(lab: Lab) -> None:
    function = nn.Dropout(0.5)
    graphed = cgraph.graphed(function, sizes=[4])
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    x = fresh(lab, 3, 6)
    torch.random.set_rng_state(before)
    first = graphed(x).clone()
    torch.random.set_rng_state(before)
    if lab.device == "cuda":
        torch.cuda.manual_seed(5)
        first = graphed(x).clone()
        torch.cuda.manual_seed(5)
    assert torch.equal(graphed(x), first)


def test_a_function_that_pads_wrongly_is_named(lab: Lab) -> None:
    graphed = cgraph.graphed(affine, sizes=[4], pad=lambda x, size: x, on_fail="raise")
    with pytest.raises(
        cgraph.errors.ArgumentError, match=r"pad returned .*\[3, 2\].*expected .*\[4, 2\]"
    ):
        graphed(fresh(lab, 3, 2))


def test_that_differ_from_replay_to_replay_anyway_are_padded(lab: Lab) -> None:
    place = torch.arange(4096).to(lab.device) % 8

    # On a GPU the sums are made in another order each time.
    @cgraph.graphed(sizes=[64], on_fail="raise")
    def spread(x: Tensor) -> Tensor:
        return x.new_zeros(x.shape[0], 8).index_add_(1, place, x)

    for rows in (60, 61, 62, 63):
        x = fresh(lab, rows, 4096) * 1000
        eager = x.new_zeros(rows, 8).index_add_(1, place, x)
        assert_close(spread(x), eager, rtol=1e-3, atol=1.0)
    assert states(spread) == ["captured"]


def test_a_call_that_fails_teaches_nothing_about_rows(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda x, mask: x * mask, sizes=[4])
    with pytest.raises(RuntimeError, match="must match"):
        graphed(fresh(lab, 3), fresh(lab, 2))
    for rows in (3, 2, 4):
        x, mask = fresh(lab, rows), fresh(lab, rows)
        assert torch.equal(graphed(x, mask), x * mask)
    assert "captured" in states(graphed)


@pytest.mark.parametrize(
    "rows", [[(3, 4), (3, 3), (2, 2)], [(4, 4), (3, 4), (3, 3)], [(3, 4), (2, 2), (3, 2)]]
)
def test_what_a_trial_has_shown_is_of_the_tensors_that_were_padded(
    lab: Lab, rows: list[tuple[int, int]]
) -> None:
    def scaled(x: Tensor, weights: Tensor) -> Tensor:
        return x * weights.mean()

    graphed = cgraph.graphed(scaled, sizes=[4, 8])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for first, second in [*rows, *rows]:
            x, weights = fresh(lab, first), fresh(lab, second)
            assert_close(graphed(x, weights), scaled(x, weights))


@pytest.mark.parametrize("first", [3, 4])
def test_padding_that_shows_in_state_is_refused_beside_random_numbers(lab: Lab, first: int) -> None:
    # So many columns that no two calls drop the same ones.
    shift, total = torch.full((99,), 50.0, device=lab.device), torch.zeros(99, device=lab.device)
    drop = nn.Dropout(0.02)

    def run(x: Tensor) -> Tensor:
        y = drop(x) + shift
        total.copy_(y.sum(0))
        return y

    function = cgraph.graphed(run, sizes=[4])
    with pytest.warns(UserWarning, match="padding shows"):
        for rows in (first, 3):
            y = function(fresh(lab, rows, 99))
            torch.testing.assert_close(total, y.sum(0))


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
@pytest.mark.parametrize("where", ["bytes_of", "rows_in"])
def test_a_comparison_without_memory_leaves_all_as_it_was_and_runs_eagerly(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    total, calls = torch.zeros(5, device=lab.device), [0]

    def run(x: Tensor) -> Tensor:
        total.add_(x[0])
        return x * 2

    def full(*_: object) -> Tensor:
        calls[0] += 1
        raise torch.OutOfMemoryError

    function = cgraph.graphed(run, sizes=[4])
    monkeypatch.setattr(comparison, where, full)
    expected = total.clone()
    for _ in range(5):
        x = fresh(lab, 3, 5)
        expected += x[0]
        torch.testing.assert_close(function(x), x * 2)
        torch.testing.assert_close(total, expected)
    assert calls == [1]
    assert any("no memory" in (key.reason or "") for key in function.report().keys)


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
def test_padding_shows_beside_infinite_elements(lab: Lab) -> None:
    def counted(x: Tensor) -> Tensor:
        most = (x == x.max()).sum().float()
        return torch.stack([torch.log(most - 1), most])

    function = cgraph.graphed(counted, sizes=[4], pad="repeat")
    for _ in range(4):
        x = torch.tensor([1.0, 2.0], device=lab.device)
        assert torch.equal(function(x), counted(x))


def test_elements_that_are_infinite_on_both_sides_count_as_equal(lab: Lab) -> None:
    right = torch.tensor([-torch.inf, 100.0, 0.01], device=lab.device)
    found = torch.tensor([-torch.inf, 100.0, 0.011], device=lab.device)
    assert comparison._wrong(found, right) is None
    assert comparison._wrong(found.abs(), right) is not None
