"""Functions that seed, restore random states, or draw from generators of their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import cgraph
from lab import Lab, SimLab, fresh

pytestmark = pytest.mark.filterwarnings("ignore:.*runs eagerly")


def seeded(x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return x + torch.rand_like(x)


def seeded_twice(x: Tensor) -> Tensor:
    torch.manual_seed(3)
    first = torch.rand_like(x)
    torch.manual_seed(3)
    return first - torch.rand_like(x) + x


@pytest.mark.parametrize("first", [3, 4])
@pytest.mark.parametrize("function", [seeded, seeded_twice])
def test_a_function_that_seeds_draws_the_same_numbers_each_time(
    lab: Lab, function: Callable[[Tensor], Tensor], first: int
) -> None:
    torch.manual_seed(first)
    graphed = cgraph.graphed(function)
    for _ in range(3):
        x = fresh(lab, 8)
        found = graphed(x).clone()
        assert torch.equal(found, function(x))


def test_what_is_checkpointed_is_computed_with_the_same_mask_again(lab: Lab) -> None:
    if isinstance(lab, SimLab):
        pytest.skip("the simulator's captures draw another mask")
    w = torch.ones(64, requires_grad=True, device=lab.device)
    drop = torch.nn.Dropout(0.5)

    def step(x: Tensor) -> Tensor:
        w.grad = None
        y = checkpoint(lambda x: drop(x) * w, x, use_reentrant=False)
        y.sum().backward()  # type: ignore[union-attr]
        return y.detach()  # type: ignore[union-attr]

    function = cgraph.graphed(step)
    for _ in range(4):
        y = function(torch.ones(64, device=lab.device))
        assert torch.equal(y, w.grad)


def two_alike(lab: Lab) -> tuple[torch.Generator, torch.Generator]:
    seed = int(torch.randint(1 << 30, ()))
    both = torch.Generator(lab.device), torch.Generator(lab.device)
    for one in both:
        one.manual_seed(seed)
    return both


def of_closure(generator: torch.Generator) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.rand(x.shape, generator=generator, device=x.device) + x


def of_argument(generator: torch.Generator) -> Callable[[Tensor], Tensor]:
    def draw(x: Tensor, generator: torch.Generator) -> Tensor:
        return x.clone().uniform_(generator=generator)

    graphed = cgraph.graphed(draw, on_fail="raise")
    return lambda x: graphed(x, generator)


def test_a_generator_may_be_an_argument(lab: Lab) -> None:
    mine, twin = two_alike(lab)
    graphed = of_argument(mine)
    for _ in range(3):
        x = fresh(lab, 4)
        assert torch.equal(graphed(x), x.clone().uniform_(generator=twin))


def test_segments_and_their_breaks_draw_in_order(lab: Lab) -> None:
    def steps(generator: torch.Generator) -> Callable[[Tensor], Tensor]:
        draw = of_closure(generator)
        pause = cgraph.eager_break(draw)
        return lambda x: draw(pause(draw(x))) * 2

    mine, twin = two_alike(lab)
    graphed, eager = cgraph.graphed(steps(mine), on_fail="raise"), steps(twin)
    for _ in range(4):
        x = fresh(lab, 4)
        assert torch.equal(graphed(x), eager(x))
    assert torch.equal(mine.get_state(), twin.get_state())


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
def test_with_gradients_calls_draw_what_eager_draws(lab: Lab) -> None:
    mine, twin = two_alike(lab)
    module = nn.Linear(4, 4).to(lab.device)

    def step(x: Tensor, generator: torch.Generator) -> Tensor:
        return module(x) * torch.rand(4, generator=generator, device=x.device)

    graphed = cgraph.graphed(lambda x: step(x, mine))
    for _ in range(3):
        x = fresh(lab, 2, 4)
        assert_close(graphed(x), step(x, twin))
    assert torch.equal(mine.get_state(), twin.get_state())
