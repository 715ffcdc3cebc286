"""The contract, "Gradients": each test quotes its sentence."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from cgraph.errors import EagerWarning
from contract_calls import counted, equal, runs_of, states_of
from graphed_calls import numbers
from lab import Lab, fresh
from networks import leaf, network


def grads(net: nn.Module) -> list[Tensor | None]:
    """Return the gradients of all parameters."""
    return [one.grad for one in net.parameters()]


def near(one: Any, other: Any) -> None:
    """Require equality but for the order of sums."""
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def inside(net: nn.Module) -> Any:
    """Run a function with its own backward pass."""

    def function(x: Tensor) -> Tensor:
        loss = net(x).square().mean()
        loss.backward()
        return loss

    return function


def test_results_behind_a_backward_pass_inside_have_no_history_from_call_1_on(lab: Lab) -> None:
    """A function with its own backward pass inside returns results without history from call 1."""
    net = network(lab)
    graphed = cgraph.graphed(inside(net))
    for _ in range(5):
        found = graphed(fresh(lab, 2, 6))
        assert not found.requires_grad and found.grad_fn is None
    assert numbers(graphed) == (1, 4, 1)


def test_a_gradient_that_is_there_is_added_to_in_place(lab: Lab) -> None:
    """… an existing `.grad` is added to in place."""
    net = network(lab)
    twin = copy.deepcopy(net)
    graphed, eager = cgraph.graphed(inside(net)), inside(twin)
    for one in (*net.parameters(), *twin.parameters()):
        one.grad = torch.ones_like(one)
    kept = grads(net)
    for _ in range(6):
        x = fresh(lab, 2, 6)
        equal(graphed(x), eager(x).detach())
        near(grads(net), grads(twin))
        assert all(now is one for now, one in zip(grads(net), kept, strict=True))
    assert numbers(graphed) == (1, 5, 1)


def test_a_missing_gradient_gets_memory_of_the_graph_that_later_calls_overwrite(lab: Lab) -> None:
    """… a missing one gets the graph's memory, which later calls overwrite."""
    net = network(lab)
    twin = copy.deepcopy(net)
    graphed, eager = cgraph.graphed(inside(net)), inside(twin)
    addresses = []
    for _ in range(6):
        net.zero_grad()
        twin.zero_grad()
        x = fresh(lab, 2, 6)
        equal(graphed(x), eager(x).detach())
        near(grads(net), grads(twin))
        addresses.append(next(net.parameters()).grad.data_ptr())  # type: ignore[union-attr]
    assert len(set(addresses[1:])) == 1
    assert numbers(graphed) == (1, 5, 1)


def test_calls_with_and_without_gradients_that_are_there_are_both_right(lab: Lab) -> None:
    """… an existing `.grad` is added to in place, a missing one gets the graph's memory."""
    net = network(lab)
    twin = copy.deepcopy(net)
    graphed, eager = cgraph.graphed(inside(net)), inside(twin)
    for number in range(16):
        if number % 3 == 0:
            net.zero_grad()
            twin.zero_grad()
        x = fresh(lab, 2, 6)
        equal(graphed(x), eager(x).detach())
        near(grads(net), grads(twin))
    assert states_of(graphed) == {"captured"}


def test_the_backward_pass_of_a_result_is_captured_with_the_forward_pass(lab: Lab) -> None:
    """Otherwise the backward pass is captured with the forward."""
    net = network(lab)
    twin = copy.deepcopy(net)
    function, counter = counted(net)
    graphed = cgraph.graphed(function)
    for number in range(6):
        net.zero_grad()
        twin.zero_grad()
        x, other = leaf(lab, 2, 6), leaf(lab, 2, 6)
        with torch.no_grad():
            other.copy_(x)
        found, expected = graphed(x), twin(other)
        equal(found, expected)
        weight = torch.randn_like(found)
        (found * weight).sum().backward()
        (expected * weight).sum().backward()
        near([x.grad, *grads(net)], [other.grad, *grads(twin)])
        assert number < 2 or runs_of(counter) == 2
    assert numbers(graphed) == (1, 5, 1)


def test_a_capture_of_both_passes_that_differs_from_the_call_before_is_not_replayed(
    lab: Lab,
) -> None:
    """The capture must match the call before it: same operators, same numbers."""
    net, counter = network(lab), itertools.count(1)
    graphed = cgraph.graphed(lambda x: net(x) * float(next(counter)))
    for number in range(1, 7):
        x = fresh(lab, 2, 6)
        if number == 4:
            with pytest.warns(EagerWarning):
                found = graphed(x)
        else:
            found = graphed(x)
        equal(found, net(x) * float(number))
        found.sum().backward()


def test_hooks_of_the_pass_run_once_in_the_capture_and_not_in_replays(lab: Lab) -> None:
    """… and hooks of the pass run once then."""
    seen = []
    net = network(lab)

    def function(x: Tensor) -> Tensor:
        y = net(x) * 2
        y.register_hook(hook)
        return y * 3

    def hook(gradient: Tensor) -> Tensor:
        seen.append(1)
        return gradient * 10

    graphed = cgraph.graphed(function, guards={"seen": False})
    counts = []
    for _ in range(5):
        x = leaf(lab, 2, 6)
        graphed(x).sum().backward()
        found, x.grad = x.grad, None
        function(x).sum().backward()
        seen.pop()
        near(found, x.grad)
        counts.append(len(seen))
    assert counts == [1, 2, 2, 2, 2]


def test_up_to_four_calls_wait_for_their_backward_passes_with_a_graph_each(lab: Lab) -> None:
    """… up to four open calls a key have a graph each."""
    net = network(lab)
    twin = copy.deepcopy(net)
    function, counter = counted(net)
    graphed = cgraph.graphed(function)
    for _ in range(4):
        inputs = [fresh(lab, 2, 6) for _ in range(4)]
        found = [graphed(x) for x in inputs]
        expected = [twin(x) for x in inputs]
        equal(found, expected)
        for one in reversed(found):
            one.square().sum().backward()
        for one in reversed(expected):
            one.square().sum().backward()
        near(grads(net), grads(twin))
    before = runs_of(counter)
    found = [graphed(fresh(lab, 2, 6)) for _ in range(4)]
    assert runs_of(counter) == before
    assert len({one.untyped_storage().data_ptr() for one in found}) == 4
    graphed(fresh(lab, 2, 6))
    assert runs_of(counter) == before + 1


def test_a_second_backward_pass_is_refused(lab: Lab) -> None:
    """… a second backward … is refused."""
    net = network(lab)
    graphed = cgraph.graphed(net)
    for _ in range(3):
        graphed(fresh(lab, 2, 6)).sum().backward()
    found = graphed(fresh(lab, 2, 6))
    found.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second"):
        found.sum().backward()


def test_warmup_lets_so_many_calls_run_eagerly(lab: Lab) -> None:
    """DDP: `warmup=11`."""
    function, counter = counted(lambda x: x * 2)
    graphed = cgraph.graphed(function, warmup=11)
    for number in range(14):
        x = fresh(lab, 3)
        equal(graphed(x), x * 2)
        assert runs_of(counter) == min(number + 1, 12)
    assert numbers(graphed) == (1, 3, 11)
