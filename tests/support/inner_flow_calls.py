"""Training steps with a backward pass inside, graphed and eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import cgraph
from graphed_calls import near
from lab import Lab

__all__ = ["Step", "both", "loss_of", "passes", "same_parameters", "training"]

Step = Callable[..., Any]


def both(lab: Lab, net: nn.Module, make: Callable[[Any], Step], **options: Any) -> Any:
    """Return a graphed step, an eager one, and their modules."""
    mine = net.to(lab.device)
    eager = copy.deepcopy(mine)
    return cgraph.graphed(make(mine), **options), make(eager), mine, eager


def loss_of(result: Tensor) -> Tensor:
    """Return a number that weighs each element of a result differently."""
    weights = torch.linspace(-1, 1, result.numel(), device=result.device).view_as(result)
    return (result * weights).sum() + result.square().mean()


def passes(net: nn.Module) -> Step:
    """Return a forward and a backward pass."""

    def step(*args: Tensor) -> Tensor:
        net.zero_grad()
        loss = loss_of(net(*args))
        loss.backward()
        return loss.detach()

    return step


def same_parameters(mine: nn.Module, eager: nn.Module) -> bool:
    """Return whether two modules have about the same parameters."""
    return all(map(near, mine.parameters(), eager.parameters()))


def training(net: nn.Module, clears: bool = True) -> Step:
    """Return a step with its backward pass and an optimizer with a state."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)

    def step(*args: Tensor) -> Tensor:
        if clears:
            optimizer.zero_grad()
        loss = loss_of(net(*args))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step
