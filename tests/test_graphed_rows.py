"""Which rows calls have, and what the first padded call of a size does with them."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import cgraph
from cgraph.errors import ArgumentError
from graphed_calls import near, resetting, states
from lab import Lab, fresh


class Pair(NamedTuple):
    """What pytree knows and native entries do not."""

    factor: int


def curved(x: Tensor) -> Tensor:
    return torch.tanh(x) * 2


@pytest.mark.filterwarnings("ignore:.*still referenced:UserWarning")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"check_padding": False},
        {"pad": "repeat"},
        {"on_held": "clone"},
        {"outputs": "clone"},
        {"measure": False},
    ],
    ids=str,
)
def test_a_padded_call_may_be_given_rows_of_the_last_result(
    lab: Lab, grad: bool, options: dict[str, Any]
) -> None:
    graphed = cgraph.graphed(curved, sizes=[4, 8], **options)
    with torch.set_grad_enabled(grad):
        rows = graphed(fresh(lab, 8, 4))
        for count in (7, 6, 3):
            rows = rows[:count]
            wanted = curved(rows.detach().clone())
            rows = graphed(rows.detach() if not grad else rows)
            assert near(rows, wanted)
    assert set(states(graphed)) == {"captured"}


def test_a_padded_call_may_be_given_what_another_size_has_returned(lab: Lab) -> None:
    graphed = cgraph.graphed(curved, sizes=[4, 8], on_held="ignore")
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


def test_capture_ahead_knows_which_tensors_have_no_rows(lab: Lab) -> None:
    graphed = cgraph.graphed(two, sizes=[4, 8])
    with torch.no_grad():
        table = fresh(lab, 3)
        graphed(fresh(lab, 8, 4), table)
        graphed.capture(fresh(lab, 3, 4), table, progress=False).freeze()
        x = fresh(lab, 2, 4)
        assert all(map(torch.equal, graphed(x, table), two(x, table)))


@pytest.mark.filterwarnings("ignore:.*runs eagerly for:UserWarning")
def test_no_other_rows_than_those_of_sizes_are_captured_after_too_many_keys(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda x, factor: x * factor, sizes=[4])
    with torch.no_grad():
        for factor in range(8):
            graphed(fresh(lab, 4, 2), float(factor))
        for _ in range(6):
            x = fresh(lab, 3, 2)
            assert torch.equal(graphed(x, 99.0), x * 99)
    (last,) = (key for key in graphed.report().keys if "99" in key.key)
    assert last.state == "captured" and "[4, 2]" in last.key


def test_a_padded_call_may_be_given_one_row_of_the_last_result_many_times(lab: Lab) -> None:
    graphed = cgraph.graphed(curved, sizes=[4], on_held="ignore")
    with torch.no_grad():
        for _ in range(3):
            row = graphed(fresh(lab, 4, 4))[:1].expand(3, 4)
            wanted = curved(row.clone())
            assert near(graphed(row), wanted)


@pytest.mark.parametrize("when", range(1, 12))
def test_a_function_may_reset_itself_in_any_call_of_a_padded_capture(lab: Lab, when: int) -> None:
    graphed, _ = resetting(when, sizes=[4], warmup=2)
    with torch.no_grad():
        for rows in (3, 2, 4, 3):
            x = fresh(lab, rows, 2)
            assert torch.equal(graphed(x), x * 3)
    assert set(states(graphed)) == {"captured"}


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


@pytest.mark.filterwarnings("ignore:.*runs eagerly for:UserWarning")
def test_a_call_is_not_padded_again_once_its_size_runs_eagerly(lab: Lab) -> None:
    sizes: list[int] = []

    def pad(x: Tensor, size: int) -> Tensor:
        sizes.append(size)
        return torch.cat([x, x.new_zeros(size - x.shape[0], *x.shape[1:])])

    def refused(x: Tensor) -> Tensor:
        return x * x.sum().item()

    graphed = cgraph.graphed(refused, sizes=[8], pad=pad)
    with torch.no_grad():
        for rows in (3, 3, 3, 5, 5, 5, 8, 8):
            x = fresh(lab, rows, 2)
            assert torch.equal(graphed(x), refused(x))
    assert sizes == [8]
    (whole,) = graphed.report().keys
    assert "[8, 2]" in whole.key and whole.state == "eager" and whole.eager_calls == 8


def test_one_row_that_is_repeated_is_tried_out_once(lab: Lab) -> None:
    calls: list[int] = []

    def counted(x: Tensor, pair: Pair) -> Tensor:
        calls.append(x.shape[0])
        return x * pair.factor

    graphed = cgraph.graphed(counted, sizes=[4], pad="repeat")
    with torch.no_grad():
        for turn in range(5):
            x = fresh(lab, 1, 2)
            assert torch.equal(graphed(x, Pair(2)), x * 2)
            if turn == 0:
                known = len(calls)
    assert len(calls) == known


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
