"""Each driver call failing once in a tree: nothing is lost, and the next calls are right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import cgraph
from cgraph.aot import CudaGraphModule
from cgraph.errors import CgraphError
from lab import SimLab, fresh
from tree_programs import in_tree, step


def run(lab: SimLab, functions: list[Any], steps: int) -> None:
    first, second = functions
    for number in range(steps):
        step()
        x = fresh(lab, 4, 4)
        y = first(x)
        z = second(y)
        assert torch.allclose(y, torch.sin(x))
        if number % 3 == 2:
            del y
            z = second(z)
        assert z.shape == (4, 4)


def run_modules(lab: SimLab, modules: list[Any], steps: int) -> None:
    first, second = modules
    for _ in range(steps):
        step()
        x = fresh(lab, 4)
        before = x.clone()
        y, view = first(x)
        assert torch.allclose(x, before + 1)
        assert torch.allclose(second(y), torch.sin(x) * 2)
        assert torch.allclose(view, torch.sin(x)[1:])


def compiled(lab: SimLab) -> list[Any]:
    bodies = [torch.sin, lambda y: y * 2 + 1]
    return [in_tree(lab, one, fresh(lab, 4, 4)) for one in bodies]


def modules(lab: SimLab) -> list[Any]:
    def write(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.add_(1).sin()
        return y, y[1:]

    return [CudaGraphModule(write, {0}), CudaGraphModule(lambda y: y * 2, set())]


@pytest.mark.parametrize("code", [2, 719])
@pytest.mark.parametrize(("make", "run"), [(compiled, run), (modules, run_modules)])
def test_after_each_driver_call_that_fails_once_calls_are_right_and_nothing_leaks(
    sim: SimLab, code: int, make: Any, run: Any
) -> None:
    simulator = sim.simulator

    def functions() -> list[Any]:
        made: list[Any] = make(sim)
        return made

    start = len(simulator.calls())
    made = functions()
    run(sim, made, 6)
    calls = len(simulator.calls()) - start
    del made
    cgraph.trees.reset()
    baseline = sim.settled()
    failures = 0
    for n in range(calls):
        made = functions()
        simulator.fail_call(n, code)
        try:
            run(sim, made, 6)
        except (CgraphError, RuntimeError) as error:
            assert any(part in str(error) for part in ("cu", f"({code})", "out of memory")), error
            failures += 1
            error.__traceback__ = None
        simulator.clear_faults()
        run(sim, made, 6)
        del made
        assert sim.settled() == baseline
    assert failures >= 20
