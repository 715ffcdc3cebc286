"""Loops as methods and attributes: each object has its own, also a copy; they are pickled."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import cgraph
from cgraph.errors import ArgumentError
from lab import Lab


class Scaled(torch.nn.Module):
    """A model whose method is a loop."""

    def __init__(self, lab: Lab, factor: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((2,), factor, device=lab.device))

    @cgraph.loop(max_steps=2, emit="x")
    def scale(self, x: Tensor) -> None:
        """Multiply in place."""
        x.mul_(self.weight)


def test_a_method_is_a_loop_of_its_own_for_each_object(lab: Lab) -> None:
    two, three = Scaled(lab, 2.0), Scaled(lab, 3.0)
    for _ in range(2):
        for model, expected in ((two, 4), (three, 9)):
            x = torch.ones(2, device=lab.device)
            (run,) = (model.scale(x),)
            assert len([*run]) == 2
            assert x[0].item() == expected
    assert two.scale is two.scale is not three.scale
    copied = copy.deepcopy(two)
    with torch.no_grad():
        copied.weight.fill_(5)
    x = torch.ones(2, device=lab.device)
    copied.scale(x).result()
    assert x[0].item() == 25
    assert pickle.loads(pickle.dumps(Scaled.scale)) is Scaled.scale


def doubled(x: Tensor) -> None:
    x.mul_(2)


def one(lab: Lab) -> Tensor:
    return torch.ones(1, device=lab.device)


def test_two_loops_of_one_function_are_two_methods(lab: Lab) -> None:
    class Model:
        def step(self, x: Tensor) -> None:
            x.mul_(2)

        short = cgraph.loop(max_steps=2)(step)
        long = cgraph.loop(max_steps=5)(step)

    model = Model()
    for _ in range(2):
        assert model.short(one(lab)).result()[0].item() == 4
        assert model.long(one(lab)).result()[0].item() == 32
        assert Model.long(model, one(lab)).result()[0].item() == 32


def test_a_method_that_is_overridden_calls_that_of_the_base(lab: Lab) -> None:
    class Model:
        @cgraph.loop(max_steps=2)
        def step(self, x: Tensor) -> None:
            x.mul_(2)

    base = Model

    class Model(base):  # type: ignore[no-redef, valid-type, misc]
        @cgraph.loop(max_steps=3)
        def step(self, x: Tensor) -> None:
            x.add_(1)

        def both(self, x: Tensor) -> float:
            self.step(x).result()
            return float(super().step(x).result()[0])

    model = Model()
    assert [model.both(one(lab)) for _ in range(2)] == [16, 16]  # type: ignore[attr-defined]


@pytest.mark.parametrize("step", [staticmethod(doubled), functools.partial(doubled)])
def test_what_gets_no_object_is_the_same_loop_for_all(lab: Lab, step: Any) -> None:
    class Model:
        scale = cgraph.loop(max_steps=2)(step)

    for _ in range(2):
        assert Model().scale(one(lab)).result()[0].item() == 4


def test_a_copy_of_what_has_a_loop_runs_it_on_its_own_tensors(lab: Lab) -> None:
    class Model:
        def __init__(self) -> None:
            self.weight = torch.full((1,), 2.0, device=lab.device)
            self.loop = cgraph.loop(max_steps=2)(self.step)

        def step(self, x: Tensor) -> None:
            x.mul_(self.weight)

    model = Model()
    model.loop(one(lab)).result()
    copied = copy.deepcopy(model)
    copied.weight.fill_(5)
    assert copied.loop(one(lab)).result()[0].item() == 25
    assert model.loop(one(lab)).result()[0].item() == 4


def test_a_loop_is_pickled_without_its_graphs(lab: Lab) -> None:
    looped = cgraph.loop(max_steps=3)(doubled)
    looped(one(lab)).result()
    loaded = pickle.loads(pickle.dumps(looped))
    assert loaded(one(lab)).result()[0].item() == 8


def test_methods_of_classes_and_objects_without_a_dict_are_refused(lab: Lab) -> None:
    class Model:
        __slots__ = ()

        @classmethod
        @cgraph.loop(max_steps=2)
        def of_class(cls, x: Tensor) -> None: ...

        @cgraph.loop(max_steps=2)
        def step(self, x: Tensor) -> None: ...

    with pytest.raises(ArgumentError, match=r"method of the class|of type, expected"):
        Model.of_class(one(lab))
    with pytest.raises(ArgumentError, match="has no __dict__ to keep the graphs of"):
        Model().step(one(lab))
    with pytest.raises(ArgumentError, match=r"step is <classmethod.*expected a function"):
        cgraph.loop(max_steps=2)(classmethod(doubled))  # type: ignore[arg-type]
