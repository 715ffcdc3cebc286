"""Ways of Python to read a setting that callers change between calls: names, slots and others."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import cgraph
from engines import Settings
from graphed_calls import states
from lab import Lab, fresh


class EngineSettings:
    """Settings of an engine."""

    default = 2.0

    def act(self, x: Tensor) -> Tensor:
        return x + 1


class Layer(nn.Module):
    """A layer of a user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight: Any = nn.Parameter(torch.rand(3))
        self.weight.scale = self.layout = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def test_a_distribution_that_is_exchanged_is_read(lab: Lab) -> None:
    class Policy:
        prior: Any = None

        def score(self, x: Tensor) -> Tensor:
            return self.prior.log_prob(x)  # type: ignore[no-any-return]

    policy = Policy()
    graphed = cgraph.graphed(policy.score)
    for _ in range(3):
        zero, width = torch.zeros(3, device=lab.device), fresh(lab, 3).abs() + 1
        policy.prior = torch.distributions.Normal(zero, width, validate_args=False)
        for _ in range(2):
            x = fresh(lab, 3)
            assert_close(graphed(x), policy.score(x))


def test_a_function_that_takes_from_its_own_list_runs_eagerly(lab: Lab) -> None:
    def blocks(wrap: Callable[[Any], Any]) -> tuple[list[int], Tensor]:
        free, cache = [*range(10)], torch.zeros(10, device=lab.device)

        def store(x: Tensor) -> Tensor:
            cache[free.pop()] = x
            return cache * 1

        function = wrap(store)
        for place in range(3):
            function(torch.full((), place + 1.0, device=lab.device))
        return free, cache

    got, right = blocks(cgraph.graphed), blocks(lambda one: one)
    assert got[0] == right[0]
    assert_close(got[1], right[1])


DRAWS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "poisson": lambda x, own: torch.poisson(x, generator=own),
    "binomial": lambda x, own: torch.binomial(x, x / x.sum(), generator=own),
    "exponential": lambda x, own: torch.empty_like(x).exponential_(generator=own),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_generators_of_all_operators_are_as_after_the_eager_calls(lab: Lab, kind: str) -> None:
    own = torch.Generator(lab.device)
    graphed = cgraph.graphed(lambda x: DRAWS[kind](x, own))
    x = torch.full((4,), 30.0, device=lab.device)
    own.manual_seed(7)
    right = [DRAWS[kind](x, own) for _ in range(3)]
    own.manual_seed(7)
    for expected in right:
        assert_close(graphed(x), expected)


def test_settings_behind_thousands_of_places_are_followed(lab: Lab) -> None:
    model = nn.Sequential(*(Layer() for _ in range(1500))).to(lab.device)

    class Whole:
        scale = 2.0

        def run(self, x: Tensor) -> Tensor:
            return model[0](x) * self.scale

    whole = Whole()
    graphed = cgraph.graphed(whole.run)
    with torch.no_grad():
        for scale in (2.0, 3.0):
            whole.scale = scale
            x = fresh(lab, 3)
            assert_close(graphed(x), whole.run(x))


SCALE = 2.0
SETTINGS: Any = Settings(2.0)


def scaled(x: Tensor) -> Tensor:
    """Scale by globals."""
    return x * SCALE + SETTINGS.scale  # type: ignore[no-any-return]


def test_globals_and_variables_of_a_closure_may_change(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    by = 2.0

    def closed(x: Tensor) -> Tensor:
        return x * by

    module = sys.modules[__name__]
    graphed, other = cgraph.graphed(scaled), cgraph.graphed(closed)
    for scale in (2.0, 0.5, 3.0):
        monkeypatch.setattr(module, "SCALE", scale)
        monkeypatch.setattr(module, "SETTINGS", Settings(-scale))
        by = scale
        x = fresh(lab, 3)
        assert torch.equal(graphed(x), x * scale - scale)
        assert torch.equal(other(x), x * scale)


def test_how_much_a_dropout_drops_may_change(lab: Lab) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)).to(lab.device)
    graphed = cgraph.graphed(net)
    with torch.no_grad():
        graphed(fresh(lab, 4, 3))
        for drop, is_any in ((1.0, False), (0.0, True)):
            net[1].p = drop
            x = fresh(lab, 4, 3)
            expected = net[0](x) if is_any else torch.zeros_like(x)
            assert_close(graphed(x), expected)


@dataclass(slots=True)
class State:
    """The state of a request."""

    k: Tensor
    count: int = 0


class Engine:
    """An engine with the state of the served request."""

    __slots__ = ("__dict__", "state")

    def __init__(self, state: State) -> None:
        self.state = state

    def run(self, x: Tensor) -> Tensor:
        self.state.k.add_(x)
        return self.state.k * 2


class Bare:
    """An engine that has the state itself, and nothing else."""

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
