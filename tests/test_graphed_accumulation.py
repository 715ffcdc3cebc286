"""Gradients of backward passes inside a function, and what callers do with them in between."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from cgraph import _torch
from graphed_calls import eager_calls, near, same_gradients, states
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


@pytest.mark.parametrize("options", [{}, {"warmup": 0}, {"warmup": 1, "measure": False}])
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("batches", [1, 2, 3])
def test_gradients_that_the_caller_clears_after_some_calls_are_those_of_eager(
    lab: Lab, batches: int, to_none: bool, options: dict[str, Any]
) -> None:
    mine, graphed, eager = twins(lab, on_fail="raise", **options)
    for _ in range(4):
        for _ in range(batches):
            x = fresh(lab, 4, 6)
            assert near(graphed(x), eager.passes(x))
            assert same_gradients(mine.net, eager.net)
        for one in (mine, eager):
            one.optimizer.step()
            one.optimizer.zero_grad(set_to_none=to_none)
    assert eager_calls(graphed) == 0
    # With gradients there, and without.
    assert states(graphed) == ["captured"] * (1 + (batches > 1 or not to_none))
    assert graphed.report().replays == 4 * batches


def test_the_report_tells_calls_with_gradients_from_those_without(lab: Lab) -> None:
    _, graphed, _ = twins(lab)
    for _ in range(2):
        graphed(fresh(lab, 4, 6))
    first, second = graphed.report().keys
    assert second.key == f"{first.key}, 4 gradients before"


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


def test_a_frozen_function_serves_calls_with_gradients_and_without(lab: Lab) -> None:
    mine, graphed, eager = twins(lab)
    graphed(fresh(lab, 4, 6))
    graphed(fresh(lab, 4, 6))
    graphed.freeze()
    mine.optimizer.zero_grad()
    for _ in range(3):
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
        assert loss.requires_grad != _torch.TELLS_SPENT
        assert near(loss, eager.passes(x))
    assert states(graphed) == ["captured" if _torch.TELLS_SPENT else "eager"]


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
    assert states(graphed) == ["captured" if _torch.TELLS_SPENT else "eager"]


def test_a_result_whose_history_is_still_there_keeps_it(lab: Lab) -> None:
    mine = network(lab)

    def keeps(x: Tensor) -> Tensor:
        loss: Tensor = mine(x).square().mean()
        loss.backward(retain_graph=True)
        return loss

    graphed = cgraph.graphed(keeps)
    eager = copy.deepcopy(mine)
    with pytest.warns(UserWarning, match="the function changes the gradient of a tensor"):
        for _ in range(3):
            x = fresh(lab, 4, 6)
            graphed(x).backward()
            loss = eager(x).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
            assert same_gradients(mine, eager)


@pytest.mark.parametrize("to_none", [True, False])
def test_a_forward_pass_that_clears_gradients_clears_them_at_each_call(
    lab: Lab, to_none: bool
) -> None:
    nets = [network(lab)]
    nets.append(copy.deepcopy(nets[0]))

    def loss_of(place: int, x: Tensor) -> Tensor:
        nets[place].zero_grad(set_to_none=to_none)
        loss: Tensor = nets[place](x).square().mean()
        return loss

    graphed = cgraph.graphed(lambda x: loss_of(0, x))
    with pytest.warns(UserWarning, match="as by backward.. or zero_grad.., and returns what"):
        for _ in range(3):
            x = fresh(lab, 4, 6)
            graphed(x).backward()
            loss_of(1, x).backward()
            assert same_gradients(*nets)


def test_a_forward_pass_that_looks_whether_there_are_gradients_sees_those_there_are(
    lab: Lab,
) -> None:
    net = nn.Linear(4, 4).to(lab.device)

    def looking(x: Tensor) -> Tensor:
        result: Tensor = net(x)
        return result * (1 if net.weight.grad is None else 2)

    graphed = cgraph.graphed(looking)
    for _ in range(3):
        x = fresh(lab, 4)
        assert near(graphed(x), net(x))
    assert states(graphed) == ["captured"]


@pytest.mark.parametrize("has_gradients", [False, True])
def test_a_graph_with_gradients_has_the_same_nodes_with_a_warm_up_as_without(
    lab: Lab, has_gradients: bool
) -> None:
    nodes = []
    for warmup in (0, 1, 3):
        net = network(lab)
        if has_gradients:
            net(fresh(lab, 4, 6)).sum().backward()
        graphed = cgraph.graphed(net, warmup=warmup)
        with _torch.without_autocast_cache():
            graphed(fresh(lab, 4, 6))
            graphed(fresh(lab, 4, 6))
        nodes.append(graphed.report().keys[0].nodes)
    assert nodes[0] == nodes[1] == nodes[2]


def test_a_graph_keeps_no_gradients_of_the_calls_before_its_capture(lab: Lab) -> None:
    mine = Twin(network(lab))
    seen: list[_torch.TensorWeakRef] = []

    def passes(x: Tensor) -> Tensor:
        loss = mine.passes(x)
        if not cgraph.is_current_stream_capturing():
            seen.extend(
                _torch.TensorWeakRef(one.grad)
                for one in mine.net.parameters()
                if one.grad is not None
            )
        return loss

    graphed = cgraph.graphed(passes)
    graphed(fresh(lab, 4, 6))
    gc.collect()
    assert states(graphed) == ["captured"] and seen
    assert all(one() is None for one in seen)


def test_a_gradient_inside_a_forward_pass_that_nothing_keeps_is_captured(lab: Lab) -> None:
    mine = network(lab)
    eager = copy.deepcopy(mine)

    def penalised(net: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = net(x).square().mean()
        inner = torch.autograd.grad(loss, [*net.parameters()], create_graph=True)
        return loss + sum((one.square().sum() for one in inner), torch.zeros_like(loss))

    graphed = cgraph.graphed(lambda x: penalised(mine, x), on_fail="raise")
    for _ in range(3):
        x = fresh(lab, 4, 6)
        graphed(x).backward()
        penalised(eager, x).backward()
        assert same_gradients(mine, eager)
    assert states(graphed) == ["captured"]


def test_gradients_that_the_caller_keeps_and_clears_are_not_overwritten(lab: Lab) -> None:
    mine, graphed, eager = twins(lab)
    kept: list[list[list[Tensor | None]]] = [[], []]
    for _ in range(4):
        x = fresh(lab, 4, 6)
        for place, (one, run) in enumerate(((mine, graphed), (eager, eager.passes))):
            one.optimizer.zero_grad()
            run(x)
            kept[place].append([parameter.grad for parameter in one.net.parameters()])
    for found, right in zip(*kept, strict=True):
        for one, other in zip(found, right, strict=True):
            assert one is not None and other is not None
            assert near(one, other)
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
