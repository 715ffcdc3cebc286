"""Loops of steps that draw random numbers, and steps that run on while the host looks."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch
from torch import Tensor

import cgraph

pytestmark = pytest.mark.gpu


class Sampler:
    """A step that draws a token of a distribution, with dropout before."""

    def __init__(self) -> None:
        self.table = torch.randn(50, 16, device="cuda")
        self.weight = torch.randn(16, 50, device="cuda")

    def __call__(self, token: Tensor, place: Tensor) -> None:
        hidden = torch.nn.functional.dropout(self.table[token], 0.3)
        scores = torch.softmax(hidden @ self.weight + place * 0.01, -1)
        token.copy_(torch.multinomial(scores, 1).squeeze(-1))
        place.add_(1)


def state() -> tuple[Tensor, Tensor]:
    return torch.arange(4, device="cuda"), torch.zeros(1, dtype=torch.long, device="cuda")


def replayed(sampler: Any, steps: int) -> tuple[list[Tensor], int]:
    """Return the tokens of so many replays, and the offset of the generator after them."""
    tokens, place = state()
    graph = cgraph.CUDAGraph()
    random = torch.cuda.get_rng_state()
    with cgraph.graph(graph):
        sampler(tokens, place)
    torch.cuda.set_rng_state(random)
    found = []
    for _ in range(steps):
        graph.replay()
        found.append(tokens.cpu().clone())
    return found, torch.cuda.default_generators[0].get_offset()


@pytest.mark.parametrize(("steps", "unroll"), [(32, 1), (32, 4), (1000, 8)])
def test_a_loop_draws_the_numbers_of_as_many_replays(steps: int, unroll: int) -> None:
    sampler = Sampler()
    tokens, place = state()
    looped = cgraph.loop(max_steps=steps, emit="token", unroll=unroll)(sampler)
    for seed in range(20):
        torch.cuda.manual_seed(seed)
        expected, offset = replayed(sampler, steps)
        torch.cuda.manual_seed(seed)
        for one, begin in zip((tokens, place), state(), strict=True):
            one.copy_(begin)
        run, found = looped(tokens, place), []
        for number, value in enumerate(run):
            found.append(value)
            if number % 100 == 0:
                time.sleep(0.002)
        assert all(map(torch.equal, found, expected)), seed
        assert len(found) == run.steps == steps
        run.result()
        assert torch.cuda.default_generators[0].get_offset() == offset
    assert looped.report().how == "launch"
    assert looped.report().captures == 1


def test_numbers_that_are_drawn_meanwhile_are_others() -> None:
    sampler = Sampler()
    run = cgraph.loop(sampler, *state(), max_steps=100, emit="token")
    begin = torch.cuda.default_generators[0].get_offset()
    other = torch.rand(4, device="cuda")
    after = torch.cuda.default_generators[0].get_offset()
    run.result()
    assert other.numel() == 4
    assert torch.cuda.default_generators[0].get_offset() == after > begin


def test_a_loop_that_ends_early_leaves_the_generator_behind_its_last_step() -> None:
    def step(x: Tensor, left: Tensor, done: Tensor) -> None:
        x.copy_(torch.rand_like(x))
        left.sub_(1)
        done.copy_(left <= 0)

    x, left = torch.zeros(4, device="cuda"), torch.full((1,), 7, device="cuda")
    done = torch.zeros(1, dtype=torch.bool, device="cuda")
    torch.cuda.manual_seed(3)
    begin = torch.cuda.default_generators[0].get_offset()
    run = cgraph.loop(step, x, left, done, max_steps=52, until="done", unroll=4)
    run.result()
    assert run.steps == 7
    moved = torch.cuda.default_generators[0].get_offset() - begin
    assert moved == 7 * (moved // 7) > 0


def test_a_stage_that_draws_draws_behind_the_part_before() -> None:
    def step(x: Tensor, y: Tensor, count: Tensor) -> None:
        x.copy_(torch.rand_like(x))
        count.add_(1)
        cgraph.when(count % 2 == 0, lambda y: y.copy_(torch.rand_like(y)), y)
        x.add_(torch.rand_like(x))

    def tensors() -> tuple[Tensor, Tensor, Tensor]:
        count = torch.zeros(1, dtype=torch.long, device="cuda")
        return torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda"), count

    torch.cuda.manual_seed(5)
    expected, values = tensors(), []
    for _ in range(8):
        step(*expected)
        values.append((expected[0].cpu().clone(), expected[1].cpu().clone()))
    offset = torch.cuda.default_generators[0].get_offset()
    torch.cuda.manual_seed(5)
    run = cgraph.loop(step, *tensors(), max_steps=8, emit=("x", "y"))
    found = [*run]
    assert run.report.how == "launch"
    assert all(
        torch.equal(a, c) and torch.equal(b, d)
        for (a, b), (c, d) in zip(found, values, strict=True)
    )
    assert torch.cuda.default_generators[0].get_offset() == offset


def test_values_come_while_the_loop_runs_and_a_word_of_the_host_ends_it() -> None:
    x = torch.zeros(1, dtype=torch.long, device="cuda")
    many = 200_000
    looped = cgraph.loop(max_steps=many, emit="x", unroll=1)(lambda x: x + 1)
    looped(x).stop()
    x.zero_()
    run = looped(x)
    first = next(iter(run))
    assert (first.item(), run.is_over) == (1, False)
    time.sleep(0.01)
    run.stop()
    (after,) = run.result()
    assert 1 < run.steps < many
    assert after.item() == run.steps
    assert [one.item() for one in run] == [*range(2, run.steps + 1)]


def test_a_dropped_run_ends_soon_and_its_memory_stays_until_then() -> None:
    x = torch.zeros(1, dtype=torch.long, device="cuda")
    many = 1_000_000
    cgraph.loop(lambda x: x + 1, x, max_steps=many, unroll=1)
    torch.cuda.synchronize()
    assert 0 < x.item() < many


def test_a_pool_that_is_paused_while_a_loop_runs_waits_for_its_end() -> None:
    pool = cgraph.MemPool()
    x = torch.zeros(1 << 16, device="cuda")
    looped = cgraph.loop(max_steps=2_000, pool=pool)(lambda x: x * 1.0 + 1)
    looped(x).result()
    x.zero_()
    run = looped(x)
    pool.pause()
    assert run.is_over
    pool.resume()
    assert x[0].item() == 2_000


def test_a_loop_on_another_stream_keeps_what_it_reads_though_nobody_else_does() -> None:
    class Adds:
        def __init__(self) -> None:
            self.table = torch.ones(2**20, dtype=torch.long, device="cuda")

        def __call__(self, x: Tensor) -> Tensor:
            return x + self.table[:1]

    x = torch.zeros(1, dtype=torch.long, device="cuda")
    looped = cgraph.loop(max_steps=20_000, unroll=1)(Adds())
    address = looped.__wrapped__.table.data_ptr()  # type: ignore[attr-defined]
    looped(x).stop()
    x.zero_()
    with torch.cuda.stream(torch.cuda.Stream()):
        run = looped(x)
    del looped
    gc.collect()
    others = [torch.full((2**20,), 5, dtype=torch.long, device="cuda") for _ in range(4)]
    assert run.is_over or address not in [one.data_ptr() for one in others]
    assert run.result()[0].item() == 20_000


def test_a_run_that_is_stopped_leaves_state_offset_and_steps_alike() -> None:
    x, count = torch.zeros(4, device="cuda"), torch.zeros(1, dtype=torch.long, device="cuda")

    def step(x: Tensor, count: Tensor) -> None:
        x.copy_(torch.rand_like(x))
        count.add_(1)

    looped = cgraph.loop(max_steps=100_000, emit=("x", "count"), unroll=8)(step)
    looped(x, count).stop()
    count.zero_()
    torch.cuda.manual_seed(11)
    begin = torch.cuda.default_generators[0].get_offset()
    run = looped(x, count)
    values = iter(run)
    next(values)
    run.stop()
    last, after = list(values)[-1], run.result()
    assert torch.equal(last[0], after[0].cpu())
    assert last[1].item() == after[1].item() == run.steps < 100_000
    moved = torch.cuda.default_generators[0].get_offset() - begin
    assert moved == run.steps * (moved // run.steps) > 0
    following = torch.rand(4, device="cuda")
    torch.cuda.manual_seed(11)
    for _ in range(run.steps):
        expected = torch.rand(4, device="cuda")
    assert torch.equal(expected, after[0])
    assert torch.equal(torch.rand(4, device="cuda"), following)
