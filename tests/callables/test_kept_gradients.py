"""Gradients of graphed calls that are still referenced are not overwritten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import cgraph
from lab import Lab, fresh
from networks import network

Make = Callable[[nn.Module, Tensor], Any]


def graphed_by_sample(net: nn.Module, x: Tensor) -> Any:
    return cgraph.make_graphed_callables(lambda x: net(x), (x,)) if x.requires_grad else net


def pair_of(lab: Lab, make: Make) -> tuple[nn.Module, Any]:
    net = network(lab)
    return net, make(net, fresh(lab, 4, 6).requires_grad_())


MAKES = pytest.mark.parametrize(
    "make", [lambda net, _: cgraph.graphed(lambda x: net(x)), graphed_by_sample]
)


@MAKES
def test_gradients_by_an_argument_that_are_kept_are_those_of_eager(lab: Lab, make: Make) -> None:
    net, graphed = pair_of(lab, make)
    kept: list[tuple[Tensor, Tensor]] = []
    for _ in range(4):
        x = fresh(lab, 4, 6)
        found = []
        for run in (graphed, net):
            leaf = x.clone().requires_grad_()
            run(leaf).square().mean().backward()
            found.append(leaf.grad)  # the leaf itself is gone
        kept.append((found[0], found[1]))
        for pair in kept:
            assert_close(*pair)
        graphed(fresh(lab, 4, 6).requires_grad_())  # a forward pass alone


def test_gradients_of_several_losses_that_are_kept_are_those_of_eager(lab: Lab) -> None:
    net = network(lab)
    graphed = cgraph.graphed(net)
    for _ in range(3):
        x, other = fresh(lab, 4, 6), fresh(lab, 4, 6)
        kept = []
        for run in (net, graphed):
            for given, loss in ((x, Tensor.mean), (other, Tensor.sum)):
                net.zero_grad()
                loss(run(given).square()).backward()
                kept.append([one.grad for one in net.parameters()])
        for eager, mine in zip(kept[:2], kept[2:], strict=True):
            for one, right in zip(mine, eager, strict=True):
                assert_close(one, right)


def test_a_block_that_is_checkpointed_twice_has_the_gradients_of_eager(lab: Lab) -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)).to(lab.device)
    graphed = cgraph.graphed(net)
    graphed.capture(fresh(lab, 3, 6).requires_grad_())
    for _ in range(3):
        x = fresh(lab, 3, 6)
        found = []
        for run in (net, graphed):
            leaf = x.clone().requires_grad_()
            net.zero_grad()
            inner = checkpoint(run, leaf, use_reentrant=True)
            checkpoint(run, inner, use_reentrant=True).square().mean().backward()
            found.append([leaf.grad, *(one.grad.clone() for one in net.parameters())])  # type: ignore[union-attr]
        for one, right in zip(found[1], found[0], strict=True):
            assert_close(one, right)
    # The last result has the node of a checkpoint, which has the function.
    graphed.reset()


@MAKES
def test_a_backward_pass_that_fails_behind_the_graph_leaves_gradients_to_accumulate(
    lab: Lab, make: Make
) -> None:
    net, graphed = pair_of(lab, make)

    def fails(_: Tensor) -> None:
        raise KeyError("mine")

    leaf = fresh(lab, 4, 6).requires_grad_()
    before = leaf * 1
    before.register_hook(fails)
    with pytest.raises(KeyError, match="mine"):
        graphed(before).sum().backward()
    x = fresh(lab, 4, 6)
    found = []
    for run in (graphed, net):
        leaf = x.clone().requires_grad_()
        for _ in range(3):
            run(leaf).square().mean().backward()
        found.append(leaf.grad)
    assert_close(*found)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_part_without_autocast_has_the_gradients_of_eager_outside_of_it(
    lab: Lab, enabled: bool
) -> None:
    gate = nn.Linear(16, 4).to(lab.device)

    def router(x: Tensor) -> Tensor:
        with torch.autocast(lab.device, enabled=False):
            return gate(x.float()).softmax(-1)

    graphed = cgraph.graphed(router)
    for _ in range(3):
        x, found = fresh(lab, 8, 16), []
        for run in (router, graphed):
            gate.zero_grad()
            with torch.autocast(lab.device, torch.bfloat16, enabled=enabled):
                loss = run(x).square().sum()
            loss.backward()
            assert gate.weight.grad is not None
            found.append(gate.weight.grad.clone())
        # In bfloat16 they differ by a thousandth.
        assert_close(*found, rtol=1e-5, atol=1e-6)
    assert graphed.report().keys[0].replays == 2
