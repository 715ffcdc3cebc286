"""Runs of a loop: what comes of them, their end, and what is kept meanwhile."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import textwrap
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import cgraph
from cgraph.errors import CgraphWarning, OutOfMemoryError, StateError
from lab import Lab


def many(lab: Lab) -> int:
    """Return a number of steps that take a while."""
    return 400 if lab.device == "cpu" else 100_000


@cgraph.eager_break
def doubled(x: Tensor) -> None:
    x.mul_(2)


def test_a_stopped_run_ends_after_an_iteration(lab: Lab) -> None:
    x = torch.zeros(1, device=lab.device)
    run = cgraph.loop(lambda x: x + 1, x, max_steps=5, unroll=1)
    run.stop()
    run.result()
    assert 1 <= run.steps <= 5
    assert x.item() == run.steps


def test_values_wait_for_a_slow_consumer_and_for_tasks(lab: Lab) -> None:
    def step(x: Tensor) -> None:
        x.add_(1)

    async def collected(run: Any) -> list[float]:
        found = []
        async for one in run:
            await asyncio.sleep(0)
            found.append(one.item())
        return found

    run = cgraph.loop(step, torch.zeros(1, device=lab.device), max_steps=6, emit="x")
    run.result()
    assert asyncio.run(collected(run)) == [1, 2, 3, 4, 5, 6]


def test_steps_of_the_host_end_by_the_flag_by_stop_and_with_tasks(lab: Lab) -> None:
    def step(x: Tensor, done: Tensor) -> None:
        doubled(x)
        done.copy_(x > 10)

    async def collected(run: Any) -> list[float]:
        return [one.item() async for one in run]

    looped = cgraph.loop(max_steps=6, emit="x", until="done")(step)
    x = torch.ones(1, device=lab.device)
    done = torch.zeros(1, dtype=torch.bool, device=lab.device)
    with pytest.warns(CgraphWarning, match="it breaks at doubled"):
        run = looped(x, done)
    assert asyncio.run(collected(run)) == [2, 4, 8, 16]
    x.fill_(1)
    run = looped(x, done)
    assert next(iter(run)).item() == 2
    run.stop()
    assert [*run] == []
    assert (run.steps, run.result()[0].item()) == (1, 2)


def test_a_run_waits_for_the_end_of_one_that_was_dropped_and_refuses_beside_another(
    lab: Lab,
) -> None:
    @cgraph.loop(max_steps=4, emit="x")
    def step(x: Tensor) -> None:
        doubled(x)

    x = torch.ones(1, device=lab.device)
    with pytest.warns(CgraphWarning, match="it breaks at doubled"):
        run = step(x)
    values = iter(run)
    next(values)
    with pytest.raises(StateError, match="another run of the loop is under way"):
        step(x)
    del run, values
    gc.collect()
    assert len([*step(x)]) == 4


@pytest.mark.parametrize("keeps", [True, False])
def test_the_interpreter_ends_while_a_loop_runs(lab: Lab, keeps: bool) -> None:
    program = f"""
        import torch, cgraph
        x = torch.zeros(4, device="{lab.device}")
        run = cgraph.loop(lambda x: x + 1, x, max_steps={many(lab)}, unroll=1, emit="x")
        if not {keeps}:
            del run
        print("at the end")
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "CGRAPH_DRIVER": "sim" if lab.device == "cpu" else "cuda"},
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "at the end\n", "")


def test_values_stay_while_a_later_run_publishes_others(lab: Lab) -> None:
    looped = cgraph.loop(max_steps=3, emit="x")(lambda x: x + 1)
    x = torch.zeros(2, device=lab.device)
    first, before = [*looped(x)], looped(x)
    before.result()
    after = looped(x)
    values = [*first, *before, *after]
    assert [one[0].item() for one in values] == [*range(1, 10)]
    assert (before.steps, after.steps) == (3, 3)


def test_a_stopped_run_leaves_the_state_of_its_last_step(lab: Lab) -> None:
    looped = cgraph.loop(max_steps=many(lab), emit="x", unroll=4)(lambda x: x + 1)
    x = torch.zeros(1, dtype=torch.long, device=lab.device)
    run = looped(x)
    run.stop()
    (after,) = run.result()
    assert after.item() == run.steps == len([*run])
    assert run.steps % 4 == 0


def test_a_refused_run_leaves_the_one_that_the_host_makes_as_it_is(lab: Lab) -> None:
    looped = cgraph.loop(max_steps=4, emit="x")(doubled)
    x = torch.ones(1, device=lab.device)
    with pytest.warns(CgraphWarning, match="it breaks at"):
        run = looped(x)
    next(iter(run))
    for _ in range(2):
        with pytest.raises(StateError, match="another run of the loop is under way"):
            looped(x)
    assert (run.steps, x.item()) == (1, 2)
    assert len([*run]) == 3


def test_a_loop_inside_its_own_step_is_refused(lab: Lab) -> None:
    @cgraph.loop(max_steps=2)
    def step(x: Tensor) -> None:
        step(x)

    with pytest.raises(StateError, match="a loop was to begin inside a capture"):
        step(torch.ones(2, device=lab.device))


def test_the_state_goes_when_its_runs_have_gone(lab: Lab) -> None:
    looped = cgraph.loop(max_steps=2, emit="x")(lambda x: x + 1)
    states = []
    for _ in range(4):
        x = torch.zeros(2, device=lab.device)
        assert [one[0].item() for one in looped(x)] == [1, 2]
        states.append(weakref.ref(x))
    del x
    gc.collect()
    assert [one() for one in states] == [None] * 4


def test_a_run_keeps_what_its_steps_read_until_its_end(lab: Lab) -> None:
    model = torch.nn.Linear(4, 4, device=lab.device)
    weight = weakref.ref(model.weight)
    x = torch.ones(2, 4, device=lab.device)
    run = cgraph.loop(model.forward, x, max_steps=3)
    del model
    gc.collect()
    assert lab.device == "cpu" or weight() is not None
    run.result()
    gc.collect()
    assert weight() is None


def test_numbers_of_steps_that_no_memory_can_hold_are_an_error_with_both_sizes(lab: Lab) -> None:
    x = torch.zeros(2**20, device=lab.device)
    with pytest.raises(OutOfMemoryError, match="publishes 4194304 bytes in each of 42949"):
        cgraph.loop(lambda x: x + 1, x, max_steps=2**32 - 1, emit="x")


def test_a_consumer_that_raises_ends_neither_the_run_nor_the_loop(lab: Lab) -> None:
    looped = cgraph.loop(max_steps=5, emit="x")(lambda x: x + 1)
    x = torch.zeros(1, device=lab.device)
    run = looped(x)
    with pytest.raises(ZeroDivisionError):
        for one in run:
            if one.item() == 2:
                raise ZeroDivisionError
    assert [one.item() for one in run] == [3, 4, 5]
    assert run.result()[0].item() == 5
    assert [one.item() for one in looped(x)] == [6, 7, 8, 9, 10]


def test_a_task_that_is_cancelled_leaves_the_run_to_others(lab: Lab) -> None:
    seen: list[float] = []

    async def consume(run: Any) -> None:
        async for one in run:
            seen.append(one.item())
            await asyncio.sleep(3600 if one.item() == 2 else 0)

    async def cancelled(run: Any) -> None:
        task = asyncio.create_task(consume(run))
        while len(seen) < 2:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    looped = cgraph.loop(max_steps=5, emit="x")(lambda x: x + 1)
    x = torch.zeros(1, device=lab.device)
    run = looped(x)
    asyncio.run(cancelled(run))
    assert [one.item() for one in run] == [3, 4, 5]
    assert len([*looped(x)]) == 5


def test_flags_of_numbers_that_are_none_end_no_run(lab: Lab) -> None:
    def step(x: Tensor, done: Tensor) -> None:
        x.add_(1)
        done.copy_(x > 3)

    x = torch.full((2,), float("nan"), device=lab.device)
    done = torch.zeros(2, dtype=torch.bool, device=lab.device)
    run = cgraph.loop(step, x, done, max_steps=7, until="done")
    assert run.result()[0].isnan().all()
    assert run.steps == 7


def test_a_step_of_the_host_that_raises_ends_the_run(lab: Lab) -> None:
    fails = [False]

    @cgraph.eager_break
    def step(x: Tensor) -> None:
        x.add_(1)
        if fails[0]:
            raise ZeroDivisionError

    looped = cgraph.loop(max_steps=3)(step)
    x = torch.zeros(1, device=lab.device)
    with pytest.warns(CgraphWarning, match="it breaks at"):
        run = looped(x)
    fails[0] = True
    with pytest.raises(ZeroDivisionError):
        run.result()
    fails[0] = False
    assert (run.steps, run.is_over) == (0, True)
    assert looped(x).result()[0].item() == 4


def test_threads_get_the_values_of_their_own_runs(lab: Lab) -> None:
    looped = cgraph.loop(max_steps=32, emit="x")(lambda x: x + 1)
    x = torch.zeros(2**16, device=lab.device)
    for _ in range(10):
        x.zero_()
        run, found = looped(x), []
        thread = threading.Thread(target=lambda run=run, found=found: found.extend(run))
        thread.start()
        run.result()
        x.fill_(1000)
        later = looped(x)
        thread.join()
        later.result()
        assert [int(one[0]) for one in [*found, *run]] == [*range(1, 33)]


def test_a_loop_in_a_break_of_a_replay_of_the_same_pool_is_refused(lab: Lab) -> None:
    pool, s = cgraph.MemPool(), torch.zeros(4, device=lab.device)
    looped = cgraph.loop(max_steps=2, pool=pool)(lambda x: (x * 3 + 1) * 2)
    looped(s).result()
    begins = [False]

    @cgraph.eager_break
    def between(x: Tensor) -> None:
        if begins[0]:
            with pytest.raises(StateError, match="give it a pool of its own"):
                looped(s)
            begins.append(True)

    @cgraph.graphed(pool=pool)
    def function(x: Tensor) -> Tensor:
        y = x * 2
        z = y + 1
        between(y)
        return y * z + z

    for number in range(5):
        begins[0] = number > 2
        x = torch.full((4,), float(number), device=lab.device)
        assert function(x)[0].item() == 2 * number * (2 * number + 1) + 2 * number + 1
    assert begins == [True] * 3


def test_a_run_that_was_dropped_ends_after_an_iteration_before_a_later_one_begins() -> None:
    with cgraph.sim.use(asynchronous=True):
        looped = cgraph.loop(max_steps=40, emit="x", unroll=4)(lambda x: x + 1)
        x = torch.zeros(1)
        looped(x).result()
        x.zero_()
        looped(x)
        later = looped(x)
        assert [one.item() for one in later] == [*range(5, 45)]
        assert (later.steps, x.item()) == (40, 44)
