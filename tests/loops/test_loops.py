"""``cgraph.loop``: what a run publishes, its end, and its state, as by the same number of calls."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from torch import Tensor

import cgraph
from cgraph.errors import ArgumentError, CaptureError, StateError
from lab import Lab, fresh


class Decoder:
    """A step of a model: it changes its state in place, and ends rows by a token."""

    def __init__(self, lab: Lab, rows: int = 3) -> None:
        self.table, self.weight = fresh(lab, 10, 8), fresh(lab, 8, 10)
        self.device, self.rows = lab.device, rows

    def state(self) -> tuple[Tensor, Tensor, Tensor]:
        token = torch.arange(self.rows, device=self.device)
        place = torch.zeros(1, dtype=torch.long, device=self.device)
        return token, place, torch.zeros(self.rows, dtype=torch.bool, device=self.device)

    def __call__(self, token: Tensor, place: Tensor, done: Tensor) -> None:
        scores = torch.tanh(self.table[token]) @ self.weight + place * 0.3
        token.copy_(scores.argmax(-1))
        place.add_(1)
        done.logical_or_(token == 7)

    def steps(self, count: int, *, until: bool) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """Return what so many calls give, or as many as it takes; and the state after them."""
        state, tokens = self.state(), []
        for _ in range(count):
            self(*state)
            tokens.append(state[0].cpu().clone())
            if until and bool(state[2].all()):
                break
        return tokens, state


def alike(found: Any, expected: Any) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(torch.equal(one.cpu(), other.cpu()) for one, other in pairs)


@pytest.mark.parametrize("unroll", ["auto", 1])
@pytest.mark.parametrize("until", [None, "done"])
def test_a_run_makes_the_same_steps_as_calls(lab: Lab, unroll: Any, until: str | None) -> None:
    decoder = Decoder(lab)
    tokens, after = decoder.steps(12, until=until is not None)
    state = decoder.state()
    options: dict[str, Any] = {"max_steps": 12, "until": until, "emit": "token", "unroll": unroll}
    run = cgraph.loop(decoder.__call__, *state, **options)
    assert alike([*run], tokens)
    assert run.steps == len(tokens)
    assert alike(run.result(), after)
    assert run.is_over


@pytest.mark.parametrize("unroll", [1, 4, 16])
def test_a_loop_ends_at_each_step_that_the_flag_says(lab: Lab, unroll: int) -> None:
    def count(left: Tensor, done: Tensor) -> None:
        left.sub_(1)
        done.copy_(left <= 0)

    looped = cgraph.loop(max_steps=70, until="done", emit="left", unroll=unroll)(count)
    left = torch.zeros(2, dtype=torch.long, device=lab.device)
    done = torch.zeros(2, dtype=torch.bool, device=lab.device)
    for steps in (1, 2, 3, 15, 16, 17, 69, 70, 71):
        left.copy_(torch.tensor([steps, 1]))
        run = looped(left, done)
        values = [int(one[0]) for one in run]
        assert values == [*range(steps - 1, max(-1, steps - 71), -1)], steps
        assert run.steps == min(steps, 70)


def test_a_step_may_return_the_next_state(lab: Lab) -> None:
    x, y = fresh(lab, 4), fresh(lab, 4)
    one, other = x.clone(), y.clone()
    for _ in range(5):
        one, other = other, one * 0.5 + other
    run = cgraph.loop(lambda x, y: (y, x * 0.5 + y), x, y, max_steps=5)
    assert [*run] == [0, 1, 2, 3, 4]
    assert torch.allclose(run.result()[0], one)
    assert torch.allclose(y, other)


def test_several_tensors_are_published_with_their_types(lab: Lab) -> None:
    def step(x: Tensor, n: Tensor, flag: Tensor) -> None:
        x.mul_(2)
        n.add_(1)
        flag.logical_not_()

    x = torch.ones(3, 2, device=lab.device, dtype=torch.float16)
    n, flag = torch.zeros((), dtype=torch.long, device=lab.device), x[:, 0] > 0
    run = cgraph.loop(step, x, n, flag, max_steps=3, emit=("n", flag, "x"))
    for number, (count, is_set, value) in enumerate(run):
        assert (count.dtype, int(count)) == (torch.long, number + 1)
        assert is_set.tolist() == [bool(number % 2)] * 3
        assert torch.equal(value, torch.full((3, 2), 2.0 ** (number + 1), dtype=torch.float16))


def test_a_loop_is_captured_once_for_the_same_tensors(lab: Lab) -> None:
    calls = []

    @cgraph.loop(max_steps=3)
    def step(x: Tensor) -> None:
        calls.append(1)
        x.add_(1)

    x, y = torch.zeros(4, device=lab.device), torch.zeros(4, device=lab.device)
    for _ in range(3):
        step(x).result()
    assert len(calls) == 2
    step(y).result()
    assert len(calls) == 4
    assert (x[0].item(), y[0].item()) == (9, 3)


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


def test_wrong_arguments_are_refused_by_name(lab: Lab) -> None:
    x = torch.zeros(4, device=lab.device)

    def step(x: Tensor) -> None:
        x.add_(1)

    for text, state, options in (
        ("max_steps is 0, expected a number", (x,), {"max_steps": 0}),
        ("unroll is -1, expected a number", (x,), {"max_steps": 3, "unroll": -1}),
        ("'y' is no tensor, and none of the step's parameters: x", (x,), {"emit": "y"}),
        ("state 0 is on int, expected a tensor", (3,), {}),
        ("state 0 requires a gradient", (x.clone().requires_grad_(),), {}),
        ("until is torch.float32, expected contiguous booleans", (x,), {"until": "x"}),
        ("emit has a tensor with strides", (x,), {"emit": x[::2]}),
        ("emit has 9 tensors, expected at most 8", (x,), {"emit": [x] * 9}),
    ):
        given: dict[str, Any] = {"max_steps": 3, **options}
        with pytest.raises(ArgumentError, match=text):
            cgraph.loop(step, *state, **given)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="returned 2 tensors, expected None or the next 1"):
        cgraph.loop(lambda x: (x, x), x, max_steps=3)


def test_an_error_of_the_step_comes_out_and_leaves_the_state(lab: Lab) -> None:
    x = torch.zeros(4, device=lab.device)

    def fails(x: Tensor) -> None:
        x.add_(1)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cgraph.loop(fails, x, max_steps=3)
    assert not x.any()

    def reads(x: Tensor) -> None:
        x.add_(float(x.sum()))

    with pytest.raises(CaptureError):
        cgraph.loop(reads, x, max_steps=3)


def test_a_loop_of_a_paused_pool_is_refused(lab: Lab) -> None:
    pool, x = cgraph.MemPool(), torch.zeros(4, device=lab.device)
    looped = cgraph.loop(max_steps=3, pool=pool)(lambda x: x * 2 + 1)
    looped(x).result()
    pool.pause()
    with pytest.raises(StateError):
        looped(x)
    pool.resume()
    looped(x).result()
    assert x[0].item() == 63
