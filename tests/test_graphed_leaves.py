"""Steps with a backward pass inside: hooks of their leaves, and gradients that are taken away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from graphed_calls import states
from lab import Lab, fresh


def doubled(gradient: Tensor) -> Tensor:
    return gradient * 2


def negated_in_place(leaf: Tensor) -> None:
    assert leaf.grad is not None
    leaf.grad.neg_()


@pytest.mark.parametrize("has_first", [False, True])
@pytest.mark.parametrize(
    ("register", "hook"),
    [("register_hook", doubled), ("register_post_accumulate_grad_hook", negated_in_place)],
)
def test_a_hook_of_a_leaf_that_comes_or_goes_captures_anew(
    lab: Lab, register: str, hook: Callable[..., Any], has_first: bool
) -> None:
    ours = nn.Parameter(torch.ones(3, device=lab.device))
    theirs = nn.Parameter(ours.detach().clone())

    def step(x: Tensor, w: Tensor) -> Tensor:
        w.grad = None
        y = x * w
        y.sum().backward()
        return y.detach()

    function = cgraph.graphed(lambda x: step(x, ours))
    handles: list[Any] = []

    def both(is_there: bool) -> None:
        while handles:
            handles.pop().remove()
        if is_there:
            handles.extend(getattr(leaf, register)(hook) for leaf in (ours, theirs))

    if has_first:
        for leaf in (ours, theirs):
            leaf.register_hook(doubled)
    for is_there in (False, False, True, True, False):
        if handles or is_there:
            both(is_there)
        x = fresh(lab, 3)
        torch.testing.assert_close(function(x), step(x, theirs))
        torch.testing.assert_close(ours.grad, theirs.grad)
    (key,) = function.report().keys
    assert key.state == "captured"
    assert {one.argument for one in key.rerecorded} == {"a hook of a tensor"}


def test_a_layer_that_is_frozen_between_steps_loses_its_gradient(lab: Lab) -> None:
    first, second = (nn.Linear(3, 3, device=lab.device) for _ in range(2))
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        second(first(x)).sum().backward()
        optimizer.step()

    function = cgraph.graphed(step)
    function(fresh(lab, 2, 3))
    assert first.weight.grad is not None
    first.requires_grad_(False)
    for _ in range(2):
        before = second.weight.detach().clone()
        function(fresh(lab, 2, 3))
        assert first.weight.grad is None
        assert not torch.equal(second.weight, before)
    assert set(states(function)) == {"captured"}


def test_gradients_that_are_used_and_taken_away_run_eagerly_with_advice(lab: Lab) -> None:
    weight = torch.ones(3, requires_grad=True, device=lab.device)
    optimizer = torch.optim.SGD([weight], 0.1)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    function = cgraph.graphed(update)
    with pytest.warns(UserWarning, match=r"uses the gradient .*zero_grad\(set_to_none=False\)"):
        for count in range(1, 4):
            (weight * 2).sum().backward()
            function()
            torch.testing.assert_close(weight.detach(), torch.ones_like(weight) - 0.2 * count)
    assert weight.grad is None


@pytest.mark.filterwarnings("ignore:.*runs eagerly for:UserWarning")
def test_a_key_of_frozen_weights_that_runs_eagerly_leaves_the_graph_of_others_alone(
    lab: Lab,
) -> None:
    net = nn.Linear(2, 2).to(lab.device)
    calls: list[bool] = []

    def function(x: Tensor) -> Tensor:
        calls.append(net.weight.requires_grad)
        result = net(x)
        if not net.weight.requires_grad:
            result.sum().item()
        return result  # type: ignore[no-any-return]

    graphed = cgraph.graphed(function)
    graphed(fresh(lab, 1, 2))
    net.weight.requires_grad_(False)
    for _ in range(2):
        graphed(fresh(lab, 1, 2))
    net.weight.requires_grad_(True)
    before = len(calls)
    for _ in range(3):
        x = fresh(lab, 1, 2)
        assert torch.allclose(graphed(x), net(x))
    assert len(calls) == before
    assert states(graphed) == ["captured", "eager"]


@pytest.mark.filterwarnings("ignore:.*runs eagerly for:UserWarning")
@pytest.mark.parametrize("warmup", [0, 1])
def test_a_module_keeps_the_flags_that_a_function_sets(lab: Lab, warmup: int) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))).to(lab.device)

    def function(x: Tensor) -> Tensor:
        net.eval()
        return net(x)  # type: ignore[no-any-return]

    graphed = cgraph.graphed(function, warmup=warmup)
    x = fresh(lab, 1, 2)
    assert torch.allclose(graphed(x), net(x))
    assert not any(part.training for part in net.modules())


@pytest.mark.parametrize("warmup", [0, 1, 3])
def test_a_tensor_that_a_module_keeps_of_its_first_call_has_the_real_weights(
    lab: Lab, warmup: int
) -> None:
    net = nn.Linear(2, 2).to(lab.device)
    net.cache = None  # type: ignore[assignment]

    def function(x: Tensor) -> Tensor:
        if net.cache is None:
            net.cache = net.weight * 2
        return net(x)  # type: ignore[no-any-return]

    graphed = cgraph.graphed(function, warmup=warmup)
    x = fresh(lab, 1, 2)
    assert torch.allclose(graphed(x), net(x))
    if net.cache is not None:
        net.cache.sum().backward()
        assert torch.equal(net.weight.grad, torch.full_like(net.weight, 2))
