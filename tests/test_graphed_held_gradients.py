"""Results with gradients that a caller still has when the next call overwrites them."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import cgraph
from cgraph._captures.collector import collections_held_off
from cgraph.errors import StateError
from graphed_calls import near
from lab import Lab, fresh
from networks import network

HELD_AS = pytest.mark.parametrize(
    ("is_view", "has_gradients"), [(False, False), (True, False), (False, True)]
)


def test_a_result_with_gradients_that_is_kept_is_told_with_both_lines(lab: Lab) -> None:
    net = network(lab)
    graphed = cgraph.graphed(net)
    kept = [graphed(fresh(lab, 4, 6))]
    kept[0].sum().backward()
    with pytest.warns(UserWarning, match="output 0 of .* is still referenced") as told:
        kept.append(graphed(fresh(lab, 4, 6)))
    (one,) = told
    assert str(one.message).count("test_graphed_held_gradients.py") == 2


@pytest.mark.parametrize("on_held", ["warn", "raise"])
def test_a_training_loop_holds_nothing(lab: Lab, on_held: Any) -> None:
    net = network(lab)
    graphed = cgraph.graphed(net, on_held=on_held)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(4):  # each warning is an error
        out = graphed(fresh(lab, 4, 6))
        loss = (out * out).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("on_held", ["warn", "raise"])
@HELD_AS
def test_a_result_that_another_thread_is_about_to_let_go_is_not_told(
    lab: Lab, on_held: Any, is_view: bool, has_gradients: bool
) -> None:
    net = network(lab).requires_grad_(has_gradients)
    graphed = cgraph.graphed(net, on_held=on_held)

    def let_go(held: list[Tensor], go: threading.Event) -> None:
        go.wait()
        time.sleep(0.02)
        held.clear()

    graphed(fresh(lab, 4, 6))
    for _ in range(2):
        held = [graphed(fresh(lab, 4, 6))]
        if has_gradients:
            held[0].sum().backward()
        held = [held[0][:2]] if is_view else held
        go = threading.Event()
        thread = threading.Thread(target=let_go, args=(held, go))
        thread.start()
        x = fresh(lab, 4, 6)
        go.set()
        assert near(graphed(x), net(x))  # no warning
        thread.join()


@pytest.mark.parametrize("on_held", ["warn", "raise"])
@HELD_AS
def test_a_result_that_only_garbage_holds_is_not_told(
    lab: Lab, on_held: Any, is_view: bool, has_gradients: bool
) -> None:
    net = network(lab).requires_grad_(has_gradients)
    graphed = cgraph.graphed(net, on_held=on_held)
    gc.disable()
    try:
        for _ in range(3):
            result = graphed(fresh(lab, 4, 6))
            if has_gradients:
                result.sum().backward()
            circle: list[Any] = [result[:2] if is_view else result]
            circle.append(circle)
            del circle, result
            x = fresh(lab, 4, 6)
            assert near(graphed(x), net(x))  # no warning
    finally:
        gc.enable()


def test_garbage_is_left_while_a_capture_holds_collections_off(lab: Lab) -> None:
    graphed = cgraph.graphed(network(lab).requires_grad_(False))
    circle: list[Any] = [graphed(fresh(lab, 4, 6))]
    circle.append(circle)
    del circle
    with collections_held_off(), pytest.warns(UserWarning, match="is still referenced"):
        graphed(fresh(lab, 4, 6))


def test_a_view_is_told_of_where_only_its_result_is_let_go(lab: Lab) -> None:
    graphed = cgraph.graphed(network(lab).requires_grad_(False))
    circle: list[Any] = [graphed(fresh(lab, 4, 6))]
    view = circle[0].data
    circle.append(circle)
    del circle
    with pytest.warns(UserWarning, match="is still referenced"):
        graphed(fresh(lab, 4, 6))
    del view


@pytest.mark.parametrize("on_held", ["warn", "raise"])
def test_what_only_autograd_has_saved_is_not_told(lab: Lab, on_held: Any) -> None:
    net = network(lab)
    graphed = cgraph.graphed(net, on_held=on_held)
    losses = [graphed(fresh(lab, 4, 6)).pow(2).mean() for _ in range(3)]  # no warning
    for _ in range(2):
        for loss in losses:
            loss.backward()
        losses = [graphed(fresh(lab, 4, 6)).pow(2).mean() for _ in range(3)]


@pytest.mark.parametrize("is_saved", [False, True])
def test_a_result_with_gradients_gets_memory_of_its_own_where_that_was_asked_for(
    lab: Lab, is_saved: bool
) -> None:
    net = network(lab)
    graphed = cgraph.graphed(net, on_held="clone")
    pairs = []
    for _ in range(4):
        x = fresh(lab, 4, 6)
        one = graphed(x)
        pairs.append((one, net(x), one.pow(2).sum() if is_saved else None))
    assert all(near(one, other) for one, other, _ in pairs)


def test_a_result_with_gradients_that_is_kept_stays_where_that_raises(lab: Lab) -> None:
    net = network(lab)
    graphed, x = cgraph.graphed(net, on_held="raise"), fresh(lab, 4, 6)
    kept = graphed(x)
    kept.sum().backward()
    with pytest.raises(StateError, match="is still referenced"):
        graphed(fresh(lab, 4, 6))
    assert near(kept, net(x))
    del kept
    x = fresh(lab, 4, 6)
    assert near(graphed(x), net(x))


@pytest.mark.parametrize("rows", [4, 3])
def test_each_of_several_results_is_told(lab: Lab, rows: int) -> None:
    net = network(lab)

    def two(x: Tensor) -> dict[str, Tensor]:
        y = net(x)
        return {"one": y * 2, "other": y * 3}

    graphed = cgraph.graphed(two, sizes=[4], on_held="clone")
    kept = []
    for _ in range(3):
        x = fresh(lab, rows, 6)
        kept.append((graphed(x)["other"], two(x)["other"]))
    assert all(near(*pair) for pair in kept)


def test_copies_with_gradients_are_not_told(lab: Lab) -> None:
    net = network(lab)
    graphed = cgraph.graphed(net, outputs="clone")
    assert len([graphed(fresh(lab, 4, 6)) for _ in range(3)]) == 3  # no warning


@pytest.mark.parametrize("outputs", ["static", "clone"])
def test_a_gradient_that_is_kept_is_as_it_was(lab: Lab, outputs: Any) -> None:
    net = nn.Linear(4, 4).to(lab.device)
    graphed = cgraph.graphed(lambda x: net(x), outputs=outputs)
    kept: list[tuple[Tensor, Tensor]] = []
    for _ in range(4):
        x = fresh(lab, 2, 4)
        (right,) = torch.autograd.grad(net(x).square().sum(), net.weight)
        kept.append((torch.autograd.grad(graphed(x).square().sum(), net.weight)[0], right))
        for pair in kept:
            assert_close(*pair)
        with torch.no_grad():
            graphed(fresh(lab, 2, 4))


@pytest.mark.parametrize("view", [Tensor.detach, lambda one: one.data, lambda one: one.detach()[0]])
def test_views_of_results_with_gradients_that_pile_up_are_told_of(lab: Lab, view: Any) -> None:
    net, losses = nn.Linear(3, 2).to(lab.device), []
    graphed = cgraph.graphed(net, on_held="raise")
    with pytest.raises(StateError, match=r"memory of output 0 of Linear.*is still referenced"):
        for _ in range(6):
            y = graphed(fresh(lab, 4, 3))
            y.sum().backward()
            losses.append(view(y))
    assert len(losses) >= 2


def test_views_that_a_training_loop_makes_anew_are_not_told_of(lab: Lab) -> None:
    net = nn.Linear(3, 2).to(lab.device)
    graphed = cgraph.graphed(net, on_held="raise")
    for _ in range(6):
        y = graphed(fresh(lab, 4, 3))
        rows, last = y.view(-1), y.detach()[-1]
        (rows.square().sum() + last.sum()).backward()
