"""Evicted graphs that keep their template, and calls without a graph that are forgotten."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import cgraph
from cgraph.errors import StateError
from graphed_calls import states
from lab import Lab, fresh


def test_a_key_is_not_evicted_nor_reset_by_its_own_break(lab: Lab) -> None:
    inside: list[Any] = []

    @cgraph.eager_break
    def pause(y: Tensor) -> Tensor:
        for act in inside:
            act()
        return y + 1

    graphed = cgraph.graphed(lambda x, b: pause(x * 2) * 3 if b else x - 1, max_graphs=2)
    x = fresh(lab, 4)
    graphed(x, True)
    inside.extend(lambda rows=rows: graphed(fresh(lab, rows), False) for rows in (5, 6, 7))
    assert torch.equal(graphed(x, True), (x * 2 + 1) * 3)
    assert states(graphed)[0] == "captured"
    inside[:] = [graphed.reset]
    with pytest.raises(StateError, match="inside a break or a hook"):
        graphed(x, True)
    inside.clear()
    assert torch.equal(graphed(x, True), (x * 2 + 1) * 3)
    graphed.reset()
    assert torch.equal(graphed(x, True), (x * 2 + 1) * 3)


# More than a function remembers.
MANY = 300


def test_iterators_do_not_stay_alive(lab: Lab) -> None:
    def total(values: Iterator[Tensor]) -> Tensor:
        return torch.stack(list(values)).sum(0)

    graphed, x = cgraph.graphed(total), fresh(lab, 2, 3)
    alive = []
    with pytest.warns(UserWarning, match="an iterator"):
        for _ in range(3):
            values = (one for one in x)
            assert torch.equal(graphed(values), x.sum(0))
            alive.append(weakref.ref(values))
            del values
    gc.collect()
    assert [one() for one in alive] == [None] * 3


def test_keys_without_a_graph_are_forgotten_when_there_are_many(lab: Lab) -> None:
    def scaled(x: Tensor, factor: int) -> Tensor:
        return x * factor * x.sum().item()

    graphed, x = cgraph.graphed(scaled), fresh(lab, 2)
    with pytest.warns(UserWarning, match="runs eagerly"):
        for factor in range(MANY):
            graphed(x, factor)
        assert len(graphed.report().keys) < MANY
        assert len(graphed.entries_by_use) < MANY
        for factor in (0, MANY - 1):
            assert torch.equal(graphed(x, factor), scaled(x, factor))


@pytest.mark.filterwarnings("ignore:.*had a new shape:cgraph.errors.EagerWarning")
def test_evicted_keys_are_forgotten_when_there_are_many(sim: Lab) -> None:
    graphed = cgraph.graphed(lambda x: x * 2, max_graphs=2)
    for columns in range(1, MANY):
        x = fresh(sim, 2, columns)
        # The second call keeps it from counting as one of too many.
        for _ in range(2):
            assert torch.equal(graphed(x), x * 2)
    assert len(graphed.report().keys) <= 260
    assert states(graphed)[-2:] == ["captured"] * 2
