"""Breaks in functions whose results require gradients: the way of the gradients, and refusals."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from broken import raising_in, scaled
from cgraph import eager_break
from flow_calls import Around, check, step, twins
from graphed_calls import same_gradients
from lab import Lab
from networks import leaf


def test_sizes_with_breaks_are_captured_ahead_and_frozen(lab: Lab) -> None:
    graphed, mine, eager = twins(lab, Around(scaled), sizes=[2, 4])
    before = copy.deepcopy(mine.state_dict())
    graphed.capture(leaf(lab, 4, 6), progress=False).freeze()
    assert all(torch.equal(one, before[name]) for name, one in mine.state_dict().items())
    assert all(one.grad is None for one in mine.parameters())
    for rows in (4, 2, 4):
        check(graphed, mine, eager, leaf(lab, rows, 6))
    assert graphed.report().replays == 3


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_what_a_break_raises_comes_out_and_the_next_call_works(lab: Lab, where: str) -> None:
    raises: list[str] = []
    graphed, mine, eager = twins(lab, Around(eager_break(raising_in(raises))))
    for _ in range(2):
        check(graphed, mine, eager, leaf(lab, 4, 6))
        raises.append(where)
        with pytest.raises(KeyError, match="mine"):
            step(graphed, leaf(lab, 4, 6))
        raises.clear()
        mine.zero_grad()
        eager.zero_grad()
    check(graphed, mine, eager, leaf(lab, 4, 6))
    assert graphed.report().captured == 1


def test_a_break_that_raises_in_its_first_call_leaves_nothing(lab: Lab) -> None:
    raises = [True]

    def broken(x: Tensor) -> Tensor:
        if raises:
            raise KeyError("mine")
        return x * 2

    graphed, mine, eager = twins(lab, Around(eager_break(broken)))
    with pytest.raises(KeyError, match="mine"):
        step(graphed, leaf(lab, 4, 6))
    raises.clear()
    for _ in range(2):
        check(graphed, mine, eager, leaf(lab, 4, 6))
    assert graphed.report().captured == 1


def test_a_backward_pass_that_failed_half_way_leaves_nothing_to_the_next_one(lab: Lab) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.one, self.other = (nn.Linear(6, 6) for _ in range(3))

        @eager_break
        def left(self, x: Tensor) -> Tensor:
            return self.one(x)

        @eager_break
        def right(self, x: Tensor) -> Tensor:
            y = self.other(x)
            y.register_hook(raising)
            return y

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = self.first(x)
            return self.left(x) + 0, self.right(x) + 0

    def raising(_: Tensor) -> None:
        if raises:
            raise KeyError("mine")

    raises: list[bool] = []
    graphed, mine, eager = twins(lab, Two())
    for turn in range(4):
        x = leaf(lab, 4, 6)
        if turn in (1, 2):
            raises.append(True)
            with pytest.raises(KeyError, match="mine"):
                graphed(x)[1].sum().backward()
            raises.clear()
        for run, net in ((graphed, mine), (eager, eager)):
            net.zero_grad()
            sum(one.square().sum() for one in run(x)).backward()
        assert same_gradients(mine, eager)
    assert graphed.report().captured == 1
