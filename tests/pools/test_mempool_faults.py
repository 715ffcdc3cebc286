"""Each driver call failing once in a `MemPool`: the pool stays usable, nothing is lost."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import cgraph
from bits import same
from cgraph import MemPool
from cgraph.errors import CgraphError, OutOfMemoryError
from lab import SimLab
from pools import MIB, capture


class Case:
    """A pool with a graph, whose output holds something."""

    def __init__(self) -> None:
        self.pool = MemPool()
        self.x = torch.randn(1 << 18)
        self.graph, self.y = capture(lambda: self.x * 2, self.pool)
        self.graph.replay()
        self.before = self.y.clone()
        self.others: list[tuple[cgraph.CUDAGraph, Tensor]] = []

    def grow(self) -> None:
        self.others.append(capture(lambda: self.x * 2, self.pool))

    def pause(self) -> None:
        self.pool.pause("host")

    def resume(self) -> None:
        self.pool.resume()

    def trim(self) -> None:
        self.pool.trim()

    def check(self) -> None:
        """Require unchanged contents and a usable pool."""
        if self.pool.is_paused:
            self.resume()
        assert same(self.y, self.before)
        self.grow()
        self.x.normal_()
        for graph, y in [(self.graph, self.y), *self.others]:
            graph.replay()
            assert torch.equal(y, self.x * 2)
        self.before = self.y.clone()
        self.pause()
        self.resume()
        assert same(self.y, self.before)


def is_named(error: CgraphError, code: int) -> bool:
    """Return whether an error names the failed call or its code."""
    return any(part in str(error) for part in ("cu", f"({code})", "out of memory"))


def nothing(case: Case) -> None:
    """Do nothing: a pool is ready for most operations."""


def paused(case: Case) -> None:
    case.pause()


def spare(case: Case) -> None:
    """Give the pool segments that nothing uses."""
    for _ in range(2):
        case.grow()
    case.others.clear()
    case.graph.reset()
    case.graph, case.y = cgraph.CUDAGraph(), torch.empty(0)


@pytest.mark.parametrize("code", [2, 719])
@pytest.mark.parametrize(
    ("action", "ready"),
    [(Case.grow, nothing), (Case.pause, nothing), (Case.resume, paused)],
    ids=["grow", "pause", "resume"],
)
def test_each_driver_call_failing_once_leaves_a_usable_pool_with_its_contents(
    sim: SimLab, action: Callable[[Case], None], ready: Callable[[Case], None], code: int
) -> None:
    simulator = sim.simulator
    case = Case()
    ready(case)
    start = len(simulator.calls())
    action(case)
    calls = len(simulator.calls()) - start
    case.check()
    del case
    baseline = sim.settled()
    failures = 0
    for n in range(calls):
        case = Case()
        ready(case)
        state = case.pool.is_paused
        simulator.fail_call(n, code)
        try:
            action(case)
        except CgraphError as error:
            assert is_named(error, code), error
            assert case.pool.is_paused == state
            failures += 1
            error.__traceback__ = None
        simulator.clear_faults()
        case.check()
        del case
        assert sim.settled() == baseline
    assert failures >= 2


@pytest.mark.parametrize("code", [2, 719])
def test_each_driver_call_failing_once_in_trim_loses_no_segment(sim: SimLab, code: int) -> None:
    simulator = sim.simulator
    case = Case()
    spare(case)
    start = len(simulator.calls())
    case.trim()
    calls = len(simulator.calls()) - start
    del case
    baseline = sim.settled()
    failures = 0
    for n in range(calls):
        case = Case()
        spare(case)
        reserved = case.pool.stats()["reserved"]
        assert reserved > 0
        simulator.fail_call(n, code)
        try:
            case.trim()
        except CgraphError as error:
            assert is_named(error, code), error
            assert case.pool.stats()["mapped"] == reserved
            failures += 1
            error.__traceback__ = None
        simulator.clear_faults()
        case.trim()
        assert case.pool.stats()["mapped"] == 0
        case.grow()
        graph, y = case.others.pop()
        graph.replay()
        assert torch.equal(y, case.x * 2)
        del graph, y
        del case
        assert sim.settled() == baseline
    assert failures >= 1


def test_memory_of_the_device_that_is_short_at_resume_leaves_the_pool_paused() -> None:
    with cgraph.sim.use(memory=8 * MIB):
        x, pool = torch.randn(MIB), MemPool()
        graph, y = capture(lambda: x * 2, pool)
        graph.replay()
        before = y.clone()
        pool.pause("host")
        others = [capture(lambda: x * 2, MemPool()) for _ in range(2)]
        with pytest.raises(OutOfMemoryError):
            pool.resume()
        assert pool.is_paused and pool.stats()["kept"] == 4 * MIB
        others.pop()
        gc.collect()
        pool.resume()
        assert same(y, before)
        x.normal_()
        graph.replay()
        assert torch.equal(y, x * 2)
