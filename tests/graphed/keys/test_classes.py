"""Graphed functions in classes that are not methods, and other objects that are not functions."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import cgraph
from cgraph.errors import ArgumentError
from lab import Lab, fresh


@pytest.mark.filterwarnings("ignore:functools.partial will be a method descriptor")
@pytest.mark.parametrize("is_bound", [False, True])
def test_functions_of_a_class_that_are_no_methods_get_no_object(lab: Lab, is_bound: bool) -> None:
    class Functions:
        @staticmethod
        @cgraph.graphed
        def inner(x: Tensor) -> Tensor:
            return x * 2

        @cgraph.graphed
        @staticmethod
        def outer(x: Tensor) -> Tensor:
            return x * 3

        tanh = cgraph.graphed(torch.tanh)
        partial = cgraph.graphed(functools.partial(torch.add, alpha=2))

    of: Any = Functions() if is_bound else Functions
    for _ in range(2):
        x = fresh(lab, 3)
        assert torch.equal(of.inner(x), x * 2)
        assert torch.equal(of.outer(x), x * 3)
        assert_close(of.tanh(x), x.tanh())
        assert torch.equal(of.partial(x, x), torch.add(x, x, alpha=2))


def test_a_class_is_refused() -> None:
    with pytest.raises(ArgumentError, match="decorate its forward, or graph one of its objects"):

        @cgraph.graphed
        class Model(nn.Module):
            pass


def test_a_class_method_is_refused_with_the_right_order() -> None:
    with pytest.raises(ArgumentError, match="put @classmethod above @graphed"):
        cgraph.graphed(classmethod(lambda cls, x: x))


def test_a_static_method_gets_an_object_of_its_class_as_an_argument(lab: Lab) -> None:
    class Scaled:
        factor = 3.0

        @cgraph.graphed
        @staticmethod
        def apply(scaled: Scaled, x: Tensor, y: Tensor | None = None) -> Tensor:
            return x * scaled.factor if y is None else y + 1

    scaled = Scaled()
    for _ in range(2):
        x, y = fresh(lab, 3), fresh(lab, 3)
        assert torch.equal(Scaled.apply(scaled, x), x * 3)
        assert torch.equal(scaled.apply(scaled, x, y), y + 1)
