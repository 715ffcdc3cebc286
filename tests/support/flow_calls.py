"""Modules with a break, and calls with a backward pass, compared with eager ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import cgraph
from graphed_calls import near, same_gradients
from lab import Lab

__all__ = ["Around", "check", "step", "twins"]


class Around(nn.Module):
    """A module that calls a function between two layers."""

    def __init__(self, between: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.between = between

    def forward(self, x: Tensor) -> Any:
        return self.last(self.between(self.first(x).tanh()))


def step(run: Callable[..., Tensor], x: Tensor, *others: Tensor) -> tuple[Tensor, Tensor | None]:
    """Make one call with its backward pass; return the result and the argument's gradient."""
    x = x.detach().clone().requires_grad_(x.requires_grad)
    result = run(x, *others)
    weights = torch.linspace(-1, 1, result.numel(), device=x.device).view_as(result)
    (result * weights).sum().backward()
    return result.detach().clone(), x.grad


def check(graphed: Any, mine: nn.Module, eager: nn.Module, *given: Tensor) -> None:
    """Require a call and its backward pass to equal those of the eager twin."""
    found, own = step(graphed, *given)
    expected, its = step(eager, *given)
    assert near(found, expected)
    assert own is None and its is None if its is None else own is not None and near(own, its)
    assert same_gradients(mine, eager)


def twins(lab: Lab, net: nn.Module, **options: Any) -> tuple[Any, nn.Module, nn.Module]:
    """Return a graphed module, the module itself, and an eager twin."""
    mine = net.to(lab.device)
    return cgraph.graphed(mine, **options), mine, copy.deepcopy(mine)
