"""Properties of arguments besides their elements: classes, attributes, histories, mutable parts."""

from __future__ import annotations

import collections
import copy
import dataclasses
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from graphed_calls import states
from lab import Lab, fresh


class Named(nn.Parameter):
    """A parameter of a class of its own."""


def test_an_argument_is_of_the_class_of_its_parameter(lab: Lab) -> None:
    def run(x: Tensor) -> Tensor:
        return x * 2 + (1000 if isinstance(x, Named) else 0)

    graphed = cgraph.graphed(run)
    with torch.no_grad():
        for _ in range(2):
            x = Named(fresh(lab, 3), requires_grad=False)
            assert torch.equal(graphed(x), run(x))


@dataclasses.dataclass
class Config:
    """An object with a list."""

    scales: list[int]


@dataclasses.dataclass(frozen=True)
class Fixed:
    """An object with a list in a tuple, which Python cannot hash."""

    scales: tuple[list[int], ...]


class Table(dict[str, int]):
    """A dictionary that pytree does not know."""


class Row(list[int]):
    """A list that pytree does not know."""


CHANGES: dict[str, tuple[Any, Callable[[Any], int], Callable[[Any], None]]] = {
    "dataclass": (Config([1]), lambda c: sum(c.scales), lambda c: c.scales.append(2)),
    "frozen": (Fixed(([1],)), lambda c: sum(c.scales[0]), lambda c: c.scales[0].append(2)),
    "dict": (Table(k=1), lambda c: c["k"], lambda c: c.update(k=c["k"] + 1)),
    "counter": (collections.Counter("a"), lambda c: c["a"], lambda c: c.update("a")),
    "list": (Row([1]), sum, lambda c: c.append(2)),
    "namespace": (
        types.SimpleNamespace(deep={"k": [1]}),
        lambda c: sum(c.deep["k"]),
        lambda c: c.deep["k"].append(2),
    ),
}


@pytest.mark.filterwarnings("ignore:.*runs eagerly for:UserWarning")
@pytest.mark.parametrize("kind", CHANGES)
def test_a_function_that_changes_a_value_deep_inside_changes_it_once_in_each_call(
    lab: Lab, kind: str
) -> None:
    value, scale_of, change = copy.deepcopy(CHANGES[kind])

    def run(x: Tensor, value: Any) -> Tensor:
        change(value)
        return x * 2

    graphed = cgraph.graphed(run)
    for _ in range(3):
        before, x = scale_of(value), fresh(lab, 3)
        assert torch.equal(graphed(x, value), x * 2)
        step = 1 if kind in ("dict", "counter") else 2
        assert scale_of(value) == before + step


@dataclasses.dataclass
class Node:
    """A part of a graph with cycles."""

    links: list[Node]
    number: int


def test_a_value_that_leads_back_to_itself_is_compared_in_time(lab: Lab) -> None:
    one, two = Node([], 1), Node([], 2)
    one.links += [two, two, one]
    two.links += [one, one]
    graphed = cgraph.graphed(lambda x, node: x * node.number)
    for _ in range(2):
        x = fresh(lab, 3)
        assert torch.equal(graphed(x, one), x)


@pytest.mark.filterwarnings("ignore:.*runs eagerly for:UserWarning")
def test_values_that_a_function_changes_stay_the_objects_that_they_are(lab: Lab) -> None:
    def over(row: Row, parts: list[Any]) -> None:
        row[:] = []
        row.extend(parts)

    def run(x: Tensor, row: Any) -> Tensor:
        row.pop(0)
        row[0].n += 1
        row[0].inside[0].append(3)
        return x * row[0].n

    kept = [types.SimpleNamespace(n=n, inside=([n],)) for n in range(5)]
    others = copy.deepcopy(kept)
    row, other = Row(), Row()
    over(row, kept)
    over(other, others)
    lists = [one.inside[0] for one in kept]
    graphed = cgraph.graphed(run)
    for _ in range(4):
        x = fresh(lab, 3)
        assert torch.equal(graphed(x, row), run(x, other))
        assert row == other and kept == others
        assert all(one.inside[0] is known for one, known in zip(kept, lists, strict=True))
        assert all(any(one is known for known in kept) for one in row)


class Slow:
    """A constant that is compared for a while, during which other threads run."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        time.sleep(0.002)
        return isinstance(other, Slow) and self.number == other.number

    def __hash__(self) -> int:
        return self.number


# Threads that take turns make captures of little use.
@pytest.mark.filterwarnings("ignore:.*runs eagerly")
def test_a_graph_that_goes_while_a_call_is_compared_with_it_is_captured_anew(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda x, slow: x * slow.number, max_graphs=1, warmup=1)
    failures: list[object] = []

    def work(number: int) -> None:
        try:
            for _ in range(12):
                x = torch.ones(3, device=lab.device)
                if not torch.equal(graphed(x, Slow(number)), x * number):
                    failures.append(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in (2, 3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert not failures


def test_a_function_is_captured_anew_on_another_simulator() -> None:
    graphed = cgraph.graphed(lambda x: x * 2)
    for _ in range(3):
        with cgraph.sim.use():
            for _ in range(2):
                x = torch.rand(3)
                assert torch.equal(graphed(x), x * 2)
    assert states(graphed) == ["captured"] * 3
