"""Python numbers that a function changes, which no replay does."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import cgraph
from graphed_calls import near, states
from lab import Lab, fresh


class Engine:
    """A counter of its calls that computes with the count."""

    def __init__(self) -> None:
        self.place = 1

    def step(self, x: Tensor) -> Tensor:
        self.place += 1
        return x * self.place


def test_a_number_that_only_the_first_call_sets_is_no_hindrance(lab: Lab) -> None:
    class Lazy:
        def __init__(self) -> None:
            self.width = 0

        def step(self, x: Tensor) -> Tensor:
            self.width = self.width or x.shape[-1]
            return x * self.width

    lazy = Lazy()
    graphed = cgraph.graphed(lazy.step)
    for _ in range(3):
        x = fresh(lab, 5)
        assert torch.equal(graphed(x), x * 5)
    assert states(graphed) == ["captured"]


def test_what_the_first_call_takes_away_is_there_for_it(lab: Lab) -> None:
    known, space = {"scale": 5}, SimpleNamespace(scale=3)

    def step(x: Tensor) -> Tensor:
        scale = space.scale if hasattr(space, "scale") else 1
        vars(space).pop("scale", None)
        return x * known.pop("scale", 1) * scale

    graphed = cgraph.graphed(step)
    for scale in (15, 1, 1, 1):
        x = fresh(lab, 3)
        assert near(graphed(x), x * scale)
    assert states(graphed) == ["captured"]


def test_what_only_the_first_call_does_is_done_by_it(lab: Lab) -> None:
    class Once:
        is_first = True

        def __init__(self) -> None:
            self.is_first = True

        def step(self, x: Tensor) -> Tensor:
            if self.is_first:
                self.is_first = False
                return x * 10
            return x * 2

    graphed = cgraph.graphed(Once().step)
    for scale in (10, 2, 2, 2):
        x = fresh(lab, 3)
        assert torch.equal(graphed(x), x * scale)
    assert states(graphed) == ["captured"]


def test_what_a_break_counts_is_counted_by_replays(lab: Lab) -> None:
    engine = Engine()

    @cgraph.eager_break
    def counted(x: Tensor) -> Tensor:
        engine.place += 1
        return x + engine.place

    graphed = cgraph.graphed(lambda x: counted(x * 2) * 3)
    graphed(fresh(lab, 3))
    for _ in range(3):
        x, before = fresh(lab, 3), engine.place
        assert near(graphed(x), (x * 2 + before + 1) * 3)
        assert engine.place == before + 1
    assert states(graphed) == ["captured"]


@pytest.mark.parametrize("grad", [True, False])
def test_what_the_first_call_sets_up_from_its_data_is_set_up(lab: Lab, grad: bool) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(3))
            self.is_ready = False

        def forward(self, x: Tensor) -> Tensor:
            if not self.is_ready:
                self.shift.data.copy_(-x.detach().mean(0))
                self.is_ready = True
            return x + self.shift

    mine = Normed().to(lab.device)
    eager = copy.deepcopy(mine)
    graphed = cgraph.graphed(mine)
    with torch.set_grad_enabled(grad):
        for _ in range(4):
            x = fresh(lab, 4, 3)
            assert near(graphed(x), eager(x))
            assert near(mine.shift, eager.shift)
    assert states(graphed) == ["captured"]


@pytest.mark.parametrize("is_method", [True, False])
def test_what_a_call_counts_before_it_raises_stays_counted(lab: Lab, is_method: bool) -> None:
    class Loader:
        calls = 0

        def step(self, x: Tensor) -> Tensor:
            self.calls = min(self.calls + 1, 2)
            if self.calls == 1:
                raise KeyError("not ready")
            return x * 2

    loader = Loader()
    loader.calls = 0
    graphed = cgraph.graphed(loader.step if is_method else lambda x: loader.step(x))
    with pytest.raises(KeyError):
        graphed(fresh(lab, 3))
    for _ in range(4):
        x = fresh(lab, 3)
        assert torch.equal(graphed(x), x * 2)
    assert states(graphed) == ["captured"]
