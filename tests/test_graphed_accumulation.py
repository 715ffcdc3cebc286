"""Gradients of backward passes inside a function, and what callers do with them in between."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from graphed_calls import near, same_gradients, states
from lab import Lab, fresh
from networks import network


class Twin:
    """A network with a step that leaves gradients, graphed or not."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def passes(self, x: Tensor) -> Tensor:
        return self.as_it_is(x).detach()

    def as_it_is(self, x: Tensor) -> Tensor:
        loss: Tensor = self.net(x).square().mean()
        loss.backward()
        return loss


def twins(lab: Lab, **options: Any) -> tuple[Twin, Any, Twin]:
    mine = Twin(network(lab))
    eager = Twin(copy.deepcopy(mine.net))
    return mine, cgraph.graphed(mine.passes, **options), eager


@pytest.mark.parametrize("turn", [0, 1, 2])
def test_gradients_that_some_parameters_have_are_added_to(lab: Lab, turn: int) -> None:
    mine, graphed, eager = twins(lab)
    for step in range(4):
        for one in (mine, eager):
            one.optimizer.zero_grad()
            if step == turn:
                weight = next(one.net.parameters())
                weight.grad = torch.full_like(weight, 0.5)
        x = fresh(lab, 4, 6)
        assert near(graphed(x), eager.passes(x))
        assert same_gradients(mine.net, eager.net)


@pytest.mark.filterwarnings("ignore:.*return the loss detached")  # with torch 2.8
def test_a_loss_whose_backward_pass_is_inside_is_returned_without_history(lab: Lab) -> None:
    mine, _, eager = twins(lab)
    graphed = cgraph.graphed(mine.as_it_is)
    for _ in range(3):
        for one in (mine, eager):
            one.optimizer.zero_grad()
        x = fresh(lab, 4, 6)
        loss = graphed(x)
        assert not loss.requires_grad
        assert near(loss, eager.passes(x))
    assert states(graphed) == ["captured"]


@pytest.mark.filterwarnings("ignore:.*return the loss detached")
def test_a_prediction_beside_its_loss_is_returned_without_history(lab: Lab) -> None:
    mine = network(lab)
    eager = copy.deepcopy(mine)

    def both(net: nn.Module, x: Tensor) -> dict[str, Tensor]:
        net.zero_grad()
        prediction = net(x)
        loss = prediction.square().mean()
        loss.backward()
        return {"loss": loss, "prediction": prediction}

    graphed = cgraph.graphed(lambda x: both(mine, x))
    for _ in range(3):
        x = fresh(lab, 4, 6)
        found, right = graphed(x), both(eager, x)
        assert all(near(found[name], right[name]) for name in right)
        assert same_gradients(mine, eager)
        del found
    assert states(graphed) == ["captured"]


def test_a_batch_norm_that_was_called_before_a_capture_has_its_backward_pass_after_it(
    lab: Lab,
) -> None:
    mine = network(lab, nn.BatchNorm1d(8))
    eager = copy.deepcopy(mine)
    graphed = cgraph.graphed(mine)
    for _ in range(3):
        given = [fresh(lab, 4, 6) for _ in range(2)]
        (mine(given[0]).square().sum() + graphed(given[1]).sum()).backward()
        (eager(given[0]).square().sum() + eager(given[1]).sum()).backward()
        assert same_gradients(mine, eager)
