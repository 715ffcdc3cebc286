"""Breaks behind a backward pass inside of a graphed function: what they find in ``.grad``."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from cgraph._operators.rollback import Rollback
from cgraph.errors import CaptureError
from lab import Lab, fresh

Step = Callable[[Tensor], None]


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
        assert net is not None  # what only the break names has no gradients
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
