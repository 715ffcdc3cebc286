"""Breaks in functions whose results require gradients: these get back through the break."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from broken import BrokenBackward, scaled
from cgraph import eager_break
from flow_calls import Around, check, step, twins
from graphed_calls import eager_calls, near, numbers, same_gradients
from lab import Lab, fresh
from networks import leaf, network


class Experts(nn.Module):
    """Sends each row to one of its experts, whose numbers of rows depend on the data."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(6, 6), nn.Linear(6, 3)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(count))

    @eager_break
    def routed(self, x: Tensor, choice: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (choice == number).nonzero()[:, 0]
            if len(rows):
                out.index_add_(0, rows, expert(x[rows]).tanh())
        return out

    def forward(self, x: Tensor, choice: Tensor) -> Tensor:
        hidden = self.inward(x).relu()
        return self.outward(self.routed(hidden, choice) + hidden)


def test_experts_in_a_break_have_the_gradients_of_eager_and_unused_ones_none(lab: Lab) -> None:
    graphed, mine, eager = twins(lab, Experts())
    for chosen in ([0, 1, 2], [0, 2], [1], [0, 1, 2], [2, 1]):
        for net in (mine, eager):
            net.zero_grad()
        choice = torch.tensor(chosen * 4, device=lab.device)[:4]
        check(graphed, mine, eager, leaf(lab, 4, 6), choice)
        used = [expert.weight.grad is not None for expert in mine.experts]
        assert used == [number in chosen for number in range(3)]
    assert numbers(graphed) == (1, 5, 0)
    (key,) = graphed.report().keys
    assert len(key.breaks) == 1 and "Experts.routed" in key.breaks[0]


def test_a_training_loop_with_a_break_goes_as_in_eager(lab: Lab) -> None:
    graphed, mine, eager = twins(lab, Experts())
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.05) for net in (mine, eager)]
    for number in range(6):
        choice = torch.randint(0, 3 if number % 2 else 2, (4,), device=lab.device)
        check(graphed, mine, eager, fresh(lab, 4, 6), choice)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert all(map(near, mine.parameters(), eager.parameters()))
    assert numbers(graphed) == (1, 6, 0)


@pytest.mark.parametrize("warmup", [0, 1, 3])
@pytest.mark.parametrize("preserve_state", [False, True])
@pytest.mark.parametrize("outputs", ["static", "clone"])
def test_breaks_with_gradients_are_captured_however_that_is_asked(
    lab: Lab, warmup: int, preserve_state: bool, outputs: Any
) -> None:
    options = {"warmup": warmup, "preserve_state": preserve_state, "outputs": outputs}
    graphed, mine, eager = twins(lab, Around(scaled), **options)
    for rows in (4, 4, 5, 4):
        check(graphed, mine, eager, leaf(lab, rows, 6))
    assert graphed.report().captured == 2
    # A library that the thread uses for the first time makes a first call run eagerly.
    assert eager_calls(graphed) <= (warmup == 0)


def test_a_break_that_comes_first_gives_its_parameters_gradients(lab: Lab) -> None:
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.last = nn.Embedding(9, 6), nn.Linear(6, 3)

        @eager_break
        def look(self, numbers: Tensor) -> Tensor:
            return self.table(numbers)

        def forward(self, numbers: Tensor) -> Tensor:
            return self.last(self.look(numbers)).relu()

    graphed, mine, eager = twins(lab, First())
    for _ in range(3):
        words = torch.randint(0, 9, (5,), device=lab.device)
        losses = []
        for run in (graphed, eager):
            result = run(words)
            result.square().sum().backward()
            losses.append(result.detach().clone())
        assert near(*losses)
        assert same_gradients(mine, eager)
    assert numbers(graphed) == (1, 3, 0)


def test_a_parameter_that_a_break_and_a_segment_use_gets_both_gradients(lab: Lab) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        @eager_break
        def again(self, x: Tensor) -> Tensor:
            return self.layer(x).sin()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.again(self.layer(x).tanh()))

    graphed, mine, eager = twins(lab, Tied())
    for _ in range(3):
        check(graphed, mine, eager, leaf(lab, 4, 6))
    assert numbers(graphed) == (1, 3, 0)


@pytest.mark.parametrize("asked", ["argument", "parameters"])
def test_gradients_that_are_asked_for_one_by_one_get_back_through_a_break(
    lab: Lab, asked: str
) -> None:
    graphed, mine, eager = twins(lab, Experts())
    choice = torch.tensor([0, 1, 1, 2], device=lab.device)
    for _ in range(3):
        x = leaf(lab, 4, 6)
        found = []
        for run, net in ((graphed, mine), (eager, eager)):
            inputs = [x] if asked == "argument" else list(net.parameters())
            found.append(torch.autograd.grad(run(x, choice).square().sum(), inputs))
        assert all(map(near, *found))
        assert all(one.grad is None for one in (x, *mine.parameters()))
    assert numbers(graphed) == (1, 3, 0)


def several(x: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor], int]:
    """Results of all kinds: with and without gradients, integers, constants."""
    best = x.detach().argmax(-1)
    scale = x.detach().abs().amax()
    return x * scale, best, {"picked": x.gather(1, best[:, None]), "scale": scale}, len(x)


def test_results_of_all_kinds_come_out_of_a_break(lab: Lab) -> None:
    look = eager_break(several)

    def between(x: Tensor) -> Tensor:
        y, best, more, rows = look(x)
        shifted = y + more["picked"] * more["scale"] / rows
        return shifted + (best[:, None] == torch.arange(6, device=best.device))

    graphed, mine, eager = twins(lab, Around(between))
    for _ in range(4):
        check(graphed, mine, eager, leaf(lab, 4, 6))
    assert numbers(graphed) == (1, 4, 0)


@pytest.mark.parametrize("kind", ["view", "itself", "part", "both", "detached", "no_grad"])
def test_what_a_break_makes_of_its_argument_s_memory_has_the_right_gradients(
    lab: Lab, kind: str
) -> None:
    ways: dict[str, Callable[[Tensor], Any]] = {
        "view": lambda x: x.view(2, -1),
        "itself": lambda x: x,
        "part": lambda x: x[:, ::2],
        "both": lambda x: (x, x * 2),
        "detached": lambda x: x.detach(),
        "no_grad": torch.no_grad()(lambda x: x * 2),
    }
    way = eager_break(ways[kind])

    def between(x: Tensor) -> Tensor:
        found = way(x)
        one, other = found if isinstance(found, tuple) else (found, found)
        return x * one.sum() + other.reshape(-1)[:6]

    graphed, mine, eager = twins(lab, Around(between))
    for _ in range(3):
        check(graphed, mine, eager, leaf(lab, 4, 6))
    assert numbers(graphed) == (1, 3, 0)


def test_a_result_may_be_written_in_place_behind_the_break(lab: Lab) -> None:
    def between(x: Tensor) -> Tensor:
        y = scaled(x)
        y += 1
        return y.mul_(x)

    graphed, mine, eager = twins(lab, Around(between))
    for _ in range(3):
        check(graphed, mine, eager, leaf(lab, 4, 6))
    assert numbers(graphed) == (1, 3, 0)


def test_several_breaks_in_a_loop_pass_gradients_on(lab: Lab) -> None:
    def between(x: Tensor) -> Tensor:
        for _ in range(3):
            x = scaled(x).sin() + x
        return x

    graphed, mine, eager = twins(lab, Around(between))
    for _ in range(4):
        check(graphed, mine, eager, leaf(lab, 4, 6))
    (key,) = graphed.report().keys
    assert len(key.breaks) == 3
    assert numbers(graphed) == (1, 4, 0)


def test_nested_breaks_pass_gradients_on(lab: Lab) -> None:
    outer = eager_break(lambda x: scaled(x) * scaled(x + 1))
    graphed, mine, eager = twins(lab, Around(outer))
    for _ in range(3):
        check(graphed, mine, eager, leaf(lab, 4, 6))
    assert numbers(graphed) == (1, 3, 0)


def test_calls_with_breaks_may_be_open_at_a_time(lab: Lab) -> None:
    graphed, mine, eager = twins(lab, Experts())
    choices = [torch.randint(0, 3, (4,), device=lab.device) for _ in range(3)]
    for _ in range(3):
        given = [fresh(lab, 4, 6) for _ in choices]
        for run in (graphed, eager):
            losses = [run(x, choice).square().sum() for x, choice in zip(given, choices)]  # noqa: B905
            for loss in losses:
                loss.backward()
        assert same_gradients(mine, eager)
    assert numbers(graphed) == (3, 9, 0)


def test_gradients_accumulate_through_breaks_as_in_eager(lab: Lab) -> None:
    graphed, mine, eager = twins(lab, Experts())
    for number in range(6):
        choice = torch.randint(0, 3, (4,), device=lab.device)
        check(graphed, mine, eager, fresh(lab, 4, 6), choice)
        if number % 3 == 2:
            for net in (mine, eager):
                net.zero_grad()
    assert eager_calls(graphed) == 0


def test_random_numbers_of_breaks_and_segments_are_those_of_eager(lab: Lab) -> None:
    drop = eager_break(lambda x: functional.dropout(x, 0.5))
    graphed, mine, eager = twins(
        lab, Around(lambda x: functional.dropout(drop(functional.dropout(x, 0.3)), 0.3))
    )
    for number in range(4):
        x = leaf(lab, 4, 6)
        torch.manual_seed(number)
        found = step(graphed, x)
        torch.manual_seed(number)
        expected = step(eager, x)
        assert all(map(near, found, expected))  # type: ignore[arg-type]
        assert same_gradients(mine, eager)
    assert numbers(graphed) == (1, 4, 0)


def test_breaks_under_autocast_have_the_gradients_of_eager(lab: Lab) -> None:
    graphed, _, eager = twins(lab, Around(scaled))
    for _ in range(3):
        x = leaf(lab, 4, 6)
        found = []
        for run in (graphed, eager):
            given = x.detach().clone().requires_grad_()
            with torch.autocast(lab.device, torch.bfloat16):
                result = run(given)
            result.float().square().sum().backward()
            assert given.grad is not None
            found.append((result.detach().float(), given.grad))
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)
    assert numbers(graphed) == (1, 3, 0)


@pytest.mark.parametrize("pad", ["zero", "repeat"])
def test_padded_calls_with_breaks_have_the_gradients_of_their_rows(lab: Lab, pad: Any) -> None:
    rowwise = eager_break(lambda x: x / x.abs().sum(-1, keepdim=True).cpu().to(x.device).add(1))
    graphed, mine, eager = twins(lab, Around(rowwise), sizes=[2, 4], pad=pad)
    for rows in (3, 4, 1, 2, 3):
        check(graphed, mine, eager, leaf(lab, rows, 6))
    assert graphed.report().captured == 2
    assert eager_calls(graphed) == 0


def test_sizes_with_breaks_are_captured_ahead_and_frozen(lab: Lab) -> None:
    graphed, mine, eager = twins(lab, Around(scaled), sizes=[2, 4])
    before = copy.deepcopy(mine.state_dict())
    graphed.capture(leaf(lab, 4, 6), progress=False).freeze()
    assert all(torch.equal(one, before[name]) for name, one in mine.state_dict().items())
    assert all(one.grad is None for one in mine.parameters())
    for rows in (4, 2, 4):
        check(graphed, mine, eager, leaf(lab, rows, 6))
    assert graphed.report().replays == 3


def test_hooks_of_parameters_that_a_break_uses_see_their_whole_gradient(lab: Lab) -> None:
    graphed, mine, eager = twins(lab, Experts(1))
    seen: list[Tensor] = []
    mine.experts[0].weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    choice = torch.zeros(4, dtype=torch.int64, device=lab.device)
    for number in range(3):
        for net in (mine, eager):
            net.zero_grad()
        check(graphed, mine, eager, fresh(lab, 4, 6), choice)
        assert len(seen) == number + 1
        assert near(seen[-1], eager.experts[0].weight.grad)
    assert numbers(graphed) == (1, 3, 0)


def test_checkpointing_inside_a_break_has_the_gradients_of_eager(lab: Lab) -> None:
    inner = network(lab)

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner = nn.Linear(6, 6), inner

        @eager_break
        def recomputed(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.recomputed(self.first(x)).sin()

    graphed, mine, eager = twins(lab, Checkpointed())
    for _ in range(3):
        check(graphed, mine, eager, leaf(lab, 4, 6))
    assert numbers(graphed) == (1, 3, 0)


def test_a_break_that_is_checkpointed_has_the_gradients_of_eager(lab: Lab) -> None:
    def between(x: Tensor) -> Tensor:
        found: Tensor = torch.utils.checkpoint.checkpoint(scaled, x, use_reentrant=False)
        return found

    graphed, mine, eager = twins(lab, Around(between))
    for _ in range(3):
        check(graphed, mine, eager, leaf(lab, 4, 6))
    assert numbers(graphed) == (1, 3, 0)


def test_a_break_in_a_backward_pass_runs_in_each(lab: Lab) -> None:
    def between(x: Tensor) -> Tensor:
        found: Tensor = BrokenBackward.apply(x)
        return scaled(found.sin() + x)

    for function in (between, BrokenBackward.apply):
        graphed, mine, eager = twins(lab, Around(function))
        for _ in range(3):
            check(graphed, mine, eager, leaf(lab, 4, 6))
        assert numbers(graphed) == (1, 3, 0)


class Added(nn.Module):
    """A break whose gradient for a parameter is the incoming one in another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shift = nn.Linear(6, 6), nn.Parameter(torch.randn(24))

    @eager_break
    def add(self, x: Tensor) -> Tensor:
        return x + self.shift.view(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.add(self.first(x))


@pytest.mark.parametrize("clears", ["never", "to zero", "to none"])
@pytest.mark.parametrize("outputs", ["static", "clone"])
def test_gradients_of_a_break_s_parameters_are_in_nobody_else_s_memory(
    lab: Lab, clears: str, outputs: Any
) -> None:
    graphed, mine, eager = twins(lab, Added(), outputs=outputs)
    kept = []
    for _ in range(5):
        if clears != "never":
            for net in (mine, eager):
                net.zero_grad(clears == "to none")
        check(graphed, mine, eager, leaf(lab, 4, 6))
        (found,) = torch.autograd.grad(graphed(leaf(lab, 4, 6)).square().sum(), mine.shift)
        kept.append((found, found.clone()))
    assert all(torch.equal(*pair) for pair in kept)
    assert numbers(graphed)[1:] == (10, 0)


@pytest.mark.parametrize("has_both", [False, True])
def test_sparse_gradients_come_out_of_a_break(lab: Lab, has_both: bool) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(9, 6, sparse=True)

        @eager_break
        def read(self, words: Tensor) -> Tensor:
            return self.table(words)

        @eager_break
        def score(self, x: Tensor) -> Tensor:
            return x @ self.table.weight.t()

        def forward(self, words: Tensor) -> Tensor:
            x = self.read(words).tanh()
            return self.score(x) if has_both else x * 2

    graphed, mine, eager = twins(lab, Tied())
    for _ in range(4):
        words = torch.randint(0, 9, (5,), device=lab.device)
        for run in (graphed, eager):
            run(words).square().sum().backward()
        pair = [net.table.weight.grad for net in (mine, eager)]
        assert pair[0].is_sparse == pair[1].is_sparse == (not has_both)
        assert near(*(one.to_dense() for one in pair))
    assert numbers(graphed) == (1, 4, 0)


class Halves(nn.Module):
    """Two results of a break, of which one is used somewhere, or none."""

    def __init__(self, used: str) -> None:
        super().__init__()
        self.first, self.one, self.other = (nn.Linear(6, 6) for _ in range(3))
        self.used = used

    @eager_break
    def both(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x), (self.other(x) - self.other(x).detach()).sqrt()

    def forward(self, x: Tensor) -> Any:
        found, unused = self.both(self.first(x).tanh())
        if self.used == "inside":
            return found.sin()
        if self.used == "outside":
            return found.sin(), x * 2, unused * 0
        return self.first(x), found, x * 2


@pytest.mark.parametrize("used", ["inside", "outside", "beside"])
def test_what_the_loss_does_not_use_of_a_break_gets_no_gradient(lab: Lab, used: str) -> None:
    graphed, mine, eager = twins(lab, Halves(used))
    for _ in range(3):
        x = leaf(lab, 4, 6)
        for run, net in ((graphed, mine), (eager, eager)):
            net.zero_grad()
            found = run(x)
            (found if used == "inside" else found[0]).square().sum().backward()
        assert eager.other.weight.grad is None
        assert mine.other.weight.grad is None
        assert same_gradients(mine, eager)
    assert numbers(graphed) == (1, 3, 0)


def test_a_break_that_records_where_its_caller_does_not_passes_gradients_on(lab: Lab) -> None:
    recording = eager_break(torch.enable_grad()(lambda x: x.sin() * 2))

    def between(x: Tensor) -> Tensor:
        with torch.no_grad():
            found: Tensor = recording(x)
        return found * 2 + x

    graphed, mine, eager = twins(lab, Around(between))
    for _ in range(3):
        check(graphed, mine, eager, leaf(lab, 4, 6))
    assert numbers(graphed) == (1, 3, 0)
