"""What a graphed function remembers of calls that it has no graph for, and what it forgets."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import cgraph
from graphed_calls import states
from lab import Lab, fresh

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


def test_evicted_keys_are_forgotten_when_there_are_many(sim: Lab) -> None:
    graphed = cgraph.graphed(lambda x: x * 2, max_graphs=2)
    for columns in range(1, MANY):
        x = fresh(sim, 2, columns)
        # The second call keeps it from being one of too many.
        for _ in range(2):
            assert torch.equal(graphed(x), x * 2)
    assert len(graphed.report().keys) <= 260
    assert states(graphed)[-2:] == ["captured"] * 2
