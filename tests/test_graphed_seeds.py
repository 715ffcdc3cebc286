"""Functions that seed draw what eager draws; on a GPU also those that put states back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
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
