"""Tensors inside objects that pytree does not know, in arguments and in results."""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import cgraph
from lab import Lab, fresh

# Each of these functions runs eagerly, and warns.
pytestmark = pytest.mark.filterwarnings("ignore:.*runs eagerly")


class Plain:
    """An object with nothing in it."""


class Raising:
    """An object that must not be asked for anything."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("asked")


def test_objects_among_the_arguments_are_not_asked_anything(lab: Lab) -> None:
    gone = weakref.proxy(Plain())
    given, inner = Plain(), Plain()
    vars(inner).update(gone=gone, raising=Raising())
    vars(given).update(inner=inner)
    graphed = cgraph.graphed(lambda x, one: x * 2)
    for _ in range(2):
        x = fresh(lab, 3)
        torch.testing.assert_close(graphed(x, given), x * 2)
    assert graphed.report().captured == 1


class Deep:
    """A tensor two steps away."""

    def __init__(self, tensor: Tensor) -> None:
        self.parts = [types.SimpleNamespace(tensor=tensor)]

    @property
    def tensor(self) -> Tensor:
        """Return the tensor."""
        return self.parts[0].tensor


class Slotted:
    """A tensor in a slot."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@dataclass
class Inner:
    """A dataclass with a tensor."""

    tensor: Tensor


@dataclass
class Meta:
    """A dataclass with such a dataclass, compared by its one number if that has one element."""

    inner: Inner

    @property
    def tensor(self) -> Tensor:
        """Return the inner dataclass's tensor."""
        return self.inner.tensor


class Named(dict[str, Tensor]):
    """A dictionary that pytree does not know."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor=tensor)

    @property
    def tensor(self) -> Tensor:
        """Return its item."""
        return self["tensor"]


class Listed(list[Tensor]):
    """A list that pytree does not know."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__([tensor])

    @property
    def tensor(self) -> Tensor:
        """Return its item."""
        return self[0]


OBJECTS = [Deep, Slotted, lambda tensor: Meta(Inner(tensor)), Named, Listed]


@pytest.mark.parametrize("make", OBJECTS)
def test_tensors_deep_inside_an_argument_are_read_where_they_are(
    lab: Lab, make: Callable[[Tensor], Any]
) -> None:
    graphed = cgraph.graphed(lambda x, one: x * one.tensor)
    objects = [make(fresh(lab, 1)) for _ in range(2)]
    for one in objects * 2:
        x = fresh(lab, 1)
        torch.testing.assert_close(graphed(x, one), x * one.tensor)
    if isinstance(objects[0], Deep):
        objects[0].parts[0].tensor = fresh(lab, 1)
        torch.testing.assert_close(graphed(x, objects[0]), x * objects[0].tensor)


@pytest.mark.parametrize("make", OBJECTS)
def test_writes_to_tensors_inside_an_argument_reach_those_of_the_call(
    lab: Lab, make: Callable[[Tensor], Any]
) -> None:
    def function(x: Tensor, one: Any) -> Tensor:
        one.tensor.add_(1)
        return x * one.tensor

    graphed = cgraph.graphed(function)
    for _ in range(4):
        tensor, x = fresh(lab, 1), fresh(lab, 1)
        expected = tensor + 1
        torch.testing.assert_close(graphed(x, make(tensor)), x * expected)
        torch.testing.assert_close(tensor, expected)


def test_objects_with_tensors_among_the_arguments_are_not_kept(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda x, one: x * one.tensor)
    alive = []
    for _ in range(20):
        one = Deep(fresh(lab, 3))
        for _ in range(3):
            graphed(fresh(lab, 3), one)
        alive.append(weakref.ref(one))
        del one
    gc.collect()
    assert not any(one() is not None for one in alive)


@pytest.mark.parametrize("kind", [dict, list])
def test_a_result_of_an_unknown_container_is_a_new_one_in_each_call(
    lab: Lab, kind: type[Any]
) -> None:
    unknown = type("Unknown", (kind,), {})
    graphed = cgraph.graphed(lambda x: (x * 2, unknown()))
    first, second = (graphed(fresh(lab, 3))[1] for _ in range(2))
    assert type(first) is unknown
    assert first is not second


class Called(Deep):
    """A dataclass of a class whose objects can be called, as those of a graph's data."""

    def __call__(self) -> list[str]:
        return ["parts"]


def test_tensors_in_an_argument_that_can_be_called_are_those_of_the_call(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda x, one: x * one.parts[0].tensor)
    for _ in range(3):
        x, given = fresh(lab, 3), Called(fresh(lab, 3))
        torch.testing.assert_close(graphed(x, given), x * given.parts[0].tensor)


def test_each_call_returns_an_object_of_its_own_that_can_be_called(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda x: Called(x * 2))
    inputs = [fresh(lab, 3) for _ in range(3)]
    results = [graphed(x) for x in inputs]
    for x, result in zip(inputs, results, strict=True):
        torch.testing.assert_close(result.parts[0].tensor, x * 2)


def test_a_function_of_no_tensors_among_the_arguments_is_captured(lab: Lab) -> None:
    graphed, net = cgraph.graphed(lambda function, x: function(x)), torch.nn.Linear(3, 3)
    net = net.to(lab.device)
    functions: list[Callable[[Tensor], Tensor]] = [
        *(torch.relu, torch.nn.functional.gelu, lambda x: x * 2, net.forward),
    ]
    with torch.no_grad():
        for function in functions:
            for _ in range(2):
                x = fresh(lab, 3)
                torch.testing.assert_close(graphed(function, x), function(x))
    assert [key.state for key in graphed.report().keys] == ["captured"] * 4


class Answering(dict[str, Any]):
    """A dictionary whose items are attributes, and that raises for others."""

    __getattr__ = dict.__getitem__


def test_a_dictionary_that_answers_to_any_name_may_be_an_argument(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda x, options: x * options.scale)
    for scale in (2.0, 3.0, 2.0):
        x = fresh(lab, 3)
        torch.testing.assert_close(graphed(x, Answering(scale=scale)), x * scale)
