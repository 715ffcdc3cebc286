"""Functions that breaks of their own call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import cgraph
from cgraph import eager_break
from lab import Lab, fresh


def test_two_functions_that_call_each_other_spoil_nothing(lab: Lab) -> None:
    first: Any = None
    second: Any = None

    @eager_break
    def by_first(x: Tensor) -> Tensor:
        return second(x[:2]).sum(0) if len(x) > 1 else x[0] * 1  # type: ignore[no-any-return]

    @eager_break
    def by_second(x: Tensor) -> Tensor:
        return first(x[:1]).sum(0)  # type: ignore[no-any-return]

    def one(x: Tensor) -> Tensor:
        y = x * 3
        return y + by_first(x * 2)

    def other(x: Tensor) -> Tensor:
        y = x * 5
        return y + by_second(x * 2)

    graphs = cgraph.graphed(one), cgraph.graphed(other)
    with torch.no_grad():
        for _ in range(4):
            x = fresh(lab, 4, 3)
            first, second = one, other
            expected = one(x)
            first, second = graphs
            assert torch.equal(first(x), expected)
