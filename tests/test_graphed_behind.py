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
from graphed_calls import eager_calls, near, states
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


@pytest.mark.parametrize("options", [{}, {"warmup": 0}, {"preserve_state": False}])
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


def halve(leaf: Tensor) -> None:
    assert leaf.grad is not None
    leaf.grad.mul_(0.5)


@pytest.mark.filterwarnings("ignore:.*runs eagerly")  # a gradient that is used and then cleared
@pytest.mark.parametrize("kind", ["hook", "post", "replaced"])
def test_gradients_behind_an_object_follow_hooks_and_what_is_assigned(lab: Lab, kind: str) -> None:
    mine, eager = twins(lab)

    def step(trainer: Trainer, x: Tensor) -> Tensor:
        loss: Tensor = trainer.model(x).square().mean()
        loss.backward()
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        return loss.detach()

    graphed = cgraph.graphed(lambda x: step(mine, x))
    for turn in range(6):
        if turn == 3:
            assert states(graphed) == ["captured"]
            for trainer in (mine, eager):
                weight = next(trainer.model.parameters())
                if kind == "hook":
                    weight.register_hook(lambda grad: grad * 0.5)
                elif kind == "post":
                    weight.register_post_accumulate_grad_hook(halve)
                else:
                    weight.grad = torch.ones_like(weight)
        x = fresh(lab, 4, 6)
        assert near(graphed(x), step(eager, x))
        assert agree(mine, eager)
    assert (states(graphed) == ["captured"]) == (kind != "replaced")


@pytest.mark.parametrize("keeps", [False, True])
def test_an_optimizer_behind_an_object_steps_with_the_gradients_of_the_call(
    lab: Lab, keeps: bool
) -> None:
    mine, eager = twins(lab)
    update = cgraph.graphed(lambda: mine.optimizer.step(), max_recording=20)
    kept = []
    for _ in range(6):
        x = fresh(lab, 4, 6)
        for trainer in (mine, eager):
            kept.append([one.grad for one in trainer.model.parameters()] if keeps else None)
            trainer.optimizer.zero_grad()
            trainer.model(x).square().mean().backward()
        update()
        eager.optimizer.step()
        assert agree(mine, eager)
    assert states(update) == ["captured"]


class Cache:
    """Keys of a request, none at first; with a count of its own."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.seen = 0

    def update(self, key: Tensor) -> Tensor:
        self.keys = key if self.keys is None else torch.cat([self.keys, key])
        self.seen += 1
        return self.keys


@pytest.mark.parametrize("options", [{}, {"warmup": 1, "measure": False}, {"warmup": 0}])
def test_an_object_among_the_arguments_that_begins_empty_is_filled_as_in_eager(
    lab: Lab, options: dict[str, Any]
) -> None:
    def step(x: Tensor, cache: Cache) -> Tensor:
        return torch.softmax(x @ cache.update(x).t(), -1)

    graphed = cgraph.graphed(step, **options)
    with pytest.warns(UserWarning, match="runs eagerly"):
        for _ in range(2):
            mine, eager = Cache(), Cache()
            for _ in range(3):
                x = fresh(lab, 1, 4)
                assert near(graphed(x, mine), step(x, eager))
                assert mine.keys is not None and eager.keys is not None
                assert torch.equal(mine.keys, eager.keys)
                assert mine.seen == eager.seen
    assert states(graphed).count("captured") == 0


class Scaled:
    factor: Tensor

    @classmethod
    @cgraph.graphed
    def of_class(cls, x: Tensor) -> Tensor:
        return x * cls.factor


def test_a_tensor_of_the_class_that_a_class_method_is_called_on_is_followed(lab: Lab) -> None:
    for _ in range(3):
        Scaled.factor = fresh(lab, 3)
        x = fresh(lab, 3)
        assert torch.equal(Scaled.of_class(x), x * Scaled.factor)
    graphed = vars(Scaled)["of_class"].__func__
    assert graphed.report().captured == 1 and eager_calls(graphed) == 0
    graphed.reset()


def test_a_tensor_of_a_class_that_the_function_names_is_followed(lab: Lab) -> None:
    class Base:
        factor = fresh(lab, 3)

    class Named(Base):
        shift = fresh(lab, 3)

    graphed = cgraph.graphed(lambda x: x * Named.factor + Named.shift)
    for turn in range(4):
        x = fresh(lab, 3)
        assert torch.equal(graphed(x), x * Named.factor + Named.shift)
        setattr(Base if turn % 2 else Named, "factor" if turn % 2 else "shift", fresh(lab, 3))
    assert eager_calls(graphed) == 0


@pytest.mark.parametrize("change", ["freeze", "hook", "part", "weight"])
def test_a_model_behind_an_argument_is_followed(lab: Lab, change: str) -> None:
    mine, eager = twins(lab)

    def step(trainer: Trainer, x: Tensor) -> Tensor:
        trainer.model.zero_grad()
        loss: Tensor = trainer.model(x).square().mean()
        loss.backward()
        return loss.detach()

    graphed = cgraph.graphed(step)
    for turn in range(6):
        for model in (mine.model, eager.model) if turn == 3 else ():
            assert isinstance(model, nn.Sequential)
            if change == "freeze":
                model[0].requires_grad_(False)
            elif change == "hook":
                model[0].register_forward_hook(lambda module, given, out: out * 3)
            elif change == "part":
                model[1] = nn.ReLU()
            else:
                model[0].bias = nn.Parameter(torch.ones(8, device=lab.device))
        x = fresh(lab, 4, 6)
        assert near(graphed(mine, x), step(eager, x))
        assert agree(mine, eager)
    assert eager_calls(graphed) == 0
