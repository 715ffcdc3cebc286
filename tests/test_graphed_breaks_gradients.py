"""Breaks behind a backward pass inside of a graphed function: what they find in ``.grad``."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from cgraph._operators.rollback import Rollback
from lab import Lab, fresh

Step = Callable[[Tensor], None]


def steps_in_a_break(net: nn.Module, make: Any = torch.optim.SGD) -> Step:
    optimizer = make(net.parameters(), lr=0.1)

    @cgraph.eager_break
    def update() -> None:
        optimizer.step()

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        update()

    return step


@pytest.mark.parametrize("make", [steps_in_a_break, lambda net: lambda x: net(x).relu_().detach()])
def test_a_graph_keeps_nothing_of_what_put_back_the_calls_before_it(
    lab: Lab, make: Callable[[nn.Module], Step]
) -> None:
    graphed = cgraph.graphed(make(nn.Linear(3, 2).to(lab.device)))
    for _ in range(3):
        graphed(fresh(lab, 4, 3))
    gc.collect()
    assert graphed.report().captured
    assert not any(type(one) is Rollback for one in gc.get_objects())
