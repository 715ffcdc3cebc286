"""Calls whose backward passes are still to come when the function is called again."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from cgraph._callables.graphed import Graphed
from cgraph.functions import GraphedFunction
from graphed_calls import near, same_gradients
from lab import Lab, fresh
from networks import leaf, network


def pair(lab: Lab, **options: Any) -> tuple[Any, GraphedFunction, nn.Module]:
    """Return a network, its graphed version, and an eager twin."""
    mine = network(lab)
    return mine, cgraph.graphed(mine, **options), copy.deepcopy(mine)


def step_both(mine: nn.Module, eager: nn.Module) -> bool:
    """Step with the gradients of both and clear them; return whether both modules agree."""
    are_same = same_gradients(mine, eager)
    with torch.no_grad():
        for net in (mine, eager):
            for parameter in net.parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad
            net.zero_grad()
    pairs = zip(mine.parameters(), eager.parameters(), strict=True)
    return are_same and all(near(*both) for both in pairs)


def test_a_result_that_waits_for_its_backward_pass_is_not_overwritten(lab: Lab) -> None:
    _, graphed, eager = pair(lab)
    given = [fresh(lab, 4, 6) for _ in range(3)]
    kept = [graphed(x) for x in given]
    assert all(near(one, eager(x)) for one, x in zip(kept, given, strict=True))


@pytest.mark.filterwarnings("ignore:.*several threads at a time")
def test_a_call_that_comes_while_a_backward_pass_runs_on_another_thread_spoils_nothing(
    lab: Lab,
) -> None:
    mine, graphed, eager = pair(lab)
    for _ in range(2):
        losses = [graphed(fresh(lab, 4, 6)).sum() for _ in range(2)]
        sum(losses, torch.zeros((), device=lab.device)).backward()
    mine.zero_grad()
    original, x, other = Graphed.backward, fresh(lab, 4, 6), fresh(lab, 4, 6)
    found: list[Tensor] = []

    def interrupted(self: Graphed, *args: Any) -> Any:
        # As if the other thread had its turn here.
        if not found:
            found.append(Tensor())
            thread = threading.Thread(target=lambda: found.append(graphed(other)))
            thread.start()
            thread.join()
        return original(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Graphed, "backward", interrupted)
        graphed(x).square().sum().backward()
    eager(x).square().sum().backward()
    assert same_gradients(mine, eager)
    assert near(found[1], eager(other))


@pytest.mark.parametrize("debug", ["compare", "sync"])
def test_calls_that_wait_are_debugged_each_for_itself(lab: Lab, debug: str) -> None:
    mine, graphed, eager = pair(lab, debug=debug)
    for _ in range(2):
        given = [fresh(lab, 4, 6), fresh(lab, 4, 6)]
        losses = [[run(x).square().sum() for x in given] for run in (graphed, eager)]
        for some in losses:
            (some[0] + some[1]).backward()
        assert step_both(mine, eager)


def test_random_numbers_of_calls_that_wait_are_those_of_eager_calls(lab: Lab) -> None:
    mine = network(lab, nn.Dropout(0.5))
    eager = copy.deepcopy(mine)
    graphed = cgraph.graphed(mine)
    for turn in range(3):
        given = [fresh(lab, 4, 6) for _ in range(3)]
        for run in (graphed, eager):
            torch.manual_seed(turn)
            losses = [run(x).square().sum() for x in given]
            sum(losses, torch.zeros((), device=lab.device)).backward()
        assert step_both(mine, eager)


@pytest.mark.filterwarnings("ignore:.*several threads at a time")
def test_threads_whose_calls_wait_at_the_same_time_have_a_graph_each(lab: Lab) -> None:
    mine, graphed, eager = pair(lab)
    graphed(fresh(lab, 4, 6)).sum().backward()
    mine.zero_grad()
    given = [fresh(lab, 4, 6) for _ in range(2)]
    barrier, found = threading.Barrier(2), {}

    def work(place: int) -> None:
        # CUDA libraries have handles for each thread.
        eager(given[place]).sum().backward()
        loss = graphed(given[place]).square().sum()
        barrier.wait()
        found[place] = torch.autograd.grad(loss, list(mine.parameters()))

    threads = [threading.Thread(target=work, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for place in range(2):
        right = torch.autograd.grad(eager(given[place]).square().sum(), list(eager.parameters()))
        assert all(near(*both) for both in zip(found[place], right, strict=True))
    assert graphed.report().captured == 2


def test_captures_ahead_of_time_take_a_graph_that_is_waited_for_as_it_is(lab: Lab) -> None:
    mine, graphed, eager = pair(lab)
    x = fresh(lab, 4, 6)
    loss = graphed(x).square().sum()
    graphed.capture(fresh(lab, 4, 6))
    assert graphed.report().captured == 1
    loss.backward()
    eager(x).square().sum().backward()
    assert same_gradients(mine, eager)


def test_a_result_that_waits_is_kept_by_autograd_alone(lab: Lab) -> None:
    mine, graphed, eager = pair(lab)
    x, other = leaf(lab, 4, 6), fresh(lab, 4, 6)
    loss = graphed(x).square().sum()  # only autograd keeps the result
    second: Tensor = graphed(other).square().sum()
    second.backward()
    loss.backward()
    own = x.detach().clone().requires_grad_()
    for one in (other, own):
        eager(one).square().sum().backward()
    assert x.grad is not None and own.grad is not None
    assert near(x.grad, own.grad)
    assert same_gradients(mine, eager)


@pytest.mark.parametrize("what", ["weight", "memory", "attribute"])
def test_calls_beside_open_ones_follow_what_was_exchanged_meanwhile(lab: Lab, what: str) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(4, 4), fresh(lab, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.scale  # type: ignore[no-any-return]

    net = Scaled().to(lab.device)
    graphed, kept = cgraph.graphed(net), []
    for change in range(4):
        if change and what == "weight":
            net.layer.weight = nn.Parameter(fresh(lab, 4, 4))
        elif change and what == "memory":
            net.layer.weight.data = fresh(lab, 4, 4)
        elif change:
            net.scale = fresh(lab, 4)
        for _ in range(3):
            x = fresh(lab, 3, 4)
            expected, found = net(x), graphed(x)
            torch.testing.assert_close(found, expected)
        # The last call is open still when the next one comes.
        for one in (found, expected):
            [gradient] = torch.autograd.grad(one.sum(), [net.layer.bias], retain_graph=True)
            kept.append(gradient)
        torch.testing.assert_close(*kept[-2:])
