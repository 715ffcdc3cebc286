"""Graphed functions inside of what torch does with functions: checkpointing, compilation."""

from __future__ import annotations

import torch

import cgraph
from graphed_calls import near
from lab import Lab, fresh


def test_compiled_code_calls_a_graphed_function_as_it_is(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda x: x * 2 + 1)
    with torch.no_grad():
        compiled = torch.compile(lambda x: graphed(x * 3) - 1, backend="eager")
        for _ in range(3):
            x = fresh(lab, 4)
            near(compiled(x), x * 6)
        before = graphed.report().replays
        near(compiled(x), x * 6)
        assert graphed.report().replays == before + 1
        assert graphed.report().captured == 1


def test_a_compiled_function_can_be_graphed(lab: Lab) -> None:
    graphed = cgraph.graphed(torch.compile(lambda x: x * 2 + 1, backend="eager"))
    with torch.no_grad():
        for _ in range(3):
            x = fresh(lab, 4)
            near(graphed(x), x * 2 + 1)
    assert graphed.report().captured == 1
