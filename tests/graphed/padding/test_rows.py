"""The rows of calls, and their use in the first padded call of a size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import cgraph
from cgraph.errors import ArgumentError
from graphed_calls import near, states
from lab import Lab, fresh


def curved(x: Tensor) -> Tensor:
    return torch.tanh(x) * 2


def test_a_padded_call_may_be_given_what_another_size_has_returned(lab: Lab) -> None:
    graphed = cgraph.graphed(curved, sizes=[4, 8])
    with torch.no_grad():
        graphed.capture(fresh(lab, 8, 4), progress=False)
        for count, rows in ((8, 3), (4, 3), (8, 7), (4, 2)):
            result = graphed(fresh(lab, count, 4))
            wanted = curved(result[:rows].clone())
            assert near(graphed(result[:rows]), wanted)


def two(x: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    return x * 2, table + 1


def test_capture_ahead_shows_which_tensors_have_no_rows(lab: Lab) -> None:
    graphed = cgraph.graphed(two, sizes=[8])
    with torch.no_grad():
        table = fresh(lab, 3)
        graphed.capture(fresh(lab, 8, 4), table, progress=False).freeze()
        for rows in (5, 3):
            x = fresh(lab, rows, 4)
            assert all(map(torch.equal, graphed(x, table), two(x, table)))


def test_a_padded_call_may_be_given_one_row_of_the_last_result_many_times(lab: Lab) -> None:
    graphed = cgraph.graphed(curved, sizes=[4])
    with torch.no_grad():
        for _ in range(3):
            row = graphed(fresh(lab, 4, 4))[:1].expand(3, 4)
            wanted = curved(row.clone())
            assert near(graphed(row), wanted)


@pytest.mark.filterwarnings("ignore:.*runs eagerly for:UserWarning")
def test_calls_are_padded_again_once_their_size_is_captured_ahead(lab: Lab) -> None:
    is_broken = True

    def sometimes(x: Tensor) -> Tensor:
        return x * x.sum().item() if is_broken else x * 2

    graphed = cgraph.graphed(sometimes, sizes=[8])
    with torch.no_grad():
        for rows in (3, 5):
            x = fresh(lab, rows, 2)
            assert torch.equal(graphed(x), sometimes(x))
        is_broken = False
        graphed.capture(fresh(lab, 8, 2), progress=False)
        before = graphed.report().replays
        for rows in (3, 5):
            x = fresh(lab, rows, 2)
            assert torch.equal(graphed(x), x * 2)
    assert graphed.report().replays == before + 2


def test_a_function_without_rows_says_so_again_after_a_reset(lab: Lab) -> None:
    graphed = cgraph.graphed(curved, sizes=[8], dim=3)
    for _ in range(2):
        with pytest.warns(UserWarning, match="has no effect"):
            graphed(fresh(lab, 2))
        graphed.reset()


def test_sizes_of_a_capture_have_nothing_to_do_with_the_environment(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphed = cgraph.graphed(curved, debug="")
    monkeypatch.setenv("CGRAPH_DEBUG", "nothing of the kind")
    graphed.capture(fresh(lab, 4), sizes=[2, 4], progress=False)
    assert states(graphed) == ["captured"] * 2
    with pytest.raises(ArgumentError, match=r"sizes is \[0\]"):
        graphed.capture(fresh(lab, 4), sizes=[0])
