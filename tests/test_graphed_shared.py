"""Arguments that share memory with what a graphed function writes and finds elsewhere."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

import cgraph
from lab import Lab, fresh


def test_a_captured_step_takes_no_gradient_as_an_argument(lab: Lab) -> None:
    weights = [nn.Parameter(torch.rand(3, device=lab.device)) for _ in range(2)]
    weights[1].data.copy_(weights[0].data)
    for weight in weights:
        weight.grad = torch.rand(3, device=lab.device)
    weights[1].grad.copy_(weights[0].grad)  # type: ignore[union-attr,arg-type]

    def over(weight: nn.Parameter) -> Callable[[Tensor], Tensor]:
        def step(x: Tensor) -> Tensor:
            (weight * weight).sum().backward()
            return x * 2

        return step

    graphed, eager = cgraph.graphed(over(weights[0])), over(weights[1])
    for shares in (False, True, False):
        x = fresh(lab, 3)
        mine, right = (one.grad if shares else x for one in weights)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert torch.equal(graphed(mine), eager(right))
        assert torch.equal(weights[0].grad, weights[1].grad)  # type: ignore[arg-type]
