"""Callables that are already bound, as attributes of classes, and refused ones."""

from __future__ import annotations

import functools
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import cgraph
from cgraph.errors import ArgumentError
from graphed_calls import states
from lab import Lab, fresh


class Scaler:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    def scale(self, x: Tensor) -> Tensor:
        return x * self.factor


@pytest.mark.parametrize("kind", ["method", "partial"])
def test_what_is_bound_already_stays_so_as_an_attribute_of_a_class(lab: Lab, kind: str) -> None:
    bound: Any = Scaler(2).scale
    if kind == "partial":
        if sys.version_info >= (3, 14):
            pytest.skip("a partial function is a method there")
        bound = functools.partial(Scaler.scale, Scaler(2))

    class Holder:
        factor = 5
        step = cgraph.graphed(bound)

    one, other = Holder(), Holder()
    for _ in range(2):
        x = fresh(lab, 3)
        for owner in (one, other, Holder):
            assert torch.equal(owner.step(x), x * 2)
    assert states(Holder.step) == ["captured"]


def test_an_inherited_coroutine_is_refused() -> None:
    class Base:
        async def __call__(self, x: Tensor) -> Tensor:
            return x

    class Derived(Base):
        pass

    for kind in (Base, Derived):
        with pytest.raises(ArgumentError, match="whose body runs after the call"):
            cgraph.graphed(kind())
