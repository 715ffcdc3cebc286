"""Gradients of padded calls, of what moves, and what runs eagerly while gradients are recorded."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from cgraph import _driver, _torch
from cgraph.errors import StateError
from graphed_calls import eager_calls, near, quiet, same_gradients, states
from lab import Lab, fresh
from networks import leaf, network


def is_capturing() -> bool:
    return _driver.current().is_capturing()


@pytest.mark.parametrize("pad", ["zero", "repeat"])
def test_padded_calls_have_the_gradients_of_the_rows_of_the_call(lab: Lab, pad: Any) -> None:
    mine = network(lab)
    eager = copy.deepcopy(mine)
    graphed = cgraph.graphed(mine, sizes=[2, 4, 8], pad=pad)
    for rows in (3, 7, 1, 4, 6, 3, 8, 2):
        x = leaf(lab, rows, 6)
        same = x.detach().clone().requires_grad_()
        weights = fresh(lab, rows, 3)
        for given, run, net in ((x, graphed, mine), (same, eager, eager)):
            net.zero_grad()
            result = run(given)
            assert result.shape == (rows, 3)
            (result * weights).sum().backward()
        assert x.grad is not None
        assert same.grad is not None
        assert near(x.grad, same.grad)
        assert same_gradients(mine, eager)
    assert graphed.report().captured == 3
    assert graphed.report().replays == 8
    assert eager_calls(graphed) == 0


def test_padding_that_shows_in_a_gradient_runs_eagerly(lab: Lab) -> None:
    # The rows of the result are right, and a weight counts how many there are.
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, device=lab.device))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = x * self.weight
            return y, y.square().mean()

    mine = Counts()
    eager = copy.deepcopy(mine)
    graphed = cgraph.graphed(mine, sizes=[4])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for rows in (3, 2, 4):
            x = fresh(lab, rows, 3)
            for run, net in ((graphed, mine), (eager, eager)):
                net.zero_grad()
                y, loss = run(x)
                (y.sum() + loss).backward()
            assert same_gradients(mine, eager)


def test_statistics_and_gradients_are_right_for_any_number_of_rows(lab: Lab) -> None:
    mine = network(lab, nn.BatchNorm1d(8))
    eager = copy.deepcopy(mine)
    graphed = cgraph.graphed(mine, sizes=[4, 8])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for rows in (3, 7, 4, 2, 8, 3):
            x = fresh(lab, rows, 6)
            for run, net in ((graphed, mine), (eager, eager)):
                net.zero_grad()
                run(x).square().sum().backward()
            assert same_gradients(mine, eager)
            for one, other in zip(mine.buffers(), eager.buffers(), strict=True):
                assert near(one, other)


def test_padded_calls_with_random_numbers_have_gradients(lab: Lab) -> None:
    net = network(lab, nn.Dropout(0.5))
    graphed = cgraph.graphed(net, sizes=[4, 8])
    for rows in (3, 7, 4, 2):
        net.zero_grad()
        result = graphed(fresh(lab, rows, 6))
        assert result.shape == (rows, 3)
        result.sum().backward()
        bias = net[3].bias.grad
        assert near(bias, torch.full_like(bias, rows))
    assert eager_calls(graphed) == 0


def test_sizes_captured_ahead_serve_all_rows_with_gradients(lab: Lab) -> None:
    mine = network(lab)
    eager = copy.deepcopy(mine)
    graphed = cgraph.graphed(mine, sizes=[4, 8])
    graphed.capture(fresh(lab, 3, 6)).freeze()
    for rows in range(1, 9):
        x = fresh(lab, rows, 6)
        for run, net in ((graphed, mine), (eager, eager)):
            net.zero_grad()
            run(x).sum().backward()
        assert same_gradients(mine, eager)


def test_the_report_of_a_key_with_gradients_has_nodes_and_bytes(lab: Lab) -> None:
    graphed = cgraph.graphed(network(lab))
    graphed(fresh(lab, 4, 6)).sum().backward()
    (key,) = graphed.report().keys
    assert "grad" in key.key
    assert key.nodes
    assert key.memory_bytes
    assert key.capture_seconds > 0
    assert "captured" in str(graphed.report())


def test_a_parameter_that_is_replaced_is_followed(lab: Lab) -> None:
    net = network(lab)
    graphed = cgraph.graphed(net)
    for _ in range(3):
        x = fresh(lab, 4, 6)
        net[0].weight = nn.Parameter(fresh(lab, 8, 6))
        result = graphed(x)
        assert near(result.detach(), net(x).detach())
        result.sum().backward()
        assert net[0].weight.grad is not None
    (key,) = graphed.report().keys
    assert {(one.reason, one.argument) for one in key.rerecorded} == {("moved", "weight")}


def test_calls_without_gradients_between_the_passes_change_no_gradient(lab: Lab) -> None:
    mine = network(lab)
    eager = copy.deepcopy(mine)
    graphed = cgraph.graphed(mine)
    graphed(fresh(lab, 8, 6)).sum().backward()
    between = [fresh(lab, rows, 6) for rows in (8, 4, 16)]
    x = fresh(lab, 8, 6)
    for run, net in ((graphed, mine), (eager, eager)):
        for _ in range(2):  # the graphs of these calls are there from the second time on
            net.zero_grad()
            loss = run(x).exp().sum()
            with torch.no_grad():
                for one in between:
                    run(one)
            loss.backward()
    assert same_gradients(mine, eager)
    assert eager_calls(graphed) == 0


def test_a_second_backward_pass_through_one_call_is_refused(lab: Lab) -> None:
    net = network(lab)
    graphed = cgraph.graphed(net)
    loss = graphed(fresh(lab, 4, 6)).square().sum()
    loss.backward(retain_graph=True)
    with pytest.raises(StateError, match=r"for the second time .* also with retain_graph=True"):
        loss.backward()
    net.zero_grad()
    x = fresh(lab, 4, 6)
    graphed(x).square().sum().backward()
    eager = copy.deepcopy(net)
    eager.zero_grad()
    eager(x).square().sum().backward()
    assert same_gradients(net, eager)


def test_a_function_that_writes_an_argument_runs_eagerly_with_gradients(lab: Lab) -> None:
    net = network(lab)

    def written(x: Tensor, seen: Tensor) -> Tensor:
        seen.add_(x)
        return net(x)

    graphed = cgraph.graphed(written)
    with pytest.warns(UserWarning, match="seen is written.*return the new value"):
        for _ in range(2):
            x, seen = fresh(lab, 4, 6), fresh(lab, 4, 6)
            expected = seen + x
            graphed(x, seen).sum().backward()
            assert torch.equal(seen, expected)
    assert eager_calls(graphed) == 2
    with torch.no_grad():
        x, seen = fresh(lab, 4, 6), fresh(lab, 4, 6)
        expected = seen + x
        assert near(graphed(x, seen), net(x))
        assert torch.equal(seen, expected)
    assert graphed.report().captured == 1


def test_a_result_that_depends_on_an_unknown_tensor_runs_eagerly_with_advice(lab: Lab) -> None:
    class Hidden:
        __slots__ = ("weight",)

        def __init__(self) -> None:
            self.weight = leaf(lab, 3)

    hidden = Hidden()
    graphed = cgraph.graphed(lambda x: x * hidden.weight)
    with pytest.warns(UserWarning, match="requires a gradient.*pass the module"):
        for _ in range(2):
            x = fresh(lab, 4, 3)
            hidden.weight.grad = None
            graphed(x).sum().backward()
            assert hidden.weight.grad is not None
            assert near(hidden.weight.grad, x.sum(0))
    assert eager_calls(graphed) == 2


@pytest.mark.parametrize("with_module", [False, True])
def test_a_tensor_in_a_closure_gets_its_gradient(lab: Lab, with_module: bool) -> None:
    weight, net = leaf(lab, 3), network(lab)

    def function(x: Tensor) -> Tensor:
        return (net(x) if with_module else x[:, :3]) * weight

    graphed = cgraph.graphed(function)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            x = fresh(lab, 4, 6)
            found = []
            for run in (graphed, function):
                weight.grad = None
                run(x).sum().backward()
                assert weight.grad is not None, run
                found.append(weight.grad.clone())
            assert near(*found)


def test_a_parameter_that_takes_no_part_gets_no_gradient(lab: Lab) -> None:
    net = network(lab)
    graphed = cgraph.graphed(lambda x: net[0](x))
    graphed(fresh(lab, 4, 6)).sum().backward()
    assert net[0].weight.grad is not None
    assert net[2].weight.grad is None


def test_weights_that_moved_are_followed_with_gradients(lab: Lab) -> None:
    mine = network(lab)
    eager = copy.deepcopy(mine)
    graphed = cgraph.graphed(mine)
    for _ in range(3):
        x = fresh(lab, 4, 6)
        for run, net in ((graphed, mine), (eager, eager)):
            net.zero_grad()
            run(x).sum().backward()
        assert same_gradients(mine, eager)
        for net in (mine, eager):
            net[0].weight.data = net[0].weight.data * 2
    assert eager_calls(graphed) == 0


def test_held_results_with_gradients_keep_their_values_if_they_are_copies(lab: Lab) -> None:
    net = network(lab)
    graphed = cgraph.graphed(net, outputs="clone")
    held = []
    for _ in range(3):
        x = fresh(lab, 4, 6)
        held.append((graphed(x), net(x)))
    assert all(near(*pair) for pair in held)


def test_what_raises_in_training_comes_out_and_the_next_call_works(lab: Lab) -> None:
    net, is_broken = network(lab), True

    def function(x: Tensor) -> Tensor:
        if is_broken:
            raise KeyError("mine")
        return net(x)

    graphed = cgraph.graphed(function)
    with pytest.raises(KeyError, match="mine"):
        graphed(fresh(lab, 4, 6))
    is_broken = False
    x = fresh(lab, 4, 6)
    assert near(graphed(x).detach(), net(x))
    assert graphed.report().captured == 1


def test_a_break_with_gradients_runs_eagerly_in_debug_and_says_what_to_do(lab: Lab) -> None:
    net = nn.Linear(3, 3).to(lab.device)
    calls: list[int] = []

    @cgraph.eager_break
    def look(x: Tensor) -> Tensor:
        calls.append(1)
        return x * 2

    def looked(x: Tensor) -> Tensor:
        return look(net(x)).relu()

    graphed = cgraph.graphed(looked, debug="sync")
    with pytest.warns(UserWarning, match=r"a break in .*look") as caught:
        for _ in range(2):
            x = fresh(lab, 2, 3)
            found, expected = graphed(x), looked(x)
            assert torch.equal(found, expected)
            gradients = [torch.autograd.grad(one.sum(), net.weight)[0] for one in (found, expected)]
            assert torch.equal(*gradients)
    assert len(caught) == 1
    (key,) = graphed.report().keys
    assert key.advice is not None
    assert "torch.no_grad()" in key.advice
    with torch.no_grad():
        graphed(x)
        calls.clear()
        assert torch.equal(graphed(x), looked(x))
    assert graphed.report().keys[1].breaks
    assert len(calls) == 2


@pytest.mark.parametrize("debug", ["", "sync"])
def test_a_break_whose_refusal_is_caught_does_not_vanish(lab: Lab, debug: str) -> None:
    net = nn.Linear(3, 3).to(lab.device)
    look = cgraph.eager_break(lambda x: x * 2)

    def caught(x: Tensor) -> Tensor:
        try:
            return look(net(x))
        except Exception:
            return net(x)

    graphed = cgraph.graphed(caught, debug=debug)
    with quiet() as warned:
        for _ in range(2):
            x = fresh(lab, 2, 3)
            assert torch.equal(graphed(x).detach(), caught(x))
    assert states(graphed) == ["eager" if debug else "captured"]
    assert bool(debug) == any("a break in a function" in str(one.message) for one in warned)


@pytest.mark.parametrize("ahead", [False, True])
def test_keys_with_gradients_know_what_a_replay_of_both_passes_saves(lab: Lab, ahead: bool) -> None:
    net = network(lab)
    graphed = cgraph.graphed(net)
    for rows in (4, 5):
        x = leaf(lab, rows, 6)
        if ahead:
            graphed.capture(x)
        else:
            graphed(x).sum().backward()
    for key in graphed.report().keys:
        assert key.eager_seconds is not None and key.eager_seconds > 0
        assert key.graph_seconds is not None and key.graph_seconds > 0
        assert key.saved_seconds == key.eager_seconds - key.graph_seconds
    for options in ({"measure": False}, {"warmup": 0}):
        unknown = cgraph.graphed(net, **options)
        unknown(leaf(lab, 4, 6)).sum().backward()
        (key,) = unknown.report().keys
        assert (key.state, key.graph_seconds, key.eager_seconds) == ("captured", None, None)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("warmup", [1, 2, 3])
def test_the_call_whose_time_is_taken_is_watched_by_nobody(
    lab: Lab, grad: bool, warmup: int
) -> None:
    seen: list[int] = []
    net = network(lab)

    def noted(x: Tensor) -> Tensor:
        if not is_capturing():
            seen.append(_torch.mode_count())
        return net(x)

    graphed = cgraph.graphed(noted, warmup=warmup)
    with torch.set_grad_enabled(grad):
        graphed.capture(leaf(lab, 4, 6) if grad else fresh(lab, 4, 6))
    (key,) = graphed.report().keys
    assert key.eager_seconds is not None
    assert seen.count(0) == 1 and seen[0] > 0 and seen[-1] == 0
    # With gradients the first call is one without a backward pass, and times are taken last.
    assert len(seen) == (max(2, warmup) + 1 if grad else max(2, warmup))


def test_measuring_a_key_leaves_an_open_call_of_another_alone(lab: Lab) -> None:
    net = network(lab)
    eager = copy.deepcopy(net)
    graphed, x = cgraph.graphed(net), leaf(lab, 4, 6)
    loss = graphed(x).square().sum()
    graphed.capture(leaf(lab, 9, 6))
    loss.backward()
    eager(x).square().sum().backward()
    assert same_gradients(net, eager)
    assert all(key.graph_seconds is not None for key in graphed.report().keys)


def test_measuring_leaves_buffers_random_numbers_and_gradients_as_they_were(lab: Lab) -> None:
    net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.5)).to(lab.device)
    graphed, x = cgraph.graphed(net), leaf(lab, 4, 6)
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter)
    before = copy.deepcopy(net)
    grads = [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]
    torch.manual_seed(11)
    is_cuda = torch.device(lab.device).type == "cuda"
    random_state = torch.cuda.get_rng_state if is_cuda else torch.get_rng_state
    state = random_state()
    graphed.capture(x)
    assert torch.equal(random_state(), state)
    for name, buffer in net.named_buffers():
        assert torch.equal(buffer, before.get_buffer(name)), name
    for parameter, grad in zip(net.parameters(), grads, strict=True):
        assert parameter.grad is not None and torch.equal(parameter.grad, grad)
    assert x.grad is None
    (key,) = graphed.report().keys
    assert key.graph_seconds is not None


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6)),
        lambda: nn.Sequential(
            nn.Unflatten(1, (2, 3)), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(6, 6)
        ),
    ],
)
def test_an_argument_with_a_history_that_is_written_in_place_runs_eagerly(
    lab: Lab, make: Callable[[], nn.Module]
) -> None:
    before, net = nn.Linear(6, 6).to(lab.device), make().to(lab.device)
    eager = copy.deepcopy(net)
    graphed = cgraph.graphed(net)
    for call in range(3):
        x = fresh(lab, 4, 6)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            graphed(before(x)).sum().backward()
        assert [f"{one.message}" for one in caught if "clone of it" in f"{one.message}"] or call
        eager(before(x)).sum().backward()
        assert same_gradients(net, eager)
    with pytest.raises(RuntimeError, match="a leaf Variable"):
        graphed(leaf(lab, 4, 6))
