"""Each driver call failing once in a loop: the error or the warning names it, nothing is lost."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import cgraph
from cgraph.errors import CgraphError, CgraphWarning
from lab import SimLab


def step(x: Tensor, total: Tensor) -> None:
    x.add_(1)
    cgraph.when(x % 2 == 0, lambda total: total.add_(x), total)
    total.mul_(2)


def numbers() -> tuple[Tensor, Tensor]:
    return torch.zeros(2, dtype=torch.long), torch.ones(2, dtype=torch.long)


def expected() -> Tensor:
    x, total = numbers()
    for _ in range(6):
        step(x, total)
    return total


def begin(state: tuple[Tensor, Tensor]) -> Any:
    """Run a loop whose step has been captured by nobody."""
    run = cgraph.loop(step, *state, max_steps=6, emit="total")
    assert len([*run]) == 6
    return run


def again(looped: Any, state: tuple[Tensor, Tensor]) -> Any:
    """Run a loop once more."""
    run = looped(*state)
    run.result()
    return run


def is_named(text: str, code: int) -> bool:
    return any(stage in text for stage in ("cu", f"({code})", "out of memory"))


def test_each_driver_call_failing_once_in_a_first_run_leaves_nothing(sim: SimLab) -> None:
    code = 719

    def fails(number: int | None) -> bool:
        simulator, state = sim.simulator, numbers()
        if number is not None:
            simulator.fail_call(number, code)
        try:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                run = begin(state)
            texts = [str(one.message) for one in told if isinstance(one.message, CgraphWarning)]
            assert torch.equal(run.result()[1], expected())
            assert (run.report.how == "steps") == bool(texts)
        except CgraphError as error:
            texts = [str(error)]
            error.__traceback__ = None
        simulator.clear_faults()
        assert all(is_named(text, code) for text in texts), texts
        return bool(texts)

    check_each(sim, fails, 20)


@pytest.mark.parametrize("code", [2, 719])
def test_each_driver_call_failing_once_in_a_later_run_leaves_the_loop_usable(
    sim: SimLab, code: int
) -> None:
    def fails(number: int | None) -> bool:
        simulator, state = sim.simulator, numbers()
        looped = cgraph.loop(max_steps=6)(step)
        looped(*state).result()
        for one, begin in zip(state, numbers(), strict=True):
            one.copy_(begin)
        start = len(simulator.calls())
        failed = False
        if number is not None:
            simulator.fail_call(number, code)
        try:
            again(looped, state)
        except CgraphError as error:
            failed = True
            assert is_named(str(error), code), error
            error.__traceback__ = None
        counted.append(len(simulator.calls()) - start)
        simulator.clear_faults()
        for one, begin in zip(state, numbers(), strict=True):
            one.copy_(begin)
        assert torch.equal(again(looped, state).result()[1], expected())
        return failed

    counted: list[int] = []
    fails(None)
    baseline = sim.settled()
    failures = 0
    for number in range(counted[0]):
        failures += fails(number)
        assert sim.settled() == baseline
    assert failures >= 1


def check_each(sim: SimLab, fails: Callable[[int | None], bool], least: int) -> None:
    """Let each driver call of a scenario fail once."""
    start = len(sim.simulator.calls())
    assert not fails(None)
    calls = len(sim.simulator.calls()) - start
    baseline = sim.settled()
    failures = 0
    for number in range(calls):
        failures += fails(number)
        assert sim.settled() == baseline
    assert failures >= least
