"""The contract, "Key": each test quotes its sentence."""

from __future__ import annotations

import copy
import enum
import math
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import cgraph
from contract_calls import Box, counted, equal, keys_of, runs_of
from graphed_calls import numbers, poison
from lab import Lab, fresh

Pair = namedtuple("Pair", "a b")


class Color(enum.Enum):
    """Two members."""

    RED = 1
    BLUE = 2


class Level(enum.IntEnum):
    """Members that are equal to numbers."""

    LOW = 1


def alternate(
    lab: Lab, function: Callable[..., Any], one: Callable[[], Any], other: Callable[[], Any]
) -> None:
    """Require two kinds of calls to have two keys, each right and a replay in the end."""
    counting, counter = counted(function)
    graphed = cgraph.graphed(counting)
    for number in range(8):
        for make in (one, other):
            args, kwargs = make()
            expected = function(*copy.deepcopy(args), **copy.deepcopy(kwargs))
            found = graphed(*args, **kwargs)
            equal(found, expected)
            poison(found)
        assert runs_of(counter) == min(number + 1, 2) * 2
    assert keys_of(graphed) == 2


def total(*args: Any, **kwargs: Any) -> Any:
    """Return a sum of all tensors, weighed by their places."""
    parts: list[Tensor] = []

    def visit(one: Any, weight: float) -> None:
        if isinstance(one, Tensor):
            parts.append(one.sum() * weight)
        elif isinstance(one, dict):
            for key, item in one.items():
                visit(item, weight + len(str(key)))
        elif isinstance(one, tuple | list):
            kind = 2 if isinstance(one, list) else 3 if type(one) is tuple else 5
            for place, item in enumerate(one):
                visit(item, weight * kind + place)

    for place, one in enumerate((args, kwargs)):
        visit(one, place + 1.0)
    return sum(parts)


TOGETHER: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor], Any]]] = {
    "list or tuple": (lambda x: (([x],), {}), lambda x: (((x,),), {})),
    "one more": (lambda x: (([x],), {}), lambda x: (([x, x + 1],), {})),
    "by name": (lambda x: ((x,), {}), lambda x: ((), {"x": x})),
    "other keys": (lambda x: (({"a": x},), {}), lambda x: (({"bb": x},), {})),
    "nested": (lambda x: (([[x], x],), {}), lambda x: (([x, [x]],), {})),
    "named tuple": (lambda x: (((x, x),), {}), lambda x: ((Pair(x, x),), {})),
    "keyword": (lambda x: ((), {"a": x}), lambda x: ((), {"abc": x})),
}


@pytest.mark.parametrize("case", TOGETHER)
def test_arguments_that_are_put_together_in_another_way_have_another_key(
    lab: Lab, case: str
) -> None:
    """**Key**: how arguments are put together."""
    one, other = TOGETHER[case]
    with torch.no_grad():
        alternate(lab, total, lambda: one(fresh(lab, 3)), lambda: other(fresh(lab, 3)))


FORMS: dict[str, tuple[Callable[[Lab], Tensor], Callable[[Lab], Tensor]]] = {
    "dtype": (lambda lab: fresh(lab, 4), lambda lab: fresh(lab, 4).double()),
    "shape": (lambda lab: fresh(lab, 4), lambda lab: fresh(lab, 5)),
    "dims": (lambda lab: fresh(lab, 4), lambda lab: fresh(lab, 4, 1)),
    "strides": (lambda lab: fresh(lab, 3, 4), lambda lab: fresh(lab, 4, 3).t()),
    "requires_grad": (lambda lab: fresh(lab, 4), lambda lab: fresh(lab, 4).requires_grad_()),
}


@pytest.mark.parametrize("case", FORMS)
def test_tensors_of_another_form_have_another_key(lab: Lab, case: str) -> None:
    """… dtype, shape, strides, device, requires_grad of tensors."""
    one, other = FORMS[case]

    def function(x: Tensor) -> Any:
        return x * 2 + x.dim() + int(x.requires_grad), x.dtype.itemsize, x.stride()

    with torch.no_grad():
        alternate(lab, function, lambda: ((one(lab),), {}), lambda: ((other(lab),), {}))


@pytest.mark.parametrize("by_name", [False, True])
def test_another_plain_argument_has_another_key(lab: Lab, by_name: bool) -> None:
    """… plain arguments."""

    def function(x: Tensor, by: float) -> Tensor:
        return x * by

    def make(by: float) -> Any:
        return ((fresh(lab, 3),), {"by": by}) if by_name else ((fresh(lab, 3), by), {})

    with torch.no_grad():
        alternate(lab, function, lambda: make(2.0), lambda: make(3.0))


MODES: dict[str, tuple[Callable[[Lab], Any], Callable[[Lab], Any]]] = {
    "grad": (lambda _: torch.no_grad(), lambda _: torch.enable_grad()),
    "inference": (lambda _: torch.no_grad(), lambda _: torch.inference_mode()),
    "autocast": (
        lambda _: nullcontext(),
        lambda lab: torch.autocast(lab.device, dtype=torch.bfloat16),
    ),
}


@pytest.mark.parametrize("case", MODES)
def test_another_mode_has_another_key(lab: Lab, case: str) -> None:
    """… grad, inference, autocast mode."""
    weight = fresh(lab, 3, 3)

    def function(x: Tensor) -> Any:
        y = x @ weight
        return y + torch.is_grad_enabled() + 2 * torch.is_inference_mode_enabled()

    counting, counter = counted(function)
    graphed = cgraph.graphed(counting)
    for number in range(6):
        for mode in MODES[case]:
            x = fresh(lab, 2, 3)
            with torch.no_grad(), mode(lab):
                found, expected = graphed(x), function(x)
            equal(found, expected)
            assert found.dtype == expected.dtype
            assert found.is_inference() == expected.is_inference()
            poison(found.clone())
        assert runs_of(counter) == min(number + 1, 2) * 2
    assert keys_of(graphed) == 2


def test_another_plain_guarded_value_has_another_key_and_its_graph_stays(lab: Lab) -> None:
    """… plain guarded values."""
    box = Box(by=1.0)
    counting, counter = counted(lambda x: x * box.by)
    graphed = cgraph.graphed(counting)
    with torch.no_grad():
        for number in range(5):
            for by in (2.0, 3.0):
                box.by = by
                x = fresh(lab, 3)
                equal(graphed(x), x * by)
            assert runs_of(counter) == min(number + 1, 2) * 2
    assert numbers(graphed) == (2, 8, 2)


PLAIN: dict[str, tuple[Any, Any]] = {
    "None": (None, False),
    "bool": (True, 1),
    "int": (1, 1.0),
    "big int": (2**70, 2**70 + 1),
    "float": (0.5, 0.25),
    "complex": (1 + 2j, 1 - 2j),
    "str": ("a", "b"),
    "bytes": (b"a", "a"),
    "enum": (Color.RED, Color.BLUE),
    "int enum": (Level.LOW, 1),
    "dtype": (torch.float32, torch.float64),
    "device": (torch.device("cpu"), torch.device("meta")),
    "numpy scalar": (numpy.float32(1), numpy.float64(1)),
    "numpy int": (numpy.int64(1), numpy.int64(2)),
    "tuple": ((1, "a", (2,)), (1, "a", (3,))),
    "tuple type": ((1, 2), (1, 2.0)),
    "zero": (0.0, -0.0),
    "nan": (math.nan, 1.0),
}


@pytest.mark.parametrize("where", ["argument", "attribute", "default"])
@pytest.mark.parametrize("case", PLAIN)
def test_plain_values_are_compared_by_type_and_value_and_floats_by_bits(
    lab: Lab, case: str, where: str
) -> None:
    """*Plain*: None, bool, int, … compared by type and value, floats by bits."""
    box = Box(value=None)

    def scaled(x: Tensor, value: Any) -> tuple[Tensor, Any]:
        return x * len(repr(value)), value

    if where == "argument":
        function: Callable[..., Any] = scaled
    elif where == "attribute":
        function = lambda x: scaled(x, box.value)  # noqa: E731
    else:
        function = lambda x, value=0: scaled(x, value)  # noqa: E731
    counting, counter = counted(function)
    graphed = cgraph.graphed(counting)
    with torch.no_grad():
        for number in range(4):
            for value in PLAIN[case]:
                box.value = value
                x = fresh(lab, 3)
                if where == "argument":
                    found, given = graphed(x, value)
                elif where == "attribute":
                    found, given = graphed(x)
                else:
                    found, given = graphed(x, value=value)
                equal(found, x * len(repr(value)))
                assert type(given) is type(value) and repr(given) == repr(value)
            assert runs_of(counter) == min(number + 1, 2) * 2
    assert keys_of(graphed) == 2


def test_the_order_of_keys_of_a_dictionary_that_the_function_sees_counts(lab: Lab) -> None:
    """**Key**: how arguments are put together."""

    def function(table: dict[str, Tensor]) -> Tensor:
        return sum((place + 1) * one for place, one in enumerate(table.values()))  # type: ignore

    def one() -> Any:
        return (OrderedDict(a=fresh(lab, 2), b=fresh(lab, 2)),), {}

    def other() -> Any:
        return (OrderedDict(b=fresh(lab, 2), a=fresh(lab, 2)),), {}

    with torch.no_grad():
        alternate(lab, function, one, other)
