"""Backward passes inside of graphed functions that come through breaks in other ways, or cannot."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import cgraph
from broken import BrokenBackward, scaled
from cgraph import SegmentedGraph, eager_break
from cgraph.errors import CaptureError
from flow_calls import Around
from graphed_calls import near, quiet, same_gradients, states
from inner_flow_calls import Step, both, loss_of, passes, same_parameters, training
from lab import Lab, fresh

plain: Callable[[Tensor], Tensor] = eager_break(lambda x: x * 2)


class First(nn.Module):
    """Makes gradients before the first break is met."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.one, self.two = kind, nn.Linear(6, 6), nn.Linear(6, 6)

    def losses(self, x: Tensor) -> list[Callable[[], Tensor]]:
        if self.kind == "node":
            return [lambda: loss_of(self.two(BrokenBackward.apply(self.one(x))))]
        if self.kind == "later":
            return [lambda: loss_of(self.one(x)), lambda: loss_of(scaled(self.two(x)))]
        return [lambda: loss_of(self.two(self.one(x))), lambda: loss_of(plain(x.detach()))]


@pytest.mark.parametrize("warmup", [0, 1, 3])
@pytest.mark.parametrize("kind", ["node", "later", "behind"])
def test_gradients_that_come_before_the_first_break_are_those_of_eager(
    lab: Lab, kind: str, warmup: int
) -> None:
    def make(net: First) -> Step:
        def step(x: Tensor) -> Tensor:
            found = [one() for one in net.losses(x)]
            for one in found:
                if one.requires_grad:
                    one.backward()
            return sum(one.detach() for one in found)

        return step

    graphed, eagerly, mine, eager = both(lab, First(kind), make, warmup=warmup)
    for _ in range(4):
        x = fresh(lab, 4, 6)
        assert near(graphed(x), eagerly(x))
        assert same_gradients(mine, eager)
        for net in (mine, eager):
            net.zero_grad()
    assert graphed.report().captured == 1


@pytest.mark.parametrize("kind", ["parameter", "create_graph"])
def test_a_refused_backward_pass_that_is_swallowed_is_not_captured(lab: Lab, kind: str) -> None:
    net = Around(nn.Identity()).to(lab.device)
    middle = nn.Linear(6, 6).to(lab.device)
    way = eager_break(lambda x: middle(x) if kind == "parameter" else x.sin())

    def step(x: Tensor) -> Tensor:
        result = net.last(way(net.first(x)))
        try:
            loss = loss_of(result)
            torch.autograd.grad(loss, net.first.weight, create_graph=kind == "create_graph")
        except RuntimeError:
            return x * 0
        return loss.detach()

    graphed = cgraph.graphed(step)
    with quiet():
        for _ in range(3):
            x = fresh(lab, 4, 6)
            assert near(graphed(x), loss_of(net.last(way(net.first(x)))))
    assert states(graphed) == ["eager"]


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


def test_a_statistic_beside_what_a_break_materializes_stays_without_history(lab: Lab) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.expert, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

        @eager_break(materialize_grads=True)
        def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
            out = torch.zeros_like(x)
            if x.sum() > 0:
                out = out + self.expert(x)
            return out, x.mean()

        def forward(self, x: Tensor) -> Tensor:
            out, mean = self.route(x)
            assert not mean.requires_grad
            return self.last(out + mean)

    graphed, eagerly, mine, eager = both(lab, Counting(), passes)
    for sign in (1, -1, 1, -1):
        x = fresh(lab, 4, 6).abs() * sign
        assert near(graphed(x), eagerly(x))
        assert same_gradients(mine, eager)
    assert graphed.report().captured == 1


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


def test_a_result_that_begins_to_require_a_gradient_inside_a_step_is_refused(lab: Lab) -> None:
    ways: list[Callable[[Tensor], Tensor]] = [torch.Tensor.detach]
    between = eager_break(lambda x: ways[0](x) * 2)

    graphed, eagerly, mine, eager = both(lab, Around(lambda x: x + between(x)), passes)
    for way in (torch.Tensor.detach, torch.sin, torch.Tensor.detach):
        ways[0] = way
        x = fresh(lab, 4, 6)
        if way is torch.sin:
            with pytest.raises(CaptureError, match="requires a gradient where the capture"):
                graphed(x)
            continue
        assert near(graphed(x), eagerly(x))
        assert same_gradients(mine, eager)


class Found(nn.Module):
    """Finds what only its second result depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

    @eager_break(materialize_grads=True)
    def way(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, self.other(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self.first(x))[0]


class Given(Found):
    """Is given it."""

    @eager_break
    def given(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, weight * 3

    def forward(self, x: Tensor) -> Tensor:
        return self.given(self.first(x), self.other.weight)[0]


class Computed(Found):
    """Is given what was computed of it."""

    @eager_break
    def both(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, y * 2

    def forward(self, x: Tensor) -> Tensor:
        return self.both(self.first(x), self.other(x))[0]


@pytest.mark.parametrize("kind", [Found, Given, Computed])
def test_what_only_unused_results_of_a_break_depend_on_gets_no_gradient(
    lab: Lab, kind: Callable[[], nn.Module]
) -> None:
    graphed, eagerly, mine, eager = both(lab, kind(), training)
    for _ in range(3):
        x = fresh(lab, 4, 6)
        assert near(graphed(x), eagerly(x))
        assert same_gradients(mine, eager)
    assert same_parameters(mine, eager)
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


def test_the_last_backward_pass_of_a_step_leaves_no_history(lab: Lab) -> None:
    seen: list[weakref.ref[Tensor]] = []

    def noting(x: Tensor) -> Tensor:
        y = x.sin()
        seen.append(weakref.ref(y))
        return y

    def make(net: nn.Module) -> Step:
        def step(x: Tensor) -> Tensor:
            net.zero_grad()
            loss = loss_of(net(x))
            loss.backward(retain_graph=True)
            return loss.detach()

        return step

    graphed, eagerly, mine, eager = both(lab, Around(eager_break(noting)), make)
    for _ in range(3):
        x = fresh(lab, 4, 6)
        assert near(graphed(x), eagerly(x))
    assert same_gradients(mine, eager)
    gc.collect()
    assert all(one() is None for one in seen)
