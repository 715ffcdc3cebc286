"""Steps with a backward pass inside: hooks of their leaves, and gradients that are taken away."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import cgraph
from graphed_calls import states
from lab import Lab, fresh


def test_a_layer_that_is_frozen_between_steps_loses_its_gradient(lab: Lab) -> None:
    first, second = (nn.Linear(3, 3, device=lab.device) for _ in range(2))
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        second(first(x)).sum().backward()
        optimizer.step()

    function = cgraph.graphed(step)
    function(fresh(lab, 2, 3))
    assert first.weight.grad is not None
    first.requires_grad_(False)
    for _ in range(2):
        before = second.weight.detach().clone()
        function(fresh(lab, 2, 3))
        assert first.weight.grad is None
        assert not torch.equal(second.weight, before)
    assert set(states(function)) == {"captured"}
