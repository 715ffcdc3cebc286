"""Padding that would show in gradients and in state beside random numbers is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import cgraph
from cgraph._padding import comparison
from lab import Lab, fresh


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
