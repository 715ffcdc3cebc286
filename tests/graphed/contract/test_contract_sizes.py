"""The contract, "Sizes": each test quotes its sentence."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from cgraph.errors import EagerWarning
from contract_calls import counted, equal, runs_of
from graphed_calls import numbers, quiet
from lab import Lab, fresh

ROWS: dict[str, Callable[[Tensor], Any]] = {
    "one": lambda x: x * 2 + 1,
    "tuple": lambda x: (x * 2, x.sum(-1)),
    "nested": lambda x: {"a": [x.tanh(), (x - 1,)], "n": 3},
    "part": lambda x: (x * 2)[:, 1:],
    "whole": lambda x: (x * 2, torch.ones_like(x[0]), None),
}


@pytest.mark.parametrize(
    "pad",
    ["zero", "repeat", lambda x, n: torch.cat([x, x[:1]] * n)[:n]],
    ids=["zero", "repeat", "function"],
)
@pytest.mark.parametrize("outputs", ["fresh", "static"])
@pytest.mark.parametrize("case", ROWS)
def test_calls_are_padded_up_and_cut_on_return(lab: Lab, case: str, outputs: str, pad: Any) -> None:
    """**Sizes**: padded up, cut on return."""
    counting, counter = counted(ROWS[case])
    graphed = cgraph.graphed(counting, sizes=[2, 5], pad=pad, outputs=outputs)
    with torch.no_grad():
        for rows in (3, 1, 4, 2, 5, 1, 3, 4):
            x = fresh(lab, rows, 3)
            equal(graphed(x), ROWS[case](x))
        before = runs_of(counter)
        for rows in (3, 1, 4, 2, 5, 1, 3, 4):
            x = fresh(lab, rows, 3)
            equal(graphed(x), ROWS[case](x))
    assert runs_of(counter) == before
    assert graphed.report().captured == 2


def test_call_counts_are_those_of_a_size(lab: Lab) -> None:
    """Call counts are per key; **sizes**: padded up: all calls of a size have one key."""
    counting, counter = counted(lambda x: x * 2)
    graphed = cgraph.graphed(counting, sizes=[4, 8])
    runs = []
    with torch.no_grad():
        for rows in (3, 2, 2, 4, 3, 7, 5, 8, 6):
            before, x = runs_of(counter), fresh(lab, rows, 3)
            equal(graphed(x), x * 2)
            runs.append(runs_of(counter) - before)
    assert runs[0] == runs[5] == 1, runs
    assert runs[1] == runs[6] == 2, runs
    assert runs[2:5] == [0, 0, 0] and runs[7:] == [0, 0], runs
    assert numbers(graphed) == (2, 7, 2)


def test_a_size_of_its_own_rows_captures_without_a_comparison(lab: Lab) -> None:
    """… the first *padded* call of each size is compared with an eager call once."""
    counting, counter = counted(lambda x: x * 2)
    graphed = cgraph.graphed(counting, sizes=[4])
    runs = []
    with torch.no_grad():
        for rows in (4, 4, 4, 3, 2, 1, 1, 3):
            before, x = runs_of(counter), fresh(lab, rows, 3)
            equal(graphed(x), x * 2)
            runs.append(runs_of(counter) - before)
    # One row of padding shows nothing that several do not, and the other way round.
    assert runs == [1, 1, 0, 1, 0, 1, 0, 0]


SHOWS: dict[str, Callable[[Tensor], Any]] = {
    "mean": lambda x: x - x.mean(0),
    "softmax": lambda x: x.softmax(0),
    "count": lambda x: x / x.shape[0],
    "number": lambda x: (x * 2, x.shape[0]),
    "last": lambda x: x[-1] * 2,
    "flat": lambda x: x.reshape(-1) * 2,
}


@pytest.mark.parametrize("case", SHOWS)
def test_a_call_whose_padding_shows_in_its_result_runs_eagerly(lab: Lab, case: str) -> None:
    """… the first padded call of each size is compared with an eager call once."""
    graphed = cgraph.graphed(SHOWS[case], sizes=[4])
    with quiet() as caught, torch.no_grad():
        for rows in (3, 2, 1, 3, 2, 3, 1):
            x = fresh(lab, rows, 3)
            equal(graphed(x), SHOWS[case](x))
    assert {one.category for one in caught} == {EagerWarning}
    assert "padding shows" in str(caught[0].message)


class Norm(nn.Module):
    """A module that writes statistics of all rows, and returns none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.total.add_(x.sum(0))
        self.count.add_(x.shape[0])
        return x * 2


class Total(Norm):
    """A module whose statistics are the same with rows of zeros."""

    def forward(self, x: Tensor) -> Tensor:
        self.total.add_(x.abs().amax(0))
        return x * 2


@pytest.mark.parametrize("kind", [Norm, Total])
def test_written_state_is_as_eager_and_compared(lab: Lab, kind: type[nn.Module]) -> None:
    """… written state included."""
    net = kind().to(lab.device)
    twin = copy.deepcopy(net)
    graphed = cgraph.graphed(net, sizes=[4])
    with quiet() as caught, torch.no_grad():
        for rows in (3, 2, 4, 1, 4, 3, 2):
            x = fresh(lab, rows, 3)
            equal(graphed(x), twin(x))
            equal(net.state_dict(), twin.state_dict())
    assert [one.category for one in caught] == [EagerWarning] * (kind is Norm)
    assert numbers(graphed)[1] >= (1 if kind is Norm else 5)


def test_a_written_argument_is_as_eager(lab: Lab) -> None:
    """… written state included."""

    def function(x: Tensor, into: Tensor) -> Tensor:
        into.add_(x)
        return into * 2

    graphed = cgraph.graphed(function, sizes=[4])
    with torch.no_grad():
        for rows in (3, 2, 4, 1, 4, 3, 2):
            x, into = fresh(lab, rows, 3), fresh(lab, rows, 3)
            twin = into.clone()
            equal(graphed(x, into), function(x, twin))
            equal(into, twin)
    assert graphed.report().captured == 1


@pytest.mark.parametrize("moves", [False, True])
def test_a_written_argument_without_rows_is_as_eager(lab: Lab, moves: bool) -> None:
    """A tensor … that is written … is static; … **sizes**: padded up … written state included."""

    def function(x: Tensor, into: Tensor) -> Tensor:
        into.add_(x.sum(0))
        return x * 2

    graphed = cgraph.graphed(function, sizes=[4], pad="zero")
    into, twin = (torch.zeros(5, device=lab.device) for _ in range(2))
    with torch.no_grad():
        for number, rows in enumerate((4, 4, 4, 4, 3, 2, 4, 3, 3)):
            if moves and number > 3:
                into = into.clone()
            x = fresh(lab, rows, 5)
            equal(graphed(x, into), function(x, twin))
            torch.testing.assert_close(into, twin)
    assert numbers(graphed)[1] >= 7


def test_random_numbers_of_a_padded_function_are_never_wrong(lab: Lab) -> None:
    """… the first padded call of each size is compared with an eager call once."""
    graphed = cgraph.graphed(lambda x: x * torch.rand(3, device=x.device), sizes=[4])
    with torch.no_grad():
        for number, rows in enumerate((3, 2, 4, 1, 4, 3, 2)):
            x = fresh(lab, rows, 3)
            torch.manual_seed(number)
            found = graphed(x)
            torch.manual_seed(number)
            equal(found, x * torch.rand(3, device=x.device))


def test_without_check_padding_nothing_is_compared(lab: Lab) -> None:
    """(`check_padding=False` trusts you)."""
    counting, counter = counted(lambda x: x.sum(0) / x.shape[0])
    graphed = cgraph.graphed(counting, sizes=[4], pad="zero", check_padding=False)
    with torch.no_grad():
        x = fresh(lab, 3, 3)
        equal(graphed(x), x.sum(0) / 3)
        for _ in range(4):
            x = fresh(lab, 3, 3)
            found = graphed(x)
            torch.testing.assert_close(found, x.sum(0) / 4)
    assert runs_of(counter) == 2


def test_more_rows_than_all_sizes_run_eagerly(lab: Lab) -> None:
    """**Sizes**: padded up: no size is above these."""
    graphed = cgraph.graphed(lambda x: x * 2, sizes=[2, 4])
    with quiet() as caught, torch.no_grad():
        for _ in range(3):
            x = fresh(lab, 6, 3)
            equal(graphed(x), x * 2)
    assert [one.category for one in caught] == [EagerWarning]
    assert "sizes" in str(caught[0].message)


def test_gradients_of_padded_calls_are_those_of_eager(lab: Lab) -> None:
    """**Sizes**: padded up, cut on return."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).to(lab.device)
    twin = copy.deepcopy(net)
    graphed = cgraph.graphed(net, sizes=[4])
    for rows in (3, 2, 4, 1, 4, 3, 2):
        x, other = fresh(lab, rows, 3).requires_grad_(), None
        other = x.detach().clone().requires_grad_()
        found, expected = graphed(x), twin(other)
        torch.testing.assert_close(found, expected)
        found.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close(x.grad, other.grad)
        for one, its in zip(net.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(one.grad, its.grad)
    assert graphed.report().captured == 1


def test_may_be_along_other_dimensions_by_name(lab: Lab) -> None:
    """**Sizes**: padded up, cut on return."""
    graphed = cgraph.graphed(lambda x, w: x * w[:, None], sizes=[4], dim={"x": 1})
    with torch.no_grad():
        for rows in (3, 2, 4, 1, 3):
            x, w = fresh(lab, 2, rows), fresh(lab, 2)
            equal(graphed(x, w), x * w[:, None])
    assert graphed.report().captured == 1
