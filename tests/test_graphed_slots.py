"""State that functions find in objects with slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from graphed_calls import states
from lab import Lab, fresh


@dataclass(slots=True)
class State:
    """What belongs to a request."""

    k: Tensor
    count: int = 0


class Engine:
    """Has the state of the request that is served."""

    __slots__ = ("__dict__", "state")

    def __init__(self, state: State) -> None:
        self.state = state

    def run(self, x: Tensor) -> Tensor:
        self.state.k.add_(x)
        return self.state.k * 2


class Bare:
    """Has it itself, and nothing else."""

    __slots__ = ("k",)

    def __init__(self, k: Tensor) -> None:
        self.k = k

    def run(self, x: Tensor) -> Tensor:
        self.k.add_(x)
        return self.k * 2


class Holding(nn.Module):
    def __init__(self, state: State) -> None:
        super().__init__()
        self.state = state

    def forward(self, x: Tensor) -> Tensor:
        self.state.k.add_(x)
        return self.state.k * 2


def of_engine(state: State) -> Callable[[Tensor], Tensor]:
    return Engine(state).run


@pytest.mark.parametrize("find", [of_engine, Holding])
def test_an_object_with_slots_that_is_replaced_is_noticed(lab: Lab, find: Any) -> None:
    state = State(fresh(lab, 4))
    run = find(state)
    owner = run if isinstance(run, Holding) else run.__self__
    graphed = cgraph.graphed(run)
    for _ in range(3):
        for _ in range(2):
            x = fresh(lab, 4)
            wanted = state.k + x
            assert torch.equal(graphed(x), wanted * 2)
            assert torch.equal(state.k, wanted)
        owner.state = state = State(fresh(lab, 4))
    assert states(graphed) == ["captured"]


def test_a_method_of_an_object_with_nothing_but_slots_finds_them(lab: Lab) -> None:
    bare = Bare(fresh(lab, 4))
    graphed = cgraph.graphed(bare.run)
    for turn in range(4):
        if turn == 2:
            bare.k = fresh(lab, 4)
        x = fresh(lab, 4)
        wanted = bare.k + x
        assert torch.equal(graphed(x), wanted * 2)
        assert torch.equal(bare.k, wanted)
