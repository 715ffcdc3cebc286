"""Graphs that are one too many keep their template where that was asked for."""

from __future__ import annotations

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
    with pytest.raises(StateError, match="inside one of its own breaks"):
        graphed(x, True)
    inside.clear()
    assert torch.equal(graphed(x, True), (x * 2 + 1) * 3)
    graphed.reset()
    assert torch.equal(graphed(x, True), (x * 2 + 1) * 3)
