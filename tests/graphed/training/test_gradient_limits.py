"""Gradients of padded calls and of moving tensors, and eager calls that record gradients."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import cgraph
from graphed_calls import near, numbers, quiet, same_gradients
from lab import Lab, fresh
from networks import leaf, network
from process_group import only_process


def test_padding_that_shows_in_a_gradient_runs_eagerly(lab: Lab) -> None:
    # The rows of the result are right, and a weight counts the number of rows.
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
            # Of rows with about the same squares, padding would move the mean by less than other
            # kernels may.
            scales = torch.arange(1.0, rows + 1, device=lab.device)
            x = fresh(lab, rows, 3).sign() * scales[:, None]
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


def test_held_results_with_gradients_keep_their_values_if_they_are_copies(lab: Lab) -> None:
    net = network(lab)
    graphed = cgraph.graphed(net)
    held = []
    for _ in range(3):
        x = fresh(lab, 4, 6)
        held.append((graphed(x), net(x)))
    assert all(near(*pair) for pair in held)


def test_ddp_with_few_warmup_calls_stays_eager_and_says_how_many(lab: Lab) -> None:
    with only_process():
        net = network(lab)
        graphed = cgraph.graphed(nn.parallel.DistributedDataParallel(net))
        with quiet() as caught:
            for _ in range(14):
                x = fresh(lab, 4, 6)
                y = graphed(x)
                assert near(y, net(x))
                y.sum().backward()
                del y
        assert [str(one.message) for one in caught if "give warmup=11" in str(one.message)]
        assert numbers(graphed)[1] == 0


@pytest.mark.parametrize("has_break", [False, True])
def test_python_runs_once_around_an_optimizer_that_torch_lets_no_capture_have(
    lab: Lab, has_break: bool
) -> None:
    nets = [network(lab) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    counts = [itertools.count(), itertools.count()]

    def made(number: int) -> Callable[[Tensor], Tensor]:
        net, count = nets[number], counts[number]
        optimizer = torch.optim.AdamW(net.parameters(), fused=True)
        work = cgraph.eager_break(lambda y: y * 2)

        def step(x: Tensor) -> Tensor:
            by = float(next(count) % 3)
            loss = (net(x).square() * by).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return work(loss.detach()) if has_break else loss.detach()

        return step

    graphed, eager = cgraph.graphed(made(0)), made(1)
    with quiet() as caught:
        for _ in range(5):
            x = fresh(lab, 4, 6)
            assert near(graphed(x), eager(x))
    assert [one for one in caught if "capturable=True" in str(one.message)]
    assert next(counts[0]) == next(counts[1])
