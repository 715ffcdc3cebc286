"""Ways of Python's to read a setting that callers change, and what other ways calls have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import cgraph
from lab import Lab, fresh


class Settings:
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
