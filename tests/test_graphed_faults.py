"""Each driver call of a graphed function's calls failing once."""

from __future__ import annotations

import copy
import gc
import re
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn

import cgraph
from broken import scaled
from cgraph.errors import CgraphError, LivenessError
from graphed_calls import near, quiet, states
from lab import SimLab


def calls_of_two_keys(x: Tensor) -> bool:
    """Two keys of a function; whether all calls were replays."""
    with quiet():
        function = cgraph.graphed(lambda x: (torch.relu(x * 2), x[1:]), warmup=1, measure=False)
        for one in (x, x[:5].clone(), x):
            given = one.clone().normal_()
            found = function(given)
            assert torch.equal(found[0], torch.relu(given * 2))
            assert torch.equal(found[1], given[1:])
            del found
    return set(states(function)) == {"captured"}


def ladder(x: Tensor) -> bool:
    """Two sizes captured ahead of time; the calls are right whether or not that fails."""
    with quiet():
        function = cgraph.graphed(lambda x: torch.relu(x * 2), sizes=[5, 64], warmup=1)
        try:
            function.capture(x)
        finally:
            for rows in (64, 5):
                given = x[:rows].clone().normal_()
                assert torch.equal(function(given), torch.relu(given * 2))
    return set(states(function)) == {"captured"}


def ladder_alone(x: Tensor) -> bool:
    """Three sizes of which nothing but the captures runs, right whether or not that fails."""
    with quiet(), torch.no_grad():
        function = cgraph.graphed(
            lambda x: torch.relu(x * 2) + torch.rand_like(x) * 0,
            sizes=[5, 9, 64],
            warmup=0,
            preserve_state=False,
        )
        try:
            function.capture(x, progress=False)
        finally:
            for rows in (64, 9, 5):
                given = x[:rows].clone().normal_()
                assert torch.equal(function(given), torch.relu(given * 2))
    return set(states(function)) == {"captured"}


def open_calls(x: Tensor) -> bool:
    """Two calls before either backward pass; the gradients are right whether or not that fails."""
    net = nn.Linear(8, 3)
    eager = copy.deepcopy(net)
    with quiet():
        graphed = cgraph.graphed(net, warmup=1, measure=False)
        given = x.view(8, 8)
        for run in (graphed, eager):
            losses = [run(given[:4]), run(given[4:])]
            # Each by itself: what a failed backward pass leaves in autograd's queue stays there.
            losses[0].square().sum().backward()
            losses[1].sum().backward()
    for mine, its in zip(net.parameters(), eager.parameters(), strict=True):
        assert mine.grad is not None and its.grad is not None
        assert near(mine.grad, its.grad)
    return states(graphed) == ["captured"] * 2


def calls_with_a_break(x: Tensor) -> bool:
    """Two calls whose gradients get back through a break, right whether or not that fails."""

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(scaled(self.first(x)))

    net = Broken()
    eager = copy.deepcopy(net)
    with quiet():
        graphed = cgraph.graphed(net, warmup=1, measure=False)
        for rows in (x.view(8, 8), x.view(8, 8).sin()):
            for run in (graphed, eager):
                run(rows).square().sum().backward()
    for mine, its in zip(net.parameters(), eager.parameters(), strict=True):
        assert mine.grad is not None and its.grad is not None
        assert near(mine.grad, its.grad)
    return states(graphed) == ["captured"]


def calls_that_draw(x: Tensor) -> bool:
    """Two calls of a function that draws random numbers."""
    with quiet():
        function = cgraph.graphed(lambda x: x * 2 + torch.rand(64) * 0, warmup=1, measure=False)
        for _ in range(2):
            given = x.clone().normal_()
            assert torch.equal(function(given), given * 2)
    return states(function) == ["captured"]


SCENARIOS = [
    *(calls_of_two_keys, ladder, ladder_alone, open_calls),
    *(calls_with_a_break, calls_that_draw),
]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_each_driver_call_failing_once_gives_a_right_result_or_an_error_that_names_it(
    sim: SimLab, scenario: Callable[[Tensor], bool]
) -> None:
    simulator, x = sim.simulator, torch.randn(64)
    assert scenario(x)
    start = len(simulator.calls())
    assert scenario(x)
    calls = len(simulator.calls()) - start
    gc.collect()
    simulator.synchronize()
    baseline = simulator.live()
    failures = 0
    for n in range(calls):
        simulator.fail_call(n, 719)
        try:
            failures += not scenario(x)
        except CgraphError as error:
            assert re.search(r"719|\bcu[A-Z]", str(error)), error
            failures += 1
            error.__traceback__ = None
            del error
        simulator.clear_faults()
        gc.collect()
        with suppress(LivenessError):
            # Of a replay whose wait has failed, and whose function has died since.
            simulator.synchronize()
        simulator.synchronize()
        simulator.device.collect()
        gc.collect()
        assert not cgraph.is_current_stream_capturing()
        assert simulator.live() == baseline, simulator.calls()[start:][n]
        assert scenario(x)
        gc.collect()
    assert failures > 5
