"""Graphed functions as attributes of classes, in every way of becoming one."""

from __future__ import annotations

import abc
import copy
import pickle
import typing
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import cgraph
from cgraph.errors import ArgumentError
from lab import Lab, fresh


def scaled(by: float) -> Callable[[Any, Tensor], Tensor]:
    """Multiply by a number, as a method."""

    def method(self: Any, x: Tensor) -> Tensor:
        return x * by

    return cgraph.graphed(method)  # type: ignore[no-any-return]


class Layer:
    """A class whose name a derived class has, too."""

    @cgraph.graphed
    def go(self, x: Tensor) -> Tensor:
        """Return twice the argument."""
        return x * 2


Base = Layer


class Layer(Base):  # type: ignore[no-redef]
    """A class that adds one to its base's result."""

    @cgraph.graphed
    def go(self, x: Tensor) -> Tensor:
        """Return twice the argument, and one more."""
        return super().go(x) + 1  # type: ignore[no-any-return]


def test_two_methods_of_one_qualified_name_are_two(lab: Lab) -> None:
    class Several:
        two: Any
        three: Any

    for name, by in {"two": 2, "three": 3}.items():
        setattr(Several, name, scaled(by))
    several = Several()
    for _ in range(3):
        x = fresh(lab, 3)
        assert_close(several.two(x), x * 2)
        assert_close(several.three(x), x * 3)
    assert several.two.report().captured == several.three.report().captured == 1
    assert several.two is several.two


@pytest.mark.parametrize("first", ["base", "derived"])
def test_a_class_may_have_the_name_of_its_base(lab: Lab, first: str) -> None:
    layer: Any = Layer()
    for _ in range(3):
        x = fresh(lab, 3)
        if first == "base":
            assert_close(Base.go(layer, x), x * 2)  # type: ignore[call-arg, arg-type]
        assert_close(layer.go(x), x * 2 + 1)
        assert_close(Base.go(layer, x), x * 2)  # type: ignore[call-arg, arg-type]


def test_copies_of_objects_have_graphs_of_their_own(lab: Lab) -> None:
    layer: Any = Layer()
    x = fresh(lab, 3)
    assert_close(layer.go(x), x * 2 + 1)
    for other in (copy.copy(layer), copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        x = fresh(lab, 3)
        assert_close(other.go(x), x * 2 + 1)
        assert other.go.__wrapped__.__self__ is other
    assert layer.go.__wrapped__.__self__ is layer


def test_a_metaclass_may_have_a_graphed_method(lab: Lab) -> None:
    class Meta(type):
        k: float

        @cgraph.graphed
        def scaled(cls, x: Tensor) -> Tensor:
            return x * cls.k

    class Five(metaclass=Meta):
        k = 5.0

    for _ in range(3):
        x = fresh(lab, 3)
        assert_close(Five.scaled(x), x * 5)  # type: ignore[call-arg, arg-type]


def test_a_graphed_method_may_be_abstract(lab: Lab) -> None:
    class Abstract(abc.ABC):
        @cgraph.graphed
        @abc.abstractmethod
        def go(self, x: Tensor) -> Tensor: ...

    with pytest.raises(TypeError, match="abstract"):
        Abstract()  # type: ignore[abstract]


def test_annotations_are_those_of_the_function() -> None:
    @cgraph.graphed
    def run(x: torch.Tensor, k: int = 3) -> torch.Tensor:
        return x * k

    hints = typing.get_type_hints(run)
    assert hints == {"x": Tensor, "k": int, "return": Tensor}


def test_a_break_may_stand_above_a_static_method(lab: Lab) -> None:
    class Has:
        @cgraph.eager_break  # type: ignore[arg-type]
        @staticmethod
        def twice(x: Tensor) -> Tensor:
            return x * 2

    has: Any = Has()
    graphed = cgraph.graphed(lambda x: has.twice(x + 1) + 1)
    for _ in range(3):
        x = fresh(lab, 3)
        assert_close(has.twice(x), x * 2)
        assert_close(graphed(x), (x + 1) * 2 + 1)
    assert graphed.report().keys[0].breaks


@pytest.mark.parametrize("decorator", [cgraph.graphed, cgraph.eager_break])
@pytest.mark.parametrize("kind", [classmethod, property])
def test_a_decorator_below_says_where_it_belongs(decorator: Any, kind: Any) -> None:
    with pytest.raises(ArgumentError, match=f"put @{kind.__name__} above @{decorator.__name__}"):
        decorator(kind(lambda self: self))


@pytest.mark.parametrize(
    ("fn", "options", "said"),
    [
        (torch.relu, {"name": 3}, "name is 3, expected a text"),
        (None, {"name": b"x"}, "name is b'x', expected a text"),
        (torch.relu, {"materialize_grads": 3}, "materialize_grads is 3, expected True or False"),
        (None, {"materialize_grads": None}, "materialize_grads is None, expected True or False"),
    ],
)
def test_what_a_break_cannot_be_made_of_is_refused(fn: Any, options: Any, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        cgraph.eager_break(fn, **options)
