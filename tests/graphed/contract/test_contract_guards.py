"""The contract, "Guarded", values under names: each test quotes its sentence."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import cgraph
from cgraph.errors import EagerWarning
from contract_calls import Box, changed, counted, equal, keys_of, runs_of, setting
from graphed_calls import quiet
from lab import Lab, fresh

FACTOR = 1.0
SETTINGS: dict[str, Any] = {"by": 1.0, "parts": [1.0]}
OWN = sys.modules[__name__]


class Kept(Box):
    """A class with an attribute of its own."""

    by = 1.0


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def test_attributes_of_objects_that_the_code_names_are_guarded(lab: Lab) -> None:
    """**Guarded** are the values under names … attributes."""
    box = Box(by=1.0, inner=Box(by=2.0))
    graphed = changed(
        lab,
        lambda x: x * box.by + box.inner.by,
        setting(box, "by", 3.0),
        setting(box.inner, "by", 4.0),
        setting(box, "inner", Box(by=5.0)),
        lambda: delattr(box, "by") or setattr(box, "by", 1.0),
    )
    assert keys_of(graphed) >= 4


def test_values_under_literal_strings_are_guarded(lab: Lab) -> None:
    """… or literal strings, that stand in code which ran."""
    box, table = Box(by=1.0), {"by": 1.0}
    changed(
        lab,
        lambda x: x * getattr(box, "by") + table["by"],  # noqa: B009
        setting(box, "by", 3.0),
        setting(table, "by", 4.0),
    )


def test_attributes_of_a_class_are_guarded(lab: Lab) -> None:
    """… attributes, also of a class."""

    class Own(Kept):
        more = 1.0

    box = Own()
    changed(
        lab,
        lambda x: x * box.by + Own.more,
        setting(Own, "more", 2.0),
        setting(Own, "by", 3.0),
        setting(box, "by", 4.0),
        lambda: delattr(box, "by"),
    )


def test_globals_are_guarded(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """… globals."""
    changed(
        lab,
        lambda x: x * FACTOR + SETTINGS["by"] + sum(SETTINGS["parts"]),
        lambda: monkeypatch.setattr(OWN, "FACTOR", 2.0),
        lambda: monkeypatch.setitem(SETTINGS, "by", 3.0),
        lambda: monkeypatch.setitem(SETTINGS, "parts", [1.0, 2.0]),
        lambda: SETTINGS["parts"].append(4.0),
        lambda: monkeypatch.setattr(OWN, "SETTINGS", {"by": 7.0, "parts": []}),
    )


def test_closure_cells_are_guarded(lab: Lab) -> None:
    """… closure cells."""
    by, inner_by = 1.0, 2.0

    def inner(x: Tensor) -> Tensor:
        return x + inner_by

    def function(x: Tensor) -> Tensor:
        return inner(x) * by

    def set_by() -> None:
        nonlocal by
        by = 3.0

    def set_inner() -> None:
        nonlocal inner_by
        inner_by = 4.0

    changed(lab, function, set_by, set_inner)


@pytest.mark.parametrize("kind", ["list", "dict", "deque", "tuple", "set", "nested"])
def test_items_of_containers_are_guarded(lab: Lab, kind: str) -> None:
    """… items of the function's modules and containers."""
    holders: dict[str, Any] = {
        "list": [1.0, 2.0],
        "dict": {"a": 1.0, 7: 2.0},
        "deque": deque([1.0, 2.0]),
        "tuple": (1.0, Box(by=2.0)),
        "set": {1.0, 2.0},
        "nested": [[1.0], {"k": [2.0]}],
    }
    box = Box(items=holders[kind])

    def all_of(one: Any) -> float:
        if isinstance(one, dict):
            return sum(all_of(item) for item in one.values())
        if isinstance(one, Box):
            return one.by  # type: ignore[attr-defined]
        if isinstance(one, list | tuple | set | deque):
            return sum(map(all_of, one))
        return float(one)

    one = box.items
    steps: dict[str, list[Callable[[], object]]] = {
        "list": [lambda: one.append(4.0), lambda: one.__setitem__(0, 9.0), lambda: one.pop()],
        "dict": [
            lambda: one.update(b=4.0),
            lambda: one.update({7: 9.0}),
            lambda: one.pop("a"),
        ],
        "deque": [lambda: one.append(4.0), lambda: one.popleft()],
        "tuple": [setting(one[1] if kind == "tuple" else None, "by", 5.0)],
        "set": [lambda: one.add(4.0), lambda: one.discard(1.0)],
        "nested": [lambda: one[0].append(4.0), lambda: one[1]["k"].append(8.0)],
    }
    changed(lab, lambda x: x * all_of(box.items), *steps[kind])


def test_objects_among_the_arguments_are_guarded_wherever_they_are(lab: Lab) -> None:
    """… the objects among its arguments."""
    box, other = Box(by=1.0, parts=[1.0]), Box(by=1.0, parts=[1.0])
    given = [box]
    changed(
        lab,
        lambda x, one: x * one.by + sum(one.parts),
        setting(box, "by", 2.0),
        lambda: box.parts.append(3.0),
        lambda: given.__setitem__(0, other),
        setting(other, "by", 5.0),
        args=lambda: (given[0],),
    )


TENSORS: dict[str, Callable[[Tensor], Tensor]] = {
    "address": lambda one: one * 2,
    "dtype": lambda one: one.double(),
    "shape": lambda one: one[:1],
    "strides": lambda one: one.t().contiguous().t(),
    "requires_grad": lambda one: one.clone().requires_grad_(),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_an_operator_took_count_by_what_a_graph_reads(lab: Lab, case: str) -> None:
    """Tensors count where an operator took them: by address, dtype, shape, strides,."""
    box = Box(table=fresh(lab, 2, 3))

    def function(x: Tensor) -> Tensor:
        return x * box.table + box.table.dim() + box.table.requires_grad

    changed(lab, function, lambda: setattr(box, "table", TENSORS[case](box.table)))


def test_a_tensor_that_no_operator_took_may_become_another_one(lab: Lab) -> None:
    """Tensors count where an operator took them."""
    box = Box(table=fresh(lab, 2, 3), by=2.0)
    counting, counter = counted(lambda x: x * box.by * len(box.table.shape))
    graphed = cgraph.graphed(counting)
    for _ in range(5):
        box.table = fresh(lab, 2, 3)
        x = fresh(lab, 3)
        equal(graphed(x), x * 2.0 * 2)
    assert runs_of(counter) == 2


def test_objects_are_compared_by_their_parts(lab: Lab) -> None:
    """Objects are compared by their parts."""
    box = Box(inner=SimpleNamespace(by=2.0, parts=[1.0, (2.0,)]))
    counting, counter = counted(lambda x: x * box.inner.by + box.inner.parts[0])
    graphed = cgraph.graphed(counting)
    for _ in range(5):
        box.inner = SimpleNamespace(by=2.0, parts=[1.0, (2.0,)])
        x = fresh(lab, 3)
        equal(graphed(x), x * 2.0 + 1.0)
    assert runs_of(counter) == 2


def test_what_has_no_parts_is_compared_by_identity(lab: Lab) -> None:
    """… what has none (functions, generators, streams) by identity."""
    box = Box(activation=torch.relu, own=lambda x: x + 1)
    changed(
        lab,
        lambda x: box.own(box.activation(x)),
        setting(box, "activation", torch.tanh),
        setting(box, "own", lambda x: x + 2),
    )


@pytest.mark.parametrize("value", [numpy.ones(3), bytearray(b"ab")], ids=["ndarray", "bytearray"])
def test_an_array_makes_the_call_eager(lab: Lab, value: Any) -> None:
    """… an ndarray or bytearray makes the call eager."""
    box = Box(array=value)
    counting, counter = counted(lambda x: x * float(box.array[0]))
    graphed = cgraph.graphed(counting)
    with quiet() as caught:
        for number in range(1, 5):
            box.array[0] = number
            x = fresh(lab, 3)
            equal(graphed(x), x * float(number))
            assert runs_of(counter) == number
    assert [one.category for one in caught] == [EagerWarning]
    assert "array" in str(caught[0].message)
