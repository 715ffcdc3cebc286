"""Calls of any number of rows, padded to the sizes that were captured; trap T145."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from lab import Lab, fresh
from networks import network

SIZES = [1, 2, 4, 8]


def near(one: Any, other: Any) -> bool:
    """Whether two results are equal but for the order of sums."""
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-4, atol=1e-5)


def numbers(function: Any) -> tuple[int, int, int]:
    """How many keys have a graph, how many calls were replays, and how many ran eagerly."""
    report = function.report()
    return report.captured, report.replays, sum(key.eager_calls for key in report.keys)


def affine(x: Tensor) -> Tensor:
    return x * 2 + 1


@pytest.mark.parametrize("pad", ["zero", "repeat", lambda x, n: torch.cat([x, x[:1]] * n)[:n]])
def test_every_number_of_rows_equals_eager(lab: Lab, pad: Any) -> None:
    net = network(lab)
    graphed = cgraph.graphed(net, sizes=SIZES, pad=pad)
    with torch.no_grad():
        for _ in range(3):
            for rows in torch.randperm(8).add(1).tolist():
                x = fresh(lab, rows, 6)
                assert near(graphed(x), net(x)), rows
    assert numbers(graphed) == (4, 24, 0)


@pytest.mark.parametrize("rows", SIZES)
def test_an_exact_size_maps_to_itself(lab: Lab, rows: int) -> None:
    graphed = cgraph.graphed(affine, sizes=SIZES)
    x = fresh(lab, rows, 3)
    assert torch.equal(graphed(x), affine(x))
    (key,) = graphed.report().keys
    assert key.key.startswith(f"x: float32[{rows}, 3]")
    assert key.replays == 1


def test_fewer_rows_map_to_the_next_size_that_is_larger(lab: Lab) -> None:
    graphed = cgraph.graphed(affine, sizes=[8, 2, 5, 2])
    for rows in range(1, 9):
        graphed(fresh(lab, rows, 3))
    replays = {key.key.split(",")[0]: key.replays for key in graphed.report().keys}
    assert replays == {"x: float32[2": 2, "x: float32[5": 3, "x: float32[8": 3}


def test_larger_calls_run_eagerly_with_one_warning(lab: Lab) -> None:
    graphed = cgraph.graphed(affine, sizes=SIZES)
    x = fresh(lab, 9, 3)
    with pytest.warns(UserWarning, match=r"larger than all sizes.*8.*add a size") as caught:
        assert torch.equal(graphed(x), affine(x))
        for rows in (9, 10, 31, 9, 10):
            x = fresh(lab, rows, 3)
            assert torch.equal(graphed(x), affine(x))
    assert len(caught) == 1
    assert numbers(graphed) == (0, 0, 6)
    assert all("larger than all sizes" in (key.reason or "") for key in graphed.report().keys)


def test_a_result_of_a_padded_call_has_only_the_rows_of_the_call(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda x: {"a": [x + 1, (x.sum(1), "word", 7)]}, sizes=SIZES)
    for rows in (3, 5, 7, 3):
        x = fresh(lab, rows, 4)
        result = graphed(x)
        assert torch.equal(result["a"][0], x + 1)
        total, word, number = result["a"][1]
        assert near(total, x.sum(1))
        assert (word, number) == ("word", 7)


@pytest.mark.parametrize("dim", [1, {"x": 1}])
def test_rows_may_lie_in_another_dimension(lab: Lab, dim: Any) -> None:
    graphed = cgraph.graphed(lambda x: x.exp().t(), sizes=SIZES, dim=dim)
    for rows in (3, 8, 7, 1, 6):
        x = fresh(lab, 5, rows)
        assert near(graphed(x), x.exp().t())
    assert numbers(graphed) == (3, 5, 0)


def test_only_named_arguments_have_rows(lab: Lab) -> None:
    def scaled(x: Tensor, weight: Tensor) -> Tensor:
        return x * weight.sum(0)

    graphed = cgraph.graphed(scaled, sizes=SIZES, dim={"x": 0})
    for rows in (3, 7, 5, 3):
        x, weight = fresh(lab, rows, 3), fresh(lab, 3, 3)
        assert near(graphed(x, weight), scaled(x, weight))
        assert near(graphed(x, weight=weight), scaled(x, weight))
    assert numbers(graphed)[2] == 0


def test_tensors_without_rows_are_not_padded(lab: Lab) -> None:
    def mixed(x: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
        return x @ weight * scale

    graphed = cgraph.graphed(mixed, sizes=SIZES)
    for rows in (3, 5, 1, 7):
        given = fresh(lab, rows, 6), torch.rand((), device=lab.device), fresh(lab, 6, 2)
        assert near(graphed(*given), mixed(*given))
    assert numbers(graphed) == (3, 4, 0)


def test_a_call_none_of_whose_tensors_has_rows_is_captured_as_it_is(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda x: x * 3, sizes=SIZES)
    x = torch.rand((), device=lab.device)
    assert torch.equal(graphed(x), x * 3)
    assert numbers(graphed) == (1, 1, 0)


def test_several_tensors_with_rows_are_padded_together(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda pair, *, bias: pair[0] * pair[1][:, None] + bias, sizes=SIZES)
    for rows in (3, 6, 2, 7):
        x, y, bias = fresh(lab, rows, 3), fresh(lab, rows), fresh(lab, rows, 1)
        assert near(graphed((x, y), bias=bias), x * y[:, None] + bias)
    assert numbers(graphed) == (3, 4, 0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_integers_that_index_something_are_padded_within_its_range(lab: Lab, dtype: Any) -> None:
    table = nn.Embedding(11, 4, device=lab.device)
    graphed = cgraph.graphed(lambda ids: table(ids) * 2, sizes=SIZES)
    with torch.no_grad():
        for rows in (3, 7, 5, 8, 3):
            ids = torch.randint(1, 11, (rows,), device=lab.device, dtype=dtype)
            assert torch.equal(graphed(ids), table(ids) * 2)
    assert numbers(graphed) == (2, 5, 0)


def test_a_mask_of_truth_values_is_padded(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda x, mask: x.masked_fill(mask, -1), sizes=SIZES)
    for rows in (3, 5, 7):
        x, mask = fresh(lab, rows, 4), torch.rand(rows, 4, device=lab.device) > 0.5
        assert torch.equal(graphed(x, mask), x.masked_fill(mask, -1))
    assert numbers(graphed)[2] == 0


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


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_rows_are_padded_without_gradients(lab: Lab, mode: Any) -> None:
    net = network(lab)
    graphed = cgraph.graphed(net, sizes=[4, 8])
    with mode():
        for rows in (3, 7, 4, 2):
            x = fresh(lab, rows, 6)
            assert near(graphed(x), net(x))
    assert numbers(graphed) == (2, 4, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_rows_of_other_types_are_padded(lab: Lab, dtype: torch.dtype) -> None:
    net = network(lab).to(dtype)
    graphed = cgraph.graphed(net, sizes=[4, 8])
    with torch.no_grad():
        for rows in (3, 7, 4, 2):
            x = fresh(lab, rows, 6).to(dtype)
            assert torch.allclose(graphed(x), net(x), rtol=2e-2, atol=2e-2)
    assert numbers(graphed) == (2, 4, 0)


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


def test_rows_of_results_may_lie_in_any_dimension(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda x: (x.t() + 1, x[None] * 2, x), sizes=[4, 8])
    for rows in (3, 7, 2, 4):
        x = fresh(lab, rows, 5)
        turned, lifted, same = graphed(x)
        assert torch.equal(turned, x.t() + 1)
        assert torch.equal(lifted, x[None] * 2)
        assert same is x
    assert numbers(graphed) == (2, 4, 0)


def test_results_without_rows_are_returned_whole(lab: Lab) -> None:
    weight = fresh(lab, 4, 4)
    graphed = cgraph.graphed(lambda x: (x @ weight, weight.sum(0)), sizes=[4, 8])
    for rows in (3, 4, 2, 7):
        x = fresh(lab, rows, 4)
        rows_out, total = graphed(x)
        assert near(rows_out, x @ weight)
        assert near(total, weight.sum(0))
    assert numbers(graphed) == (2, 4, 0)


def test_an_argument_that_is_written_has_its_rows_written_and_nothing_else(lab: Lab) -> None:
    def bumped(x: Tensor) -> Tensor:
        x.add_(1)
        return x * 2

    graphed = cgraph.graphed(bumped, sizes=[4, 8])
    for rows in (3, 7, 2, 4, 3):
        whole = fresh(lab, 9, 5)
        before = whole.clone()
        result = graphed(whole[:rows])
        assert torch.equal(whole[:rows], before[:rows] + 1)
        assert torch.equal(whole[rows:], before[rows:])
        assert torch.equal(result, whole[:rows] * 2)
    assert numbers(graphed) == (2, 5, 0)


def test_an_argument_that_is_written_and_returned_is_the_callers_own(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda x: x.mul_(2), sizes=[4])
    for rows in (3, 2, 4, 3):
        x = fresh(lab, rows, 5)
        expected = x * 2
        assert graphed(x) is x
        assert torch.equal(x, expected)


def test_a_held_result_of_a_padded_call_is_warned_about(lab: Lab) -> None:
    graphed = cgraph.graphed(affine, sizes=[8])
    held = graphed(fresh(lab, 3, 2))
    with pytest.warns(UserWarning, match="output 0 of affine.*still referenced"):
        graphed(fresh(lab, 3, 2))
    del held


NOT_SEEN = "an entry does not see what another entry of the same storage has lent"


@pytest.mark.xfail(reason=NOT_SEEN)
@pytest.mark.parametrize(("rows", "more"), [(3, 5), (5, 8), (8, 3)])
def test_a_held_result_is_warned_about_whatever_number_of_rows_comes_next(
    lab: Lab, rows: int, more: int
) -> None:
    graphed = cgraph.graphed(affine, sizes=[8])
    for known in (rows, more):
        graphed(fresh(lab, known, 2))
    held = graphed(fresh(lab, rows, 2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        graphed(fresh(lab, more, 2))
    del held, graphed
    assert any("still referenced" in str(one.message) for one in caught)


@pytest.mark.xfail(reason=NOT_SEEN)
def test_a_held_result_of_a_padded_call_keeps_its_values_by_policy(lab: Lab) -> None:
    graphed = cgraph.graphed(affine, sizes=[8], on_held="clone")
    held = []
    for rows in (3, 3, 5, 8, 2, 8, 3):
        x = fresh(lab, rows, 2)
        held.append((graphed(x), affine(x)))
    are_equal = all(torch.equal(*pair) for pair in held)
    del held, graphed
    assert are_equal


@pytest.mark.parametrize("more", [3, pytest.param(5, marks=pytest.mark.xfail(reason=NOT_SEEN))])
def test_a_held_result_of_a_padded_call_can_be_an_error(lab: Lab, more: int) -> None:
    graphed = cgraph.graphed(affine, sizes=[8], on_held="raise")
    held = graphed(fresh(lab, 3, 2))
    expected = held.clone()
    with suppress(cgraph.errors.StateError):
        graphed(fresh(lab, more, 2))
    is_kept = torch.equal(held, expected)
    del held, graphed
    assert is_kept


def test_copies_of_padded_results_stay_as_they_are(lab: Lab) -> None:
    graphed = cgraph.graphed(affine, sizes=[8], outputs="clone")
    held = []
    for rows in (3, 3, 5, 8, 2):
        x = fresh(lab, rows, 2)
        held.append((graphed(x), affine(x)))
    assert all(torch.equal(*pair) for pair in held)


def test_alternating_numbers_of_rows_of_one_size_never_mix(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda x, y: (x * y, x - y), sizes=[8])
    for _ in range(4):
        for rows in (3, 7, 5, 8):
            x, y = fresh(lab, rows, 2), fresh(lab, rows, 2)
            product, difference = graphed(x, y)
            assert torch.equal(product, x * y)
            assert torch.equal(difference, x - y)
            del product, difference
    assert numbers(graphed) == (1, 16, 0)


@pytest.mark.parametrize("order", [(3, 2, 3, 4, 5), (5, 3, 5, 3, 8), (8, 3, 5)])
def test_a_weight_that_is_by_chance_as_long_as_the_rows_changes_no_result(
    lab: Lab, order: tuple[int, ...]
) -> None:
    graphed = cgraph.graphed(lambda x, weight: x @ weight, sizes=[4, 8])
    weight = fresh(lab, 3, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for rows in order:
            x = fresh(lab, rows, 3)
            assert near(graphed(x, weight), x @ weight)


def test_no_rows_give_a_result_without_rows(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda x: (x * 2).sum(1), sizes=SIZES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            assert graphed(fresh(lab, 0, 3)).shape == (0,)
    x = fresh(lab, 3, 3)
    assert near(graphed(x), (x * 2).sum(1))


def test_rows_of_a_slice_with_gaps_are_padded(lab: Lab) -> None:
    graphed = cgraph.graphed(affine, sizes=[4, 8])
    for rows in (3, 7, 3):
        for x in (fresh(lab, rows, 6)[:, ::2], fresh(lab, 6, rows).t(), fresh(lab, 1, 6)):
            assert torch.equal(graphed(x), affine(x))
            given = x.expand(rows, 6) if len(x) == 1 else x
            assert torch.equal(graphed(given), affine(given))


def test_a_function_that_pads_wrongly_is_named(lab: Lab) -> None:
    graphed = cgraph.graphed(affine, sizes=[4], pad=lambda x, size: x, on_fail="raise")
    with pytest.raises(
        cgraph.errors.ArgumentError, match=r"pad returned .*\[3, 2\].*expected .*\[4, 2\]"
    ):
        graphed(fresh(lab, 3, 2))


def test_the_memory_of_padded_calls_goes_with_their_function(lab: Lab) -> None:
    graphed = cgraph.graphed(affine, sizes=[4, 8])
    for rows in range(1, 9):
        graphed(fresh(lab, rows, 2))
    del graphed
    gc.collect()
    assert not any(one.name == "affine" for one in cgraph.report().functions)
