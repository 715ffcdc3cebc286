"""Backward passes inside of graphed functions that come through breaks in other ways, or cannot."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from broken import scaled
from cgraph import SegmentedGraph, eager_break
from cgraph.errors import CaptureError
from flow_calls import Around
from graphed_calls import near, same_gradients
from inner_flow_calls import Step, both, loss_of
from lab import Lab, fresh


@pytest.mark.parametrize("is_used", [False, True])
def test_results_of_a_break_that_materializes_may_be_written_in_place(
    lab: Lab, is_used: bool
) -> None:
    unused, own = nn.Linear(6, 6).to(lab.device), nn.Linear(6, 6).to(lab.device)

    @eager_break(materialize_grads=True)
    def way(x: Tensor) -> Tensor:
        return own(x) + (unused(x) if is_used else 0)

    x = fresh(lab, 4, 6)
    torch.relu_(way(x)).sum().backward()
    assert unused.weight.grad is not None and own.weight.grad is not None
    assert bool(unused.weight.grad.any()) == is_used and own.weight.grad.any()


def test_a_break_off_the_way_of_gradients_sees_that_its_argument_requires_one(lab: Lab) -> None:
    @eager_break
    def slope(x: Tensor) -> Tensor:
        if not x.requires_grad:
            return x * 1
        return torch.autograd.grad(x.pow(3).sum(), x, create_graph=True)[0]

    def make(net: Around) -> Step:
        def step(x: Tensor) -> Tensor:
            net.zero_grad()
            hidden = net.first(x)
            loss = loss_of(net.last(hidden * slope(hidden).detach()))
            loss.backward()
            return loss.detach()

        return step

    graphed, eagerly, mine, eager = both(lab, Around(nn.Identity()), make)
    for _ in range(4):
        x = fresh(lab, 4, 6)
        assert near(graphed(x), eagerly(x))
        assert same_gradients(mine, eager)
    assert graphed.report().captured == 1


def test_a_backward_pass_behind_a_capture_says_where_it_belongs(lab: Lab) -> None:
    x = fresh(lab, 8).requires_grad_()
    _, y = SegmentedGraph.capture(lambda: scaled(x * 2))
    with pytest.raises(CaptureError, match="inside of the captured function"):
        y.sum().backward()


def test_segments_with_a_backward_pass_go_without_the_garbage_collector(lab: Lab) -> None:
    x = fresh(lab, 8).requires_grad_()

    def body() -> Tensor:
        return torch.autograd.grad(scaled(x * x).sum(), x)[0]

    SegmentedGraph.capture(body)
    gc.collect()
    gc.disable()
    try:
        graph, y = SegmentedGraph.capture(body)
        seen = [weakref.ref(one) for one in graph.segments]
        del graph, y
        assert len(seen) >= 2 and all(one() is None for one in seen)
    finally:
        gc.enable()
