"""Gradients through graphed functions equal those of eager."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

import cgraph
from graphed_calls import near, same_gradients
from lab import Lab, fresh
from networks import leaf, network, random_state


def test_a_module_among_the_arguments_gets_gradients(lab: Lab) -> None:
    net = network(lab)
    graphed = cgraph.graphed(lambda model, x: model(x).tanh())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            x = fresh(lab, 4, 6)
            net.zero_grad()
            graphed(net, x).sum().backward()
            mine = [parameter.grad.clone() for parameter in net.parameters()]
            net.zero_grad()
            net(x).tanh().sum().backward()
            assert all(near(a, b.grad) for a, b in zip(mine, net.parameters(), strict=True))


@pytest.mark.parametrize("count", [1, 3])
def test_inputs_get_gradients_where_there_is_no_module(lab: Lab, count: int) -> None:
    def function(*xs: Tensor) -> Tensor:
        return sum((x.sin() * place for place, x in enumerate(xs, 1)), start=xs[0] * 0)

    graphed = cgraph.graphed(function)
    for _ in range(3):
        mine = [leaf(lab, 5) for _ in range(count)]
        others = [x.detach().clone().requires_grad_() for x in mine]
        one = graphed(*mine)
        other = function(*others)
        assert near(one, other)
        weights = torch.rand(5, device=lab.device)
        (one * weights).sum().backward()
        (other * weights).sum().backward()
        for first, second in zip(mine, others, strict=True):
            assert first.grad is not None
            assert second.grad is not None
            assert near(first.grad, second.grad)


def test_gradients_flow_on_to_what_an_input_was_made_of(lab: Lab) -> None:
    before, net = network(lab), nn.Linear(3, 2).to(lab.device)
    graphed = cgraph.graphed(net)
    for _ in range(2):
        x = fresh(lab, 4, 6)
        found = []
        for run in (graphed, net):
            before.zero_grad(), net.zero_grad()
            run(before(x)).exp().sum().backward()
            found.append([p.grad.clone() for p in (*before.parameters(), *net.parameters())])
        assert all(near(*pair) for pair in zip(*found, strict=True))


def test_dropout_draws_what_eager_draws_from_the_same_seed(lab: Lab) -> None:
    mine = network(lab, nn.Dropout(0.5))
    eager = copy.deepcopy(mine)
    graphed = cgraph.graphed(mine)
    graphed(fresh(lab, 4, 6)).sum().backward()
    seen = []
    for seed in (3, 4):
        x = fresh(lab, 4, 6)
        for run, net in ((graphed, mine), (eager, eager)):
            torch.manual_seed(seed)
            net.zero_grad()
            result = run(x)
            result.sum().backward()
            seen.append(result.detach().clone())
        assert near(*seen[-2:])
        assert same_gradients(mine, eager)


def test_the_first_call_draws_what_eager_draws(lab: Lab) -> None:
    mine = network(lab, nn.Dropout(0.5))
    graphed = cgraph.graphed(mine)
    x = fresh(lab, 4, 6)
    torch.manual_seed(3)
    first = graphed(x).detach().clone()
    after = random_state(lab)
    torch.manual_seed(3)
    assert near(first, mine(x))
    assert torch.equal(after, random_state(lab))


def test_a_part_that_evaluates_inside_a_module_in_training_is_another_key(lab: Lab) -> None:
    net = network(lab, nn.BatchNorm1d(8))
    graphed = cgraph.graphed(net)
    graphed(fresh(lab, 8, 6)).sum().backward()
    net[2].eval()
    for _ in range(2):
        x = fresh(lab, 8, 6)
        before = [buffer.clone() for buffer in net.buffers()]
        one = graphed(x).detach().clone()
        assert near(one, net(x))
        assert all(torch.equal(*pair) for pair in zip(before, net.buffers(), strict=True))


def test_calls_without_gradients_stand_beside_those_with_them(lab: Lab) -> None:
    net = network(lab)
    graphed = cgraph.graphed(net)
    for _ in range(3):
        x = fresh(lab, 4, 6)
        with torch.no_grad():
            plain = graphed(x)
            assert not plain.requires_grad
            assert near(plain, net(x))
        with torch.inference_mode():
            assert near(graphed(x), net(x))
        del plain
        net.zero_grad()
        result = graphed(x)
        assert result.requires_grad
        result.sum().backward()
        mine = [parameter.grad.clone() for parameter in net.parameters()]
        net.zero_grad()
        net(x).sum().backward()
        assert all(near(a, b.grad) for a, b in zip(mine, net.parameters(), strict=True))
    assert graphed.report().captured == 3


def test_a_parameter_that_is_frozen_is_another_key_and_gets_no_gradient(lab: Lab) -> None:
    mine = network(lab)
    eager = copy.deepcopy(mine)
    graphed = cgraph.graphed(mine)
    for needed in (True, False, True):
        x = fresh(lab, 4, 6)
        for run, net in ((graphed, mine), (eager, eager)):
            net[0].requires_grad_(needed)
            net.zero_grad()
            run(x).sum().backward()
        assert (mine[0].weight.grad is not None) is needed
        assert same_gradients(mine, eager)


def test_gradients_accumulate_as_in_eager(lab: Lab) -> None:
    mine = network(lab)
    eager = copy.deepcopy(mine)
    graphed = cgraph.graphed(mine)
    for _ in range(4):
        x = fresh(lab, 4, 6)
        graphed(x).sum().backward()
        eager(x).sum().backward()
        assert same_gradients(mine, eager)


def test_the_first_call_leaves_gradients_as_they_were(lab: Lab) -> None:
    net = network(lab)
    net(fresh(lab, 4, 6)).sum().backward()
    before = [(parameter.grad, parameter.grad.clone()) for parameter in net.parameters()]
    x = leaf(lab, 4, 6)
    cgraph.graphed(net)(x)
    assert x.grad is None
    for parameter, (grad, content) in zip(net.parameters(), before, strict=True):
        assert parameter.grad is grad
        assert torch.equal(grad, content)


def test_the_first_call_moves_statistics_once(lab: Lab) -> None:
    mine = network(lab, nn.BatchNorm1d(8))
    eager = copy.deepcopy(mine)
    graphed = cgraph.graphed(mine)
    for _ in range(3):
        x = fresh(lab, 8, 6)
        assert near(graphed(x).detach(), eager(x))
        for one, other in zip(mine.buffers(), eager.buffers(), strict=True):
            assert near(one, other)


def test_results_without_gradients_beside_those_with_them(lab: Lab) -> None:
    net = network(lab)
    graphed = cgraph.graphed(lambda x: {"y": net(x), "top": net(x).argmax(1), "name": "a"})
    for _ in range(2):
        x = fresh(lab, 4, 6)
        result = graphed(x)
        assert result["y"].requires_grad
        assert torch.equal(result["top"], net(x).argmax(1))
        assert result["name"] == "a"
        result["y"].sum().backward()


def test_calls_of_several_keys_share_one_backward_pass(lab: Lab) -> None:
    mine = network(lab)
    eager = copy.deepcopy(mine)
    graphed = cgraph.graphed(mine, on_fail="raise")
    for _ in range(3):
        inputs = [leaf(lab, rows, 6) for rows in (4, 2, 7)]
        same = [x.detach().clone().requires_grad_() for x in inputs]
        for given, run, net in ((inputs, graphed, mine), (same, eager, eager)):
            net.zero_grad()
            # The one that was called first does not have the last backward pass.
            losses = [run(x).square().mean() for x in given]
            (losses[1] * losses[0] + losses[2]).backward()
        assert same_gradients(mine, eager)
        for x, other in zip(inputs, same, strict=True):
            near(x.grad, other.grad)
    assert graphed.report().captured == 3
