"""Calls whose backward passes are still to come when the function is called again."""

from __future__ import annotations

import copy
import itertools
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from cgraph._callables.graphed import Graphed
from cgraph.errors import ArgumentError
from cgraph.functions import GraphedFunction
from graphed_calls import eager_calls, near, numbers, same_gradients
from lab import Lab, fresh
from networks import leaf, network


def pair(lab: Lab, **options: Any) -> tuple[Any, GraphedFunction, nn.Module]:
    """A network, the same graphed, and an eager twin."""
    mine = network(lab)
    return mine, cgraph.graphed(mine, **options), copy.deepcopy(mine)


def step_both(mine: nn.Module, eager: nn.Module) -> bool:
    """Step with the gradients of both and clear them; whether these and the parameters agree."""
    are_same = same_gradients(mine, eager)
    with torch.no_grad():
        for net in (mine, eager):
            for parameter in net.parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad
            net.zero_grad()
    pairs = zip(mine.parameters(), eager.parameters(), strict=True)
    return are_same and all(near(*both) for both in pairs)


def test_a_network_that_is_called_twice_for_one_loss_gets_the_gradients_of_both_calls(
    lab: Lab,
) -> None:
    mine, graphed, eager = pair(lab)
    for _ in range(4):
        real, made = fresh(lab, 4, 6), fresh(lab, 4, 6)
        for run in (graphed, eager):
            (run(real).square().mean() - run(made).tanh().mean()).backward()
        assert step_both(mine, eager)
    assert numbers(graphed) == (2, 8, 0)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_backward_passes_of_several_calls_run_in_any_order(
    lab: Lab, order: tuple[int, ...]
) -> None:
    mine, graphed, eager = pair(lab)
    for _ in range(3):
        given = [fresh(lab, 4, 6) for _ in order]
        losses = [
            [run(x).square().sum() * weight for weight, x in enumerate(given, 1)]
            for run in (graphed, eager)
        ]
        assert all(near(*both) for both in zip(*losses, strict=True))
        for place in order:
            for one in losses:
                one[place].backward()
            assert same_gradients(mine, eager)
        assert step_both(mine, eager)
    assert numbers(graphed) == (3, 9, 0)


def test_a_chain_of_more_calls_than_there_may_be_graphs_runs_the_others_eagerly(lab: Lab) -> None:
    torch.manual_seed(3)
    mine = nn.Sequential(nn.Linear(6, 6), nn.Tanh()).to(lab.device)
    eager = copy.deepcopy(mine)
    graphed = cgraph.graphed(mine, max_open=3)
    for turn in range(3):
        x, own = leaf(lab, 4, 6), None
        for run in (graphed, eager):
            state = x if run is graphed else (own := x.detach().clone().requires_grad_())
            for step in range(5):
                if turn == 0 and run is graphed and step == 3:
                    with pytest.warns(UserWarning, match="give max_open= a larger number"):
                        state = run(state)
                else:
                    state = run(state)
            state.square().sum().backward()
        assert own is not None and own.grad is not None and x.grad is not None
        assert near(x.grad, own.grad)
        assert step_both(mine, eager)
    # The first argument is a leaf, the others have a history: that is no difference of keys.
    assert graphed.report().captured == 3
    assert eager_calls(graphed) == 6


def test_calls_whose_results_are_gone_wait_for_nothing(lab: Lab) -> None:
    _, graphed, _ = pair(lab)
    for _ in range(6):
        graphed(fresh(lab, 4, 6))
    assert numbers(graphed) == (1, 6, 0)


def test_a_loop_without_backward_passes_keeps_two_graphs(lab: Lab) -> None:
    _, graphed, eager = pair(lab)
    for _ in range(6):
        x = fresh(lab, 4, 6)
        out = graphed(x)  # the one before is alive until this is assigned
        assert near(out, eager(x))
    assert numbers(graphed) == (2, 6, 0)


def test_a_result_that_waits_for_its_backward_pass_is_not_overwritten(lab: Lab) -> None:
    _, graphed, eager = pair(lab, on_held="raise")
    given = [fresh(lab, 4, 6) for _ in range(3)]
    kept = [graphed(x) for x in given]
    assert all(near(one, eager(x)) for one, x in zip(kept, given, strict=True))


def test_a_call_behind_the_backward_pass_has_the_first_graph_again(lab: Lab) -> None:
    mine, graphed, eager = pair(lab)
    for _ in range(4):
        x = fresh(lab, 4, 6)
        loss, right = graphed(x).square().sum(), eager(x).square().sum()
        loss.backward()
        right.backward()
        assert step_both(mine, eager)
    assert numbers(graphed) == (1, 4, 0)


def test_calls_of_a_frozen_function_that_wait_run_eagerly_beyond_its_graphs(lab: Lab) -> None:
    mine, graphed, eager = pair(lab)
    first, second = (graphed(fresh(lab, 4, 6)).sum() for _ in range(2))
    (first + second).backward()
    mine.zero_grad()
    graphed.freeze()
    for turn in range(3):
        given = [fresh(lab, 4, 6) for _ in range(3)]
        losses = [graphed(x).square().sum() for x in given[:2]]
        if turn:
            losses.append(graphed(given[2]).square().sum())
        else:
            with pytest.warns(UserWarning, match="before freeze"):
                losses.append(graphed(given[2]).square().sum())
        sum(losses, torch.zeros((), device=lab.device)).backward()
        for x in given:
            eager(x).square().sum().backward()
        assert step_both(mine, eager)
    assert numbers(graphed) == (2, 8, 3)


@pytest.mark.parametrize("rows", [(4, 3), (3, 4), (3, 2, 3)])
def test_padded_calls_wait_for_their_backward_passes_as_others_do(
    lab: Lab, rows: tuple[int, ...]
) -> None:
    mine, graphed, eager = pair(lab, sizes=[4])
    for _ in range(3):
        given = [fresh(lab, count, 6) for count in rows]
        losses = [[run(x).square().sum() for x in given] for run in (graphed, eager)]
        for some in losses:
            sum(some, torch.zeros((), device=lab.device)).backward()
        assert step_both(mine, eager)
    assert numbers(graphed) == (len(rows), 3 * len(rows), 0)


def test_a_padded_call_that_finds_no_graph_more_runs_eagerly(lab: Lab) -> None:
    mine, graphed, eager = pair(lab, sizes=[4], max_open=1)
    for turn in range(3):
        given = [fresh(lab, 3, 6), fresh(lab, 3, 6)]
        losses = [graphed(given[0]).square().sum()]
        if turn:
            losses.append(graphed(given[1]).square().sum())
        else:
            with pytest.warns(UserWarning, match="max_open"):
                losses.append(graphed(given[1]).square().sum())
        (losses[0] + losses[1]).backward()
        (eager(given[0]).square().sum() + eager(given[1]).square().sum()).backward()
        assert step_both(mine, eager)
    assert numbers(graphed) == (1, 3, 3)


def test_a_graph_that_has_to_go_while_it_is_waited_for_goes_behind_the_backward_pass(
    lab: Lab,
) -> None:
    mine, graphed, eager = pair(lab, max_graphs=2)
    for _ in range(2):
        given = [fresh(lab, 4, 6), fresh(lab, 4, 6)]
        losses = [[run(x).square().sum() for x in given] for run in (graphed, eager)]
        graphed(fresh(lab, 2, 6))  # another key, for which one of the two has to go
        for some in losses:
            (some[0] + some[1]).backward()
        assert step_both(mine, eager)
        assert graphed.report().captured == 2


def test_no_more_calls_wait_than_there_may_be_graphs(lab: Lab) -> None:
    mine, graphed, eager = pair(lab, max_graphs=1)
    with pytest.warns(UserWarning, match="max_open"):
        for _ in range(3):
            given = [fresh(lab, 4, 6), fresh(lab, 4, 6)]
            losses = [[run(x).square().sum() for x in given] for run in (graphed, eager)]
            for some in losses:
                (some[0] + some[1]).backward()
            assert step_both(mine, eager)
    assert numbers(graphed) == (1, 3, 3)


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


def test_a_second_graph_that_cannot_be_captured_leaves_the_first_one_in_use(lab: Lab) -> None:
    captures: list[int] = []

    def scaled(x: Tensor) -> Tensor:
        if cgraph.is_current_stream_capturing():
            captures.append(1)
            if len(captures) == 2:
                raise RuntimeError("no second one")
        return x * 2

    graphed = cgraph.graphed(scaled)
    graphed(leaf(lab, 4)).sum().backward()
    with pytest.warns(UserWarning, match="no second one"):
        losses = [graphed(leaf(lab, 4)).sum() for _ in range(2)]
    (losses[0] + losses[1]).backward()
    before = graphed.report().replays
    for _ in range(5):
        graphed(leaf(lab, 4)).sum().backward()
    assert graphed.report().replays == before + 5


@pytest.mark.parametrize("debug", ["compare", "sync", "eager"])
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


def test_the_report_says_which_graph_serves_calls_beside_others(lab: Lab) -> None:
    _, graphed, _ = pair(lab)
    losses = [graphed(fresh(lab, 4, 6)).sum() for _ in range(3)]
    texts = [key.key for key in graphed.report().keys]
    assert ["beside" in text for text in texts] == [False, True, True]
    assert texts[2].endswith("beside 2 calls before backward")
    assert len(losses) == 3


@pytest.mark.parametrize("given", [0, -1, 1.5, True, None])
def test_max_open_is_a_number_of_calls(given: Any) -> None:
    with pytest.raises(ArgumentError, match=r"max_open is .*, expected a number, at least 1"):
        cgraph.graphed(torch.sin, max_open=given)


def test_a_result_that_waits_is_kept_by_autograd_alone(lab: Lab) -> None:
    mine, graphed, eager = pair(lab)
    x, other = leaf(lab, 4, 6), fresh(lab, 4, 6)
    loss = graphed(x).square().sum()  # of the result only autograd knows
    second: Tensor = graphed(other).square().sum()
    second.backward()
    loss.backward()
    own = x.detach().clone().requires_grad_()
    for one in (other, own):
        eager(one).square().sum().backward()
    assert x.grad is not None and own.grad is not None
    assert near(x.grad, own.grad)
    assert same_gradients(mine, eager)
