"""Graphed functions inside of what torch does with functions: checkpointing, compilation."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import cgraph
from graphed_calls import near, same_gradients
from lab import Lab, fresh
from networks import leaf


@pytest.mark.parametrize("is_captured", [False, True])
def test_a_call_that_is_checkpointed_gives_the_gradients_of_eager(
    lab: Lab, is_captured: bool
) -> None:
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh()).to(lab.device)
    eager, graphed = copy.deepcopy(net), cgraph.graphed(net)
    if is_captured:
        graphed.capture(leaf(lab, 4, 6))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            x = leaf(lab, 4, 6)
            same = x.detach().clone().requires_grad_()
            checkpoint(graphed, x, use_reentrant=False).sum().backward()
            eager(same).sum().backward()
            near(x.grad, same.grad)
            assert same_gradients(net, eager)
    told = [one for one in caught if "call .capture() before" in str(one.message)]
    assert len(told) == (0 if is_captured else 1)
    assert graphed.report().captured == is_captured


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
