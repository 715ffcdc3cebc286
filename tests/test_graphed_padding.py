"""Padding is tried out before it is trusted: what it would change runs eagerly."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import cgraph
from graphed_calls import near, numbers, states
from lab import Lab, fresh


def affine(x: Tensor) -> Tensor:
    return x * 2 + 1


LEAKS: dict[str, Callable[[Tensor], Any]] = {
    "mean": lambda x: x - x.mean(0),
    "softmax": lambda x: x.softmax(0),
    "sum": lambda x: x.sum(),
    "count": lambda x: x / x.shape[0],
    "number": lambda x: (x * 2, x.shape[0]),
    "last": lambda x: x[-1] * 2,
    "flip": lambda x: x.flip(0),
    "sort": lambda x: x.sort(0).values,
    "pieces": lambda x: [row * 2 for row in x.unbind(0)],
    "names": lambda x: {f"row {place}": row * 2 for place, row in enumerate(x.unbind(0))},
    "flat": lambda x: x.reshape(-1) * 2,
    "gram": lambda x: x @ x.t(),
    "ranks": lambda x: torch.arange(x.shape[0], device=x.device).flip(0),
}


@pytest.mark.parametrize("pad", ["zero", "repeat", lambda x, n: torch.cat([x, x[:1]] * n)[:n]])
@pytest.mark.parametrize("leak", LEAKS)
def test_a_call_whose_padding_would_show_equals_eager(lab: Lab, leak: str, pad: Any) -> None:
    function = LEAKS[leak]
    graphed = cgraph.graphed(function, sizes=[4, 8], pad=pad)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for rows in (3, 1, 2, 7, 5, 4, 6, 8, 3):
            x = fresh(lab, rows, 5)
            one, other = graphed(x), function(x)
            assert type(one) is type(other)
            if isinstance(other, Tensor):
                assert near(one, other), rows
            elif isinstance(other, dict):
                assert one.keys() == other.keys()
                assert all(near(one[name], other[name]) for name in other)
            else:
                assert len(one) == len(other)
                for first, second in zip(one, other, strict=True):
                    assert first == second if isinstance(second, int) else near(first, second)
    assert any("padding" in (key.reason or "") for key in graphed.report().keys), leak


def test_padding_that_shows_is_warned_about_once_for_a_size_and_named(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda x: x - x.mean(0), sizes=[4])
    with pytest.warns(UserWarning, match="padding to 4 rows is not safe: output 0") as caught:
        for rows in (3, 2, 3, 2):
            graphed(fresh(lab, rows, 5))
    assert len(caught) == 1
    assert numbers(graphed)[2] == 4


def test_a_size_is_exact_also_where_padding_is_not_safe(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda x: x - x.mean(0), sizes=[4])
    with pytest.warns(UserWarning, match="not safe"):
        graphed(fresh(lab, 3, 5))
    for _ in range(3):
        x = fresh(lab, 4, 5)
        assert near(graphed(x), x - x.mean(0))
    assert numbers(graphed) == (1, 3, 1)


def test_statistics_of_a_batch_are_those_of_eager(lab: Lab) -> None:
    graphed_norm, eager_norm = (nn.BatchNorm1d(3, device=lab.device) for _ in range(2))
    graphed = cgraph.graphed(graphed_norm, sizes=[4, 8])
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for rows in (3, 7, 4, 5, 3, 8):
            x = fresh(lab, rows, 3) + 5
            assert near(graphed(x), eager_norm(x))
            for one, other in zip(graphed_norm.buffers(), eager_norm.buffers(), strict=True):
                assert near(one, other)


def test_statistics_that_are_only_read_are_safe(lab: Lab) -> None:
    norm = nn.BatchNorm1d(3, device=lab.device)
    norm(fresh(lab, 20, 3))
    norm.eval()
    graphed = cgraph.graphed(norm, sizes=[4, 8])
    with torch.no_grad():
        for rows in (3, 7, 5, 1):
            x = fresh(lab, rows, 3)
            assert near(graphed(x), norm(x))
    assert numbers(graphed) == (2, 4, 0)


class Cache(nn.Module):
    """Rows are written where they say, and everything there is summed up."""

    def __init__(self, lab: Lab, slots: int = 12) -> None:
        super().__init__()
        self.slots: Tensor
        self.register_buffer("slots", torch.randn(slots, 3, device=lab.device))

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        self.slots.index_copy_(0, index, x * 2)
        return self.slots.index_select(0, index) + x


def rows_of_cache(lab: Lab, rows: int, first: int = 0) -> tuple[Tensor, Tensor]:
    """Rows, and where each one goes; not where the first ones go."""
    return fresh(lab, rows, 3), torch.randperm(11 - first, device=lab.device)[:rows] + first


def pair_of_caches(lab: Lab) -> tuple[Cache, Cache]:
    one, other = Cache(lab), Cache(lab)
    other.load_state_dict(one.state_dict())
    return one, other


def test_zeros_that_would_be_written_to_row_0_of_a_cache_are_not(lab: Lab) -> None:
    mine, eager = pair_of_caches(lab)
    graphed = cgraph.graphed(mine, sizes=[4, 8])
    with pytest.warns(UserWarning, match="padding to . rows is not safe.*write"):
        for rows in (3, 7, 5, 2):
            given = rows_of_cache(lab, rows, first=1)
            assert torch.equal(graphed(*given), eager(*given))
            assert torch.equal(mine.slots, eager.slots)


def test_a_cache_is_right_where_padding_repeats_the_last_row(lab: Lab) -> None:
    mine, eager = pair_of_caches(lab)
    graphed = cgraph.graphed(mine, sizes=[4, 8], pad="repeat")
    for rows in (3, 1, 7, 5, 2, 4, 8):
        given = rows_of_cache(lab, rows)
        assert torch.equal(graphed(*given), eager(*given))
        assert torch.equal(mine.slots, eager.slots)
    assert numbers(graphed) == (2, 7, 0)


def test_a_cache_is_right_where_padding_goes_to_a_slot_of_its_own(lab: Lab) -> None:
    def pad(rows: Tensor, size: int) -> Tensor:
        more = rows.new_full((size - len(rows), *rows.shape[1:]), 11)
        return torch.cat([rows, more])

    mine, eager = pair_of_caches(lab)
    graphed = cgraph.graphed(mine, sizes=[4, 8], pad=pad)
    for rows in (3, 1, 7, 5, 2, 4, 8):
        given = rows_of_cache(lab, rows)
        assert torch.equal(graphed(*given), eager(*given))
        assert torch.equal(mine.slots[:11], eager.slots[:11])
    assert numbers(graphed) == (2, 7, 0)


def test_a_cache_that_is_declared_static_is_right(lab: Lab) -> None:
    def stored(x: Tensor, index: Tensor, cache: Tensor) -> Tensor:
        return cache.index_copy_(0, index, x).index_select(0, index) * 2

    graphed = cgraph.graphed(stored, sizes=[4, 8], pad="repeat", static_argnames="cache")
    mine = fresh(lab, 12, 3)
    eager = mine.clone()
    for rows in (3, 7, 4, 2, 3):
        x, index = rows_of_cache(lab, rows)
        assert torch.equal(graphed(x, index, mine), stored(x, index, eager))
        assert torch.equal(mine, eager)
    assert numbers(graphed) == (2, 5, 0)


def test_what_the_function_raises_in_the_trial_comes_out_and_the_next_call_works(lab: Lab) -> None:
    is_broken = False

    def function(x: Tensor) -> Tensor:
        if is_broken:
            raise KeyError("mine")
        return x * 2

    graphed = cgraph.graphed(function, sizes=[4]).capture(fresh(lab, 4, 2))
    is_broken = True
    with pytest.raises(KeyError, match="mine"):
        graphed(fresh(lab, 3, 2))
    is_broken = False
    x = fresh(lab, 3, 2)
    assert torch.equal(graphed(x), x * 2)


def test_a_cache_that_is_empty_at_first_is_not_overwritten_at_row_0_later(lab: Lab) -> None:
    mine, eager = pair_of_caches(lab)
    with torch.no_grad():
        mine.slots.zero_(), eager.slots.zero_()
    graphed = cgraph.graphed(mine, sizes=[4])
    with pytest.warns(UserWarning, match="padding to 4 rows is not safe"):
        for first in (1, 0, 1, 1):
            given = rows_of_cache(lab, 3, first)
            graphed(*given), eager(*given)
            assert torch.equal(mine.slots, eager.slots)


def test_a_result_that_is_the_memory_of_a_module_is_compared_as_it_was(lab: Lab) -> None:
    mine, eager = pair_of_caches(lab)

    def stepped(cache: Cache, x: Tensor) -> Tensor:
        cache.slots.add_(1)
        return x + cache.slots.sum(0)

    graphed = cgraph.graphed(lambda x: (stepped(mine, x), mine.slots), sizes=[4])
    for rows in (3, 2, 3):
        x = fresh(lab, rows, 3)
        result, slots = graphed(x)
        assert near(result, stepped(eager, x))
        assert torch.equal(slots, eager.slots)
    assert numbers(graphed) == (1, 3, 0)


def test_a_counter_of_calls_counts_each_padded_call_once(lab: Lab) -> None:
    count = torch.zeros((), device=lab.device)

    def counted(x: Tensor) -> Tensor:
        count.add_(1)
        return x + 1

    graphed = cgraph.graphed(counted, sizes=[4, 8])
    for calls, rows in enumerate((3, 2, 7, 3, 5, 4), start=1):
        graphed(fresh(lab, rows, 2))
        assert count.item() == calls
    assert numbers(graphed) == (2, 6, 0)


def test_a_counter_of_rows_counts_those_of_the_calls_alone(lab: Lab) -> None:
    count = torch.zeros((), device=lab.device)

    def counted(x: Tensor) -> Tensor:
        count.add_(x.shape[0])
        return x + 1

    graphed = cgraph.graphed(counted, sizes=[4, 8])
    total = 0
    with pytest.warns(UserWarning, match="not safe"):
        for rows in (3, 2, 7, 3, 5, 4):
            graphed(fresh(lab, rows, 2))
            total += rows
            assert count.item() == total


def test_random_numbers_of_padded_calls_are_new_in_each_call(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda x: x + torch.rand_like(x), sizes=[4, 8])
    seen = []
    for rows in (3, 3, 2, 7, 3):
        x = fresh(lab, rows, 5)
        noise = (graphed(x) - x).clone()
        assert noise.shape == x.shape
        assert (noise > -1e-5).all()
        assert (noise < 1 + 1e-5).all()
        seen.append(noise[0].clone())
    assert not any(near(one, other) for i, one in enumerate(seen) for other in seen[:i])
    assert numbers(graphed) == (2, 5, 0)


def test_the_trial_of_a_size_draws_no_random_number_of_the_caller(lab: Lab) -> None:
    function = nn.Dropout(0.5)
    graphed = cgraph.graphed(function, sizes=[4])
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    x = fresh(lab, 3, 6)
    torch.random.set_rng_state(before)
    first = graphed(x).clone()
    torch.random.set_rng_state(before)
    if lab.device == "cuda":
        torch.cuda.manual_seed(5)
        first = graphed(x).clone()
        torch.cuda.manual_seed(5)
    assert torch.equal(graphed(x), first)


def test_a_function_that_pads_wrongly_is_named(lab: Lab) -> None:
    graphed = cgraph.graphed(affine, sizes=[4], pad=lambda x, size: x, on_fail="raise")
    with pytest.raises(
        cgraph.errors.ArgumentError, match=r"pad returned .*\[3, 2\].*expected .*\[4, 2\]"
    ):
        graphed(fresh(lab, 3, 2))


def test_rows_that_differ_from_replay_to_replay_anyway_are_padded(lab: Lab) -> None:
    place = torch.arange(4096).to(lab.device) % 8

    # On a GPU the sums are made in another order each time.
    @cgraph.graphed(sizes=[64], on_fail="raise", preserve_state=False)
    def spread(x: Tensor) -> Tensor:
        return x.new_zeros(x.shape[0], 8).index_add_(1, place, x)

    for rows in (60, 61, 62, 63):
        x = fresh(lab, rows, 4096) * 1000
        eager = x.new_zeros(rows, 8).index_add_(1, place, x)
        assert_close(spread(x), eager, rtol=1e-3, atol=1.0)
    assert states(spread) == ["captured"]


def test_a_call_that_fails_teaches_nothing_about_rows(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda x, mask: x * mask, sizes=[4])
    with pytest.raises(RuntimeError, match="must match"):
        graphed(fresh(lab, 3), fresh(lab, 2))
    for rows in (3, 2, 4):
        x, mask = fresh(lab, rows), fresh(lab, rows)
        assert torch.equal(graphed(x, mask), x * mask)
    assert "captured" in states(graphed)


def test_a_tensor_that_had_another_length_in_a_capture_has_no_rows(lab: Lab) -> None:
    def scaled(x: Tensor, two: Tensor) -> Tensor:
        return x * two.sum()

    graphed = cgraph.graphed(scaled, sizes=[4])
    for rows in (4, 2, 3):
        x, two = fresh(lab, rows), fresh(lab, 2)
        assert_close(graphed(x, two), scaled(x, two))
    assert states(graphed) == ["captured"]


def test_a_size_that_no_memory_is_enough_for_runs_eagerly(lab: Lab) -> None:
    graphed = cgraph.graphed(affine, sizes=[4, 10**15])
    with pytest.warns(UserWarning, match=r"padding to 10{15} rows failed"):
        for _ in range(2):
            x = fresh(lab, 5)
            assert torch.equal(graphed(x), affine(x))
    x = fresh(lab, 3)
    assert torch.equal(graphed(x), affine(x))
    assert states(graphed) == ["eager", "captured"]


@pytest.mark.parametrize(
    "rows", [[(3, 4), (3, 3), (2, 2)], [(4, 4), (3, 4), (3, 3)], [(3, 4), (2, 2), (3, 2)]]
)
def test_what_a_trial_has_shown_is_of_the_tensors_that_were_padded(
    lab: Lab, rows: list[tuple[int, int]]
) -> None:
    def scaled(x: Tensor, weights: Tensor) -> Tensor:
        return x * weights.mean()

    graphed = cgraph.graphed(scaled, sizes=[4, 8])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for first, second in [*rows, *rows]:
            x, weights = fresh(lab, first), fresh(lab, second)
            assert_close(graphed(x, weights), scaled(x, weights))


def test_a_graph_that_is_captured_anew_is_tried_out_again(lab: Lab) -> None:
    module: nn.Module = nn.Linear(2, 2).to(lab.device)
    graphed = cgraph.graphed(lambda x: module(x), sizes=[4])
    with torch.no_grad():
        x = fresh(lab, 3, 2)
        assert near(graphed(x), module(x))
        module = nn.BatchNorm1d(2, track_running_stats=False).to(lab.device)
        with pytest.warns(UserWarning, match="padding to 4 rows is not safe"):
            for _ in range(2):
                x = fresh(lab, 3, 2)
                assert near(graphed(x), module(x))
