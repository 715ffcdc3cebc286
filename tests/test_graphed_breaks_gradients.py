"""Breaks behind a backward pass inside of a graphed function: what they find in ``.grad``."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import cgraph
from cgraph._state.rollback import Rollback
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


def adam_in_a_break(net: nn.Module) -> Step:
    return steps_in_a_break(net, torch.optim.Adam)


def with_break(net: nn.Module, work: Callable[[nn.Module], object]) -> Step:
    """A step with a break between the backward pass and the optimizer."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    @cgraph.eager_break
    def between() -> None:
        work(net)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        between()
        optimizer.step()

    return step


def halve(net: nn.Module) -> None:
    """As a loop of collectives, which write to the gradients."""
    for one in net.parameters():
        assert one.grad is not None
        one.grad.mul_(0.5)


def put_half(net: nn.Module) -> None:
    for one in net.parameters():
        assert one.grad is not None
        one.grad = one.grad * 0.5


def scaled(net: nn.Module) -> Step:
    return with_break(net, halve)


def clipped(net: nn.Module) -> Step:
    return with_break(net, lambda net: clip_grad_norm_(net.parameters(), 1e-3))


def replaced(net: nn.Module) -> Step:
    return with_break(net, put_half)


def scaled_by_hooks(net: nn.Module) -> Step:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    @cgraph.eager_break
    def reduce(leaf: Tensor) -> None:
        assert leaf.grad is not None
        leaf.grad.mul_(0.5)

    for one in net.parameters():
        one.register_post_accumulate_grad_hook(lambda leaf: reduce(leaf))

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()

    return step


def two_updates(net: nn.Module) -> Step:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    @cgraph.eager_break
    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def step(x: Tensor) -> None:
        net(x).square().mean().backward()
        update()
        net(x + 1).square().mean().backward()
        update()

    return step


def added_up(net: nn.Module) -> Step:
    """Gradients that stay, and become more in each call."""
    reduce = cgraph.eager_break(lambda: halve(net))

    def step(x: Tensor) -> None:
        net(x).square().mean().backward()
        reduce()
        net(x + 1).square().mean().backward()
        reduce()

    return step


MAKES = [
    steps_in_a_break,
    adam_in_a_break,
    scaled,
    clipped,
    scaled_by_hooks,
    two_updates,
    added_up,
    replaced,
]


def near(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*runs eagerly.*goes on with a gradient")
@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("make", MAKES)
def test_a_break_finds_the_gradients_of_its_own_call(
    lab: Lab, make: Callable[[nn.Module], Step], warmup: int
) -> None:
    mine = nn.Linear(3, 2).to(lab.device)
    other = copy.deepcopy(mine)
    graphed, eager = cgraph.graphed(make(mine), warmup=warmup), make(other)
    for _ in range(5):
        x = fresh(lab, 4, 3)
        graphed(x)
        eager(x)
        for one, two in zip(mine.parameters(), other.parameters(), strict=True):
            assert near(one, two)
            assert near(one.grad, two.grad)
    assert (graphed.report().captured == 0) == (make is replaced)


def test_a_break_that_raises_behind_a_backward_pass_leaves_its_gradients(lab: Lab) -> None:
    net, limit = nn.Linear(3, 2).to(lab.device), [100.0]

    @cgraph.eager_break
    def check(loss: Tensor) -> None:
        if float(loss) > limit[0]:
            raise ValueError("too large")

    def step(x: Tensor) -> None:
        net.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        check(loss.detach())

    graphed = cgraph.graphed(step)
    graphed(fresh(lab, 4, 3))
    graphed(fresh(lab, 4, 3))
    limit[0] = 0.0
    x = fresh(lab, 4, 3)
    with pytest.raises(ValueError, match="too large"):
        graphed(x)
    (expected,) = torch.autograd.grad(net(x).square().mean(), [net.weight])
    kept = net.weight.grad
    assert near(kept, expected)
    limit[0] = 100.0
    graphed(fresh(lab, 4, 3))
    assert near(kept, expected)


@pytest.mark.parametrize("steps_behind", [False, True])
@pytest.mark.filterwarnings("ignore:.*runs eagerly.*goes on with a gradient")
def test_a_break_may_train_a_module_of_its_own(lab: Lab, steps_behind: bool) -> None:
    def make(net: nn.Module, other: nn.Module) -> Callable[[Tensor], Tensor]:
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)

        @cgraph.eager_break
        def train(x: Tensor) -> None:
            optimizer.zero_grad()
            other(x).square().mean().backward()
            if not steps_behind:
                optimizer.step()

        def function(x: Tensor) -> Tensor:
            y = net(x) * 2
            train(x)
            if steps_behind:
                optimizer.step()
            return y.detach()

        return function

    mine = [nn.Linear(3, 2).to(lab.device) for _ in range(2)]
    others = copy.deepcopy(mine)
    graphed, eager = cgraph.graphed(make(*mine)), make(*others)
    for _ in range(5):
        x = fresh(lab, 4, 3)
        assert near(graphed(x), eager(x))
        assert near(mine[1].weight, others[1].weight)
        assert near(mine[1].weight.grad, others[1].weight.grad)
    assert graphed.report().captured == (not steps_behind)


def test_a_break_keeps_no_gradients_of_the_time_of_the_capture(lab: Lab) -> None:
    net, other = (nn.Linear(3, 2).to(lab.device) for _ in range(2))
    step = scaled(net)

    def function(x: Tensor) -> None:
        step(x)
        assert other is not None

    other(fresh(lab, 4, 3)).sum().backward()
    graphed = cgraph.graphed(function)
    for _ in range(3):
        graphed(fresh(lab, 4, 3))
    gradient = weakref.ref(other.weight.grad)
    other.weight.grad = None
    gc.collect()
    assert gradient() is None


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
