"""Breaks beside a backward pass inside a graphed function: through them, and after it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from broken import scaled
from cgraph import SegmentedGraph, eager_break
from cgraph._operators.rollback import Rollback
from cgraph.errors import CaptureError
from flow_calls import Around
from graphed_calls import near, same_gradients
from inner_flow_calls import Step, both, loss_of, same_parameters, training
from lab import Lab, fresh


class Attended(nn.Module):
    """A module with a break without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(6, 18), nn.Linear(6, 3)

    @eager_break
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.T / q.abs().max().item(), -1) @ v

    def forward(self, x: Tensor) -> Tensor:
        return self.outward(self.attend(*self.inward(x).chunk(3, -1)) + x)


def test_a_break_that_no_backward_pass_comes_through_keeps_no_history(lab: Lab) -> None:
    seen: list[weakref.ref[Tensor]] = []

    @eager_break
    def noting(loss: Tensor) -> None:
        doubled = loss * 2
        seen.append(weakref.ref(doubled))

    def make(net: nn.Module) -> Step:
        step = training(net)

        def noted(x: Tensor) -> Tensor:
            loss = step(x)
            noting(loss_of(net(x)))
            return loss

        return noted

    graphed, eagerly, mine, eager = both(lab, Attended(), make)
    for _ in range(3):
        x = fresh(lab, 4, 6)
        assert near(graphed(x), eagerly(x))
    gc.collect()
    assert len(seen) >= 6 and all(one() is None for one in seen)
    assert same_parameters(mine, eager)


def test_a_step_whose_gradients_come_back_through_a_break_is_captured(lab: Lab) -> None:
    graphed, eagerly, mine, eager = both(lab, Attended(), training)
    for _ in range(6):
        x = fresh(lab, 4, 6)
        assert near(graphed(x), eagerly(x))
        assert same_parameters(mine, eager)
    (key,) = graphed.report().keys
    assert key.state == "captured"
    assert [name.split(" (")[0] for name in key.breaks] == [
        "Attended.attend",
        "gradients of Attended.attend",
    ]


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


def steps_in_a_break(net: nn.Module, make: Any = torch.optim.SGD) -> Step:
    optimizer = make(net.parameters(), lr=0.1)

    @cgraph.eager_break
    def update() -> None:
        optimizer.step()

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        update()

    return step


@pytest.mark.parametrize("make", [steps_in_a_break, lambda net: lambda x: net(x).relu_().detach()])
def test_a_graph_keeps_nothing_of_what_put_back_the_calls_before_it(
    lab: Lab, make: Callable[[nn.Module], Step]
) -> None:
    graphed = cgraph.graphed(make(nn.Linear(3, 2).to(lab.device)))
    for _ in range(3):
        graphed(fresh(lab, 4, 3))
    gc.collect()
    assert graphed.report().captured
    assert not any(type(one) is Rollback for one in gc.get_objects())


@pytest.mark.parametrize("grad", [False, True])
def test_a_break_runs_once_in_each_call_and_once_back(lab: Lab, grad: bool) -> None:
    counts, given = [0], list[Tensor]()
    scaled = nn.Linear(3, 3, bias=False).to(lab.device)

    @cgraph.eager_break
    def counted(x: Tensor) -> Tensor:
        counts[0] += 1
        y = scaled(x) * counts[0]
        if grad:
            y.register_hook(given.append)
        return y

    net = scaled

    def function(x: Tensor) -> Tensor:
        assert net is not None  # parameters that only the break names have no gradients
        return counted(x * 2).sin()

    graphed = cgraph.graphed(function)
    with torch.set_grad_enabled(grad):
        for number in range(1, 6):
            x = fresh(lab, 3).requires_grad_(grad)
            y = graphed(x)
            torch.testing.assert_close(y, (scaled(x * 2) * number).sin())
            assert counts == [number]
            if grad:
                y.sum().backward()
                slope = (scaled(x.detach() * 2) * number).cos()
                torch.testing.assert_close(given.pop(), slope)
                torch.testing.assert_close(x.grad, (slope @ scaled.weight) * 2 * number)
                assert not given
    assert graphed.report().captured == 1


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
def test_a_break_in_a_backward_pass_to_come_is_refused_once(lab: Lab) -> None:
    noted = cgraph.eager_break(lambda x: x * 1)

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return noted(gradient) * 2  # type: ignore[no-any-return]

    graphed = cgraph.graphed(lambda x: noted(Doubled.apply(x)))
    for number in range(4):
        x = fresh(lab, 3).requires_grad_()
        if number == 1:
            with pytest.raises(CaptureError, match="in its forward pass"):
                graphed(x)
            continue
        graphed(x).sum().backward()
        torch.testing.assert_close(x.grad, torch.full_like(x, 2.0))


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
def test_a_function_whose_break_alone_names_a_module_runs_eagerly(lab: Lab) -> None:
    net = nn.Linear(3, 3).to(lab.device)
    named = cgraph.eager_break(lambda x: net(x))
    graphed = cgraph.graphed(lambda x: named(x) * 2)
    for _ in range(4):
        net.zero_grad()
        graphed(fresh(lab, 2, 3)).sum().backward()
        torch.testing.assert_close(net.bias.grad, torch.full_like(net.bias, 4.0))
    assert "in no module that the function names" in graphed.report().keys[0].reason
