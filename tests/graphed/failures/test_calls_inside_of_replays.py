"""Calls that a hook of their own function's replay makes, and hooks that move tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import cgraph
from cgraph.errors import CaptureError, StateError
from lab import Lab, fresh

WAYS: list[dict[str, Any]] = [{}, {"outputs": "static"}, {"debug": "compare"}, {"sizes": [8]}]


def double(x: Tensor) -> Tensor:
    return x * 2


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("register", ["start", "end"])
def test_a_call_in_a_replay_hook_runs_eagerly(
    lab: Lab, options: dict[str, Any], register: str
) -> None:
    function = cgraph.graphed(double, **options)
    for _ in range(3):
        function(fresh(lab, 6))
    x, other, inner = fresh(lab, 6), fresh(lab, 6), []

    def hook(_: cgraph.CUDAGraph) -> None:
        if not inner:
            inner.append(None)
            inner[0] = function(other)

    by_phase = {
        "start": cgraph.register_graph_replay_start_hook,
        "end": cgraph.register_graph_replay_end_hook,
    }
    with by_phase[register](hook):
        result = function(x)
    assert torch.equal(result, x * 2)
    assert torch.equal(inner[0], other * 2)


def test_a_call_in_a_replay_hook_of_a_training_step_keeps_its_gradients(lab: Lab) -> None:
    function = cgraph.graphed(lambda x: (x * x).sum())
    for _ in range(3):
        function(fresh(lab, 6).requires_grad_()).backward()
    x, other = fresh(lab, 6).requires_grad_(), fresh(lab, 6).requires_grad_()
    inner: list[Tensor] = []

    def hook(_: cgraph.CUDAGraph) -> None:
        if not inner:
            inner.append(x.detach().sum())
            with torch.enable_grad():
                inner[0] = function(other)

    with cgraph.register_graph_replay_start_hook(hook):
        function(x).backward()
        inner[0].backward()
    assert torch.equal(x.grad, 2 * x)
    assert torch.equal(other.grad, 2 * other)


@pytest.mark.parametrize("options", [{}, {"sizes": [8]}], ids=str)
def test_a_tensor_that_a_hook_gives_other_memory_is_read_before_or_after_that(
    lab: Lab, options: dict[str, Any]
) -> None:
    function = cgraph.graphed(double, **options)
    x = fresh(lab, 6)
    for _ in range(3):
        function(x)
    before, after = double(x), fresh(lab, 6)
    with cgraph.register_graph_replay_start_hook(lambda _: x.set_(after)):
        result = function(x)
    assert any(torch.equal(result, one) for one in (before, double(after)))


def test_a_function_is_not_captured_or_reset_inside_its_own_replay(lab: Lab) -> None:
    function = cgraph.graphed(double)
    x = fresh(lab, 6)
    for _ in range(3):
        function(x)

    def resets(_: cgraph.CUDAGraph) -> None:
        with pytest.raises(StateError, match="inside a break or a hook"):
            function.reset()
        with pytest.raises(CaptureError, match="inside a break or a hook"):
            function.capture(x)

    with cgraph.register_graph_replay_start_hook(resets):
        assert torch.equal(function(x), x * 2)
