"""Calls of any number of rows, padded to the sizes that were captured; trap T145."""

from __future__ import annotations

import gc
import warnings
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from cgraph.errors import ArgumentError
from graphed_calls import near, numbers
from lab import Lab, fresh
from networks import network

SIZES = [1, 2, 4, 8]


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
        del result, total


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


def test_a_held_result_of_a_padded_call_keeps_its_values_by_policy(lab: Lab) -> None:
    graphed = cgraph.graphed(affine, sizes=[8], on_held="clone")
    held = []
    for rows in (3, 3, 5, 8, 2, 8, 3):
        x = fresh(lab, rows, 2)
        held.append((graphed(x), affine(x)))
    are_equal = all(torch.equal(*pair) for pair in held)
    del held, graphed
    assert are_equal


@pytest.mark.parametrize("more", [3, 5])
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


def test_the_memory_of_padded_calls_goes_with_their_function(lab: Lab) -> None:
    graphed = cgraph.graphed(affine, sizes=[4, 8])
    for rows in range(1, 9):
        graphed(fresh(lab, rows, 2))
    del graphed
    gc.collect()
    assert not any(one.name == "affine" for one in cgraph.report().functions)


def test_sizes_that_count_nothing_are_told_of_once(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda x: x * 2, sizes=[2, 4], dim=3)
    with pytest.warns(UserWarning, match=r"sizes= has no effect on \(x: .* dim=3") as caught:
        for rows in (2, 3, 3):
            x = fresh(lab, rows, 5)
            assert torch.equal(graphed(x), x * 2)
    assert len(caught) == 1


def test_a_dimension_that_an_argument_has_not_is_refused(lab: Lab) -> None:
    padded = cgraph.graphed(lambda x, y: (x + 1, y + 1), sizes=[4], dim={"x": 0, "y": 5})
    with pytest.raises(ArgumentError, match=r"rows of y are along dimension 5.*\(3, 2\)"):
        padded(fresh(lab, 3, 2), fresh(lab, 3, 2))


@pytest.mark.parametrize("sizes", [None, SIZES])
def test_python_says_which_arguments_a_capture_ahead_has_not(lab: Lab, sizes: Any) -> None:
    def scaled(x: Tensor, y: Tensor) -> Tensor:
        return x * y

    graphed = cgraph.graphed(scaled, sizes=sizes)
    for given in ((), (torch.ones((), device=lab.device),), (fresh(lab, 3, 3),)):
        with pytest.raises(TypeError, match=r"missing .* required positional argument"):
            graphed.capture(*given, progress=False)
    assert numbers(graphed) == (0, 0, 0)
    assert graphed.report().keys == ()
