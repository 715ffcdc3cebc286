"""Backward passes inside segments, and the breaks that they pass through or call."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor

import cgraph
from broken import BrokenBackward, check_equal, scaled
from cgraph import SegmentedGraph, eager_break
from cgraph.errors import CaptureError
from lab import Lab, fresh


def test_a_gradient_gets_back_through_a_break(lab: Lab) -> None:
    x = fresh(lab, 8).requires_grad_()

    def body() -> Tensor:
        return torch.autograd.grad(scaled(x * x).sin().sum(), x)[0]

    graph, y = SegmentedGraph.capture(body)
    assert len(graph.breaks) == 2
    assert torch.equal(y, body())
    for _ in range(3):
        with torch.no_grad():
            x.normal_()
        graph.replay()
        assert torch.equal(y, body())


def test_a_gradient_gets_back_through_a_break_that_records_where_its_caller_does_not(
    lab: Lab,
) -> None:
    x = fresh(lab, 8).requires_grad_()
    recording = eager_break(torch.enable_grad()(lambda x: x.sin()), name="recording")

    def body() -> Tensor:
        with torch.no_grad():
            y = recording(x)
        return torch.autograd.grad((y * x).sum(), x)[0]

    graph, y = SegmentedGraph.capture(body)
    for _ in range(3):
        with torch.no_grad():
            x.normal_()
        graph.replay()
        assert torch.equal(y, body())


def test_a_backward_pass_that_meets_no_break_is_captured(lab: Lab) -> None:
    x = fresh(lab, 8).requires_grad_()

    def body() -> Tensor:
        with torch.no_grad():
            factor = scaled(x)
        return torch.autograd.grad((x * x * factor).sum(), x)[0]

    graph, y = SegmentedGraph.capture(body)
    with torch.no_grad():
        x.normal_()
    graph.replay()
    assert torch.equal(y, body())


def slope(x: Tensor, node: type[BrokenBackward] = BrokenBackward) -> Tensor:
    own = x.detach().requires_grad_()
    (found,) = torch.autograd.grad((node.apply(own) * own).sum(), own)
    return cast("Tensor", found * 2)


def test_a_break_in_a_backward_pass_runs_in_each_replay(lab: Lab) -> None:
    x = fresh(lab, 8)
    graph, y = SegmentedGraph.capture(lambda: slope(x))
    assert len(graph.breaks) == 1
    check_equal(graph.replay, y, slope, x)
    run = cgraph.graphed(slope)
    for _ in range(3):
        x = fresh(lab, 8)
        assert torch.equal(run(x), slope(x))
    assert run.report().captured == 1


@eager_break
def raising(_: Tensor) -> Tensor:
    raise KeyError("mine")


def test_a_break_in_a_backward_pass_that_raises_leaves_nothing_behind(lab: Lab) -> None:
    class Raising(BrokenBackward):
        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return raising(gradient)

    x = fresh(lab, 8)
    with pytest.raises(KeyError, match="mine"):
        SegmentedGraph.capture(lambda: slope(x, Raising))
    graph, y = SegmentedGraph.capture(lambda: slope(x))
    check_equal(graph.replay, y, slope, x)


def test_a_break_in_a_backward_pass_that_goes_on_after_it_has_raised_is_refused(lab: Lab) -> None:
    class Swallowing(BrokenBackward):
        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            try:
                return raising(gradient)
            except KeyError:
                return gradient

    x = fresh(lab, 8)
    with pytest.raises(CaptureError, match="went on after a break"):
        SegmentedGraph.capture(lambda: slope(x, Swallowing))
    graph, y = SegmentedGraph.capture(lambda: scaled(x))
    check_equal(graph.replay, y, scaled, x)


def test_a_capture_that_begins_in_a_backward_pass_is_divided(lab: Lab) -> None:
    run = cgraph.graphed(lambda g: scaled(g * 2) + 1, on_fail="raise")

    class Graphed(BrokenBackward):
        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return cast("Tensor", run(gradient.contiguous()).clone())

    for _ in range(3):
        x, loss = fresh(lab, 8).requires_grad_(), fresh(lab, 8)
        (found,) = torch.autograd.grad(Graphed.apply(x), x, loss)
        assert torch.equal(found, scaled(loss * 2) + 1)
    assert run.report().captured == 1
