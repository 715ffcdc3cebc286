"""State that functions find in objects with slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from graphed_calls import near, numbers, quiet, states
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


def of_closure(state: State) -> Callable[[Tensor], Tensor]:
    return lambda x: state.k.add_(x) * 2


def of_list(state: State) -> Callable[[Tensor], Tensor]:
    held = [{"now": state}]

    def run(x: Tensor) -> Tensor:
        return held[0]["now"].k.add_(x) * 2

    return run


@pytest.mark.parametrize("find", [of_engine, of_closure, of_list, Holding])
@pytest.mark.parametrize("warmup", [0, 1, 3])
def test_a_cache_in_a_slot_is_written_once_and_followed(lab: Lab, find: Any, warmup: int) -> None:
    state = State(fresh(lab, 4))
    graphed = cgraph.graphed(find(state), warmup=warmup)
    for turn in range(6):
        if turn == 3:
            state.k = fresh(lab, 4)
        x = fresh(lab, 4)
        wanted = state.k + x
        assert torch.equal(graphed(x), wanted * 2)
        assert torch.equal(state.k, wanted)
    (key,) = graphed.report().keys
    assert sum(one.count for one in key.rerecorded) == 1


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


def test_a_function_that_counts_in_a_slot_runs_eagerly(lab: Lab) -> None:
    state = State(fresh(lab, 4))

    def run(x: Tensor) -> Tensor:
        state.count += 1
        return x * state.count + state.k

    graphed = cgraph.graphed(run)
    with quiet() as caught:
        for turn in range(1, 9):
            x = fresh(lab, 4)
            assert near(graphed(x), x * turn + state.k)
            assert state.count == turn
    assert "changes count from" in str(caught[0].message)
    assert states(graphed) == ["eager"]


def test_a_function_that_assigns_a_slot_runs_eagerly(lab: Lab) -> None:
    state = State(fresh(lab, 4))

    def run(x: Tensor) -> Tensor:
        state.k = state.k + x
        return state.k * 2

    graphed = cgraph.graphed(run)
    with quiet():
        for _ in range(3):
            x = fresh(lab, 4)
            wanted = state.k + x
            assert torch.equal(graphed(x), wanted * 2)
            assert torch.equal(state.k, wanted)
    assert states(graphed) == ["eager"]


def test_gradients_of_a_module_in_a_slot_are_those_of_eager(lab: Lab) -> None:
    class Trainer:
        __slots__ = ("net",)

        def __init__(self) -> None:
            torch.manual_seed(3)
            self.net = nn.Linear(4, 2).to(lab.device)

        def step(self, x: Tensor) -> Tensor:
            self.net.zero_grad()
            loss = self.net(x).square().mean()
            loss.backward()
            return loss.detach()

    mine, eager = Trainer(), Trainer()
    graphed = cgraph.graphed(mine.step)
    for _ in range(4):
        x = fresh(lab, 3, 4)
        assert near(graphed(x), eager.step(x))
        assert mine.net.weight.grad is not None and eager.net.weight.grad is not None
        assert near(mine.net.weight.grad, eager.net.weight.grad)
    assert numbers(graphed) == (1, 4, 0)
