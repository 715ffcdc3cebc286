"""Calls of fewer rows than a size, and how they get into its graph."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import Tensor

import cgraph
from graphed_calls import near, numbers
from lab import Lab, fresh

SIZES = [4, 8, 64]
ROWS = (3, 64, 8, 5, 3, 1, 40, 4, 63, 7, 2, 8, 33)


def mixed(x: Tensor, ids: Tensor, flags: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(flags[:, None], x * scale, -x) + ids[:, None], ids * 2


def arguments(lab: Lab, rows: int) -> tuple[Tensor, ...]:
    ids = torch.randint(0, 100, (rows,), device=lab.device)
    return fresh(lab, rows, 5), ids, fresh(lab, rows) > 0, fresh(lab, 1)


@pytest.mark.parametrize("pad", ["zero", "repeat"])
def test_padded_and_exact_calls_by_turns_equal_eager(lab: Lab, pad: Any) -> None:
    rows_of = {"x": 0, "ids": 0, "flags": 0}  # a call of one row has as many as the scale
    graphed = cgraph.graphed(mixed, sizes=SIZES, pad=pad, dim=rows_of)
    for _ in range(3):
        for rows in ROWS:
            given = arguments(lab, rows)
            rights = mixed(*given)
            # As copies: this loop has variables.
            results = [one.clone() for one in graphed(*given)]
            for one, right in zip(results, rights, strict=True):
                assert one.shape == right.shape
                assert near(one, right), rows
    captured, replays, eager = numbers(graphed)
    assert captured == 3 and eager <= 9
    assert replays + eager == 3 * len(ROWS)


@pytest.mark.parametrize("pad", ["zero", "repeat"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64, torch.complex64])
def test_of_any_width_and_place_are_padded(lab: Lab, pad: Any, dtype: torch.dtype) -> None:
    graphed = cgraph.graphed(lambda x: x * 3, sizes=SIZES, pad=pad)
    for width in (1, 3, 8):
        for rows in ROWS:
            memory = (fresh(lab, rows * width + 7) * 20).abs().to(dtype)
            for shift in (0, 1, 7):
                x = memory[shift : shift + rows * width].view(rows, width)
                assert torch.equal(graphed(x), x * 3), (width, rows, shift)


def test_what_padding_rows_hold_is_that_of_this_call(lab: Lab) -> None:
    # The counter sees them, and check_padding=False lets it.
    for pad, right in (("zero", 0.0), ("repeat", None)):
        graphed = cgraph.graphed(
            lambda x: (x * 1, x.sum(0)), sizes=[8], pad=pad, check_padding=False
        )
        for rows in (8, 5, 3, 8, 7, 1):
            x = fresh(lab, rows, 4)
            _, total = graphed(x)
            last = torch.zeros_like(x[-1]) if right == 0 else x[-1]
            assert near(total, x.sum(0) + (8 - rows) * last), (pad, rows)


def test_a_tensor_without_rows_beside_one_with_is_copied_whole(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda x, table: x @ table, sizes=[4, 8], dim={"x": 0})
    for rows in (3, 8, 5, 4, 1):
        x, table = fresh(lab, rows, 5), fresh(lab, 5, 6)
        assert near(graphed(x, table), x @ table)


def test_in_another_dimension_are_padded(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda x: x * 2, sizes=[4, 8], dim=1)
    for rows in (3, 8, 5, 4, 1, 3):
        x = fresh(lab, 3, rows)
        assert near(graphed(x), x * 2)


def test_random_numbers_of_padded_calls_follow_the_generator(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda x: x + torch.rand_like(x), sizes=[8])
    x = fresh(lab, 3, 4)
    graphed(x)
    graphed(x)
    torch.manual_seed(3)
    first = [graphed(x).clone() for _ in range(3)]
    torch.manual_seed(3)
    again = [graphed(x).clone() for _ in range(3)]
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    assert not torch.equal(first[0], first[1])


def attention(x: Tensor, mask: Tensor) -> Tensor:
    scores = (x @ x.transpose(1, 2)).masked_fill(~mask[:, None, :], float("-inf"))
    return scores.softmax(-1) @ x


def test_a_mask_of_truths_hides_zero_padding(lab: Lab) -> None:
    graphed = cgraph.graphed(attention, sizes=[4, 8], dim=1, pad="zero")
    for rows in (3, 4, 7, 5, 2):
        x = fresh(lab, 2, rows, 5)
        mask = fresh(lab, 2, rows) > 0
        mask[:, 0] = True
        assert near(graphed(x, mask), attention(x, mask))
    assert [key.state for key in graphed.report().keys] == ["captured"] * 2


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
def test_a_mask_of_what_is_hidden_does_not_hide_zero_padding(lab: Lab) -> None:
    function = lambda x, hidden: attention(x, ~hidden)  # noqa: E731
    graphed = cgraph.graphed(function, sizes=[4, 8], dim=1, pad="zero")
    for rows in (3, 7, 2):
        x = fresh(lab, 2, rows, 5)
        hidden = torch.zeros(2, rows, dtype=torch.bool, device=lab.device)
        assert near(graphed(x, hidden), attention(x, ~hidden))
    assert "eager" in [key.state for key in graphed.report().keys]


def test_an_error_of_a_capture_ahead_names_the_arguments_that_were_cut(
    lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    graphed = cgraph.graphed(lambda x, w: x @ w, sizes=[2, 4])
    with pytest.raises(RuntimeError) as raised:
        graphed.capture(fresh(lab, 4, 4), fresh(lab, 4, 4), progress=False)
    notes = " ".join(getattr(raised.value, "__notes__", []))
    assert "x, w were cut or padded" in notes and "dim={'x': 0}" in notes
    caplog.clear()  # torch has logged the error, whose traceback has the function


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
@pytest.mark.parametrize("is_ahead", [False, True])
def test_sizes_follow_a_tensor_that_moves_whoever_captures_them(lab: Lab, is_ahead: bool) -> None:
    box = types.SimpleNamespace(scale=fresh(lab, 4))
    graphed = cgraph.graphed(lambda x: x * box.scale, sizes=[3, 6])

    def require_right(rows: int) -> None:
        x = fresh(lab, rows, 4)
        torch.testing.assert_close(graphed(x), x * box.scale)

    with torch.no_grad():
        for _ in range(3):
            require_right(3)
            box.scale = fresh(lab, 4)
        if is_ahead:
            graphed.capture(fresh(lab, 3, 4), progress=False)
        for rows in (1, 3, 6, 5, 3, 6):
            require_right(rows)
            box.scale = fresh(lab, 4)
