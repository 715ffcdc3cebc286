"""Modes, tracers, checkpointing and compilation around graphed functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import cgraph
from graphed_calls import near, states
from lab import Lab, fresh


class Negated(TorchFunctionMode):
    """A mode that negates the result of ``relu``."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return -result if func is torch.relu else result


class Seen(TorchDispatchMode):
    """A counter of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_mode_of_functions_does_what_it_does_and_leaves_no_graph(
    lab: Lab, modes_told: None
) -> None:
    rectified = cgraph.graphed(lambda x: torch.relu(x))
    for number in range(3):
        x = fresh(lab, 3)
        with Negated():
            found = rectified(x)
        assert_close(found, -torch.relu(x))
        assert len(states(rectified)) == min(number, 1)
        assert_close(rectified(x), torch.relu(x))
    assert states(rectified) == ["captured"]


def test_a_mode_of_dispatch_sees_the_operators_of_each_call_once(
    lab: Lab, modes_told: None
) -> None:
    weight = fresh(lab, 3, 3)
    multiplied = cgraph.graphed(lambda x: x @ weight)
    with torch.no_grad():
        for _ in range(3):
            x = fresh(lab, 3, 3)
            assert_close(multiplied(x).clone(), x @ weight)
            with Seen() as seen:
                assert_close(multiplied(x), x @ weight)
            assert seen.count >= 1
            with FlopCounterMode(display=False) as counted:
                multiplied(x)
            assert counted.get_total_flops() == 54
    (key,) = multiplied.report().keys
    assert key.state == "captured" and not key.rerecorded


def _by_fx(function: Callable[..., Any], _: Tensor) -> Any:
    return fx.symbolic_trace(lambda x: function(x))


def _by_jit(function: Callable[..., Any], x: Tensor) -> Any:
    return torch.jit.trace(lambda x: function(x), x)  # type: ignore[no-untyped-call]


def _by_make_fx(function: Callable[..., Any], x: Tensor) -> Any:
    return make_fx(lambda x: function(x))(x)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
@pytest.mark.parametrize("trace", [_by_fx, _by_jit, _by_make_fx])
@pytest.mark.parametrize("begins", ["traced", "captured"])
def test_what_a_tracer_makes_of_a_function_computes_what_it_does(
    lab: Lab, begins: str, trace: Callable[[Callable[..., Any], Tensor], Any]
) -> None:
    tripled = cgraph.graphed(lambda x: x * 3)
    with torch.no_grad():
        if begins == "captured":
            tripled(fresh(lab, 3))
        traced = trace(tripled, fresh(lab, 3))
        for _ in range(2):
            x = fresh(lab, 3)
            assert_close(traced(x), x * 3)
            assert_close(tripled(x), x * 3)
    assert states(tripled) == ["captured"]


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
