"""Reads of properties and methods of any class, where a function names their objects."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import Tensor, nn

import cgraph
from graphed_calls import agree, alike_after, quiet
from lab import Lab, fresh

SCALE = 2.0


class Scaling:
    def scaled(self, x: Tensor) -> Tensor:
        return x * SCALE


class Named(NamedTuple):
    number: float = 1.0

    def scaled(self, x: Tensor) -> Tensor:
        return x * SCALE


class OfDict(dict[str, int], Scaling):
    pass


class OfList(list[int], Scaling):
    pass


class OfText(str, Scaling):
    pass


class Number(enum.IntEnum):
    ONE = 1

    def scaled(self, x: Tensor) -> Tensor:
        return x * SCALE


class OfTensor(Tensor):
    def scaled(self, x: Tensor) -> Tensor:
        return x * SCALE


class Meta(type):
    def scaled(cls, x: Tensor) -> Tensor:
        return x * SCALE


class OfMeta(metaclass=Meta):
    pass


class Wrapping:
    """A wrapper made by the function that reads it."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    @property
    def scaled(self) -> Tensor:
        return self.x * SCALE

    @functools.cached_property
    def kept(self) -> Tensor:
        return self.x * SCALE


named, number, meta = Named(), Number.ONE, OfMeta
of_dict, of_list, of_text = OfDict(one=1), OfList([1]), OfText("one")
of_tensor = torch.ones(2).as_subclass(OfTensor)
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "a named tuple": lambda x: named.scaled(x),
    "a dictionary": lambda x: of_dict.scaled(x),
    "a list": lambda x: of_list.scaled(x),
    "a text": lambda x: of_text.scaled(x),
    "a member of an enumeration": lambda x: number.scaled(x),
    "a tensor": lambda x: of_tensor.scaled(x),
    "a class of a metaclass": lambda x: meta.scaled(x),
    "a property": lambda x: Wrapping(x).scaled,
    "a cached property": lambda x: Wrapping(x).kept,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_number_that_a_method_or_getter_reads_is_followed(
    lab: Lab, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other() -> None:
        monkeypatch.setitem(globals(), "SCALE", 5.0)

    def back() -> None:
        monkeypatch.setitem(globals(), "SCALE", 2.0)

    alike_after(lab, FUNCTIONS[name], other, back, other)


class Holding(nn.Module):
    """A module with a value that is neither a parameter nor a buffer."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


@pytest.mark.parametrize("depth", [1, 2])
def test_a_tensor_of_a_module_that_a_method_of_a_plain_object_reads_is_followed(
    lab: Lab, depth: int
) -> None:
    inner = Holding(fresh(lab, 3))
    outer: Any = inner if depth == 1 else Holding(inner)

    class Reader:
        def shifted(self, x: Tensor) -> Tensor:
            return x + (outer.value if depth == 1 else outer.value.value)

    reader = Reader()

    def exchange() -> None:
        inner.value = fresh(lab, 3)

    alike_after(lab, lambda x: reader.shifted(x), exchange, exchange)


@pytest.mark.parametrize("key", ["four", 4])
def test_a_key_that_code_tries_in_vain_is_noticed_once_it_is_there(lab: Lab, key: Any) -> None:
    space, table = SimpleNamespace(known={3: fresh(lab, 3)}), {3: fresh(lab, 3)}

    def shifted(x: Tensor) -> Tensor:
        try:
            x = x + (space.known[4] if key == 4 else space.known["four"])
        except KeyError:
            x = x * 3
        try:
            return x + (table[4] if key == 4 else table["four"])
        except KeyError:
            return x * 5

    def add() -> None:
        table[key] = fresh(lab, 3)

    def exchange() -> None:
        space.known = {3: fresh(lab, 3), key: fresh(lab, 3)}

    function = cgraph.graphed(shifted)
    with torch.no_grad():
        agree(function, shifted, fresh(lab, 3))
        for change in (add, exchange):
            change()
            agree(function, shifted, fresh(lab, 3))
            agree(function, shifted, fresh(lab, 3))


def test_whether_a_tensor_requires_a_gradient_counts_where_an_array_is_read(lab: Lab) -> None:
    scale, plain = numpy.array([2.0]), fresh(lab, 3)

    def shifted(x: Tensor) -> Tensor:
        return (x + plain) * float(scale[0])

    function = cgraph.graphed(shifted)
    with quiet():
        for is_asked in (False, True, False):
            plain.requires_grad_(is_asked)
            for _ in range(2):
                assert function(fresh(lab, 3)).requires_grad == is_asked
