"""The contract, "Guarded", keys and unseen values: each test quotes its sentence."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import cgraph
from cgraph.errors import PlacesWarning
from contract_calls import Box, changed, counted, equal, follow, runs_of, setting
from graphed_calls import numbers, quiet
from lab import Lab, fresh

SETTINGS: dict[str, Any] = {"by": 1.0}
OWN = sys.modules[__name__]


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def test_a_plain_value_that_changes_back_finds_its_graph_and_an_object_does_not(lab: Lab) -> None:
    """A plain value that changed makes another key; anything else captures anew."""
    first, second = (lambda x: x + 1), (lambda x: x + 1)
    box = Box(by=2.0, own=first)
    counting, counter = counted(lambda x: box.own(x) * box.by)
    graphed = cgraph.graphed(counting)

    def calls(count: int) -> int:
        before = runs_of(counter)
        for _ in range(count):
            x = fresh(lab, 3)
            equal(graphed(x), box.own(x) * box.by)
        return runs_of(counter) - before

    assert calls(3) == 2
    box.by = 3.0
    assert calls(3) == 2
    box.by = 2.0
    assert calls(3) == 0
    box.own = second
    assert calls(3) == 1
    box.own = first
    assert calls(3) == 1


def test_guards_adds_a_function_of_the_arguments(lab: Lab) -> None:
    """`guards=` adds a callable of the arguments."""
    hidden = {"n": 1.0}
    changed(
        lab,
        lambda x: x * vars(OWN)["SETT" + "INGS"]["by"] * hidden_value(hidden),
        lambda: hidden.update(n=2.0),
        guards=lambda x: hidden["n"],
    )


def hidden_value(table: dict[str, float]) -> float:
    """Return a value that no name or literal leads to."""
    return sum(table.values())


def test_guards_adds_dotted_names(lab: Lab) -> None:
    """… or dotted names."""
    box = Box(scale=1.0)
    name = "".join(["sc", "ale"])
    changed(lab, lambda x: x * getattr(box, name), setting(box, "scale", 2.0), guards=["box.scale"])


def test_guards_takes_names_out(lab: Lab) -> None:
    """… and takes names out (`{"self.step": False}`)."""

    class Stepping:
        def __init__(self) -> None:
            self.step = 0

        def run(self, x: Tensor) -> Tensor:
            self.step += 1
            return x * 2

    one = Stepping()
    graphed = cgraph.graphed(one.run, guards={"self.step": False})
    follow(lab, graphed, lambda x: x * 2, calls=6)
    assert numbers(graphed) == (1, 5, 1)
    assert one.step == 2


def test_computed_names_are_not_seen(lab: Lab) -> None:
    """Not seen: computed names, `vars()`."""
    box = Box(scale=2.0)
    name = "".join(["sc", "ale"])
    graphed = cgraph.graphed(lambda x: x * getattr(box, name))
    follow(lab, graphed, lambda x: x * 2, calls=3)
    box.scale = 5.0
    follow(lab, graphed, lambda x: x * 2, calls=3)
    assert numbers(graphed) == (1, 5, 1)


def test_more_places_than_are_compared_warn_once_with_a_name(lab: Lab) -> None:
    """More than 4,096 places: one warning names where it stopped."""
    box = Box(many=[float(number) for number in range(5000)])
    graphed = cgraph.graphed(lambda x: x * box.many[0])
    with quiet() as caught:
        for _ in range(4):
            x = fresh(lab, 3)
            equal(graphed(x), x * 0.0)
    assert [one.category for one in caught] == [PlacesWarning]
    assert "many[" in str(caught[0].message)


def test_what_only_a_break_names_is_not_guarded(lab: Lab) -> None:
    """… that stand in code which ran in the observed call and the capture (breaks excluded)."""
    box = Box(by=1.0, seen=0)

    @cgraph.eager_break
    def work(x: Tensor) -> Tensor:
        box.seen += 1
        return x * box.by

    counting, counter = counted(lambda x: work(x + 1) - 1)
    graphed = cgraph.graphed(counting)
    for number in range(6):
        box.by = float(number)
        x = fresh(lab, 3)
        equal(graphed(x), (x + 1) * box.by - 1)
        assert box.seen == number + 1
    assert runs_of(counter) == 2
