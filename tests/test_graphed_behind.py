"""Models, optimizers and tensors behind objects and classes that a function names or is given."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from graphed_calls import near, states
from lab import Lab, fresh
from networks import network


class Trainer:
    """A model and its optimizer, as frameworks hold them."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


Make = Callable[[Trainer], Callable[..., Any]]


def passes(trainer: Trainer, x: Tensor) -> Tensor:
    trainer.model.zero_grad()
    loss: Tensor = trainer.model(x).square().mean()
    loss.backward()
    return loss.detach()


def by_namespace(trainer: Trainer) -> Callable[..., Any]:
    space = SimpleNamespace(of=trainer)
    return lambda x: passes(space.of, x)


def by_default(trainer: Trainer) -> Callable[..., Any]:
    return lambda x, of=trainer: passes(of, x)


def by_method(trainer: Trainer) -> Callable[..., Any]:
    class Holds:
        def __init__(self) -> None:
            self.context = SimpleNamespace(trainer=trainer)

        def step(self, x: Tensor) -> Tensor:
            return passes(self.context.trainer, x)

    return Holds().step


def by_closure(trainer: Trainer) -> Callable[..., Any]:
    return lambda x: passes(trainer, x)


def twins(lab: Lab) -> tuple[Trainer, Trainer]:
    trainer = Trainer(network(lab))
    return trainer, Trainer(copy.deepcopy(trainer.model))


def agree(mine: Trainer, eager: Trainer) -> bool:
    pairs = zip(mine.model.parameters(), eager.model.parameters(), strict=True)
    for one, other in pairs:
        if (one.grad is None) != (other.grad is None) or not near(one, other):
            return False
        if one.grad is not None and other.grad is not None and not near(one.grad, other.grad):
            return False
    return True


@pytest.mark.parametrize("options", [{}, {}, {}])
@pytest.mark.parametrize("make", [by_namespace, by_default, by_method, by_closure])
def test_a_model_behind_an_object_gets_its_gradients(
    lab: Lab, make: Make, options: dict[str, Any]
) -> None:
    mine, eager = twins(lab)
    function, expected = make(mine), make(eager)
    graphed = cgraph.graphed(function, **options)
    for _ in range(5):
        x = fresh(lab, 4, 6)
        assert near(graphed(x), expected(x))
        for trainer in (mine, eager):
            nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        assert agree(mine, eager)
        for trainer in (mine, eager):
            trainer.optimizer.step()
    assert "captured" in states(graphed)
    assert graphed.report().replays >= 3
