"""Functions that breaks of their own call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import cgraph
from cgraph import eager_break
from cgraph.errors import CaptureError
from lab import Lab, fresh


@pytest.mark.parametrize("options", [{}, {"outputs": "clone"}, {"sizes": [2, 4]}, {"warmup": 0}])
def test_a_function_that_its_break_calls_spoils_nothing_of_the_call(
    lab: Lab, options: dict[str, Any]
) -> None:
    run: Any = None

    @eager_break
    def part(x: Tensor) -> Tensor:
        return run(x[:2]).sum(0) if len(x) > 2 else x[0] * 1  # type: ignore[no-any-return]

    def function(x: Tensor) -> Tensor:
        y = x * 3
        return y + part(x * 2)

    graphed = cgraph.graphed(function, **options)
    with torch.no_grad():
        for rows in (4, 4, 2, 4, 2, 4):
            x = fresh(lab, rows, 3)
            run = function
            expected = function(x)
            run = graphed
            assert torch.equal(graphed(x), expected)
    assert graphed.report().captured == 2


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


def test_a_capture_inside_a_break_of_its_own_is_refused(lab: Lab) -> None:
    refused: list[str] = []

    @eager_break
    def part(x: Tensor) -> None:
        if is_replayed:
            with pytest.raises(CaptureError) as raised:
                graphed.capture(x[:1], progress=False)
            refused.append(str(raised.value))

    def function(x: Tensor) -> Tensor:
        y = x * 3
        part(y)
        return y + 1

    graphed, is_replayed = cgraph.graphed(function), False
    graphed(fresh(lab, 4))
    is_replayed = True
    x = fresh(lab, 4)
    assert torch.equal(graphed(x), x * 3 + 1)
    assert len(refused) == 1 and "inside one of its own breaks" in refused[0]
    graphed.capture(x[:1], progress=False)
    assert graphed.report().captured == 2
