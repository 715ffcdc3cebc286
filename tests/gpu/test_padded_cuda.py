"""What a padded call asks of torch on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import cgraph
from graphed_calls import near

pytestmark = pytest.mark.gpu

SIZES = [4, 8, 64]
ROWS = (3, 64, 8, 5, 1, 40, 4, 63, 7, 2, 33)


def mixed(x: Tensor, ids: Tensor, flags: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(flags[:, None], x * scale, -x) + ids[:, None], ids * 2


def arguments(rows: int) -> tuple[Tensor, ...]:
    ids = torch.randint(0, 100, (rows,), device="cuda")
    return (
        torch.randn(rows, 5, device="cuda"),
        ids,
        torch.randn(rows, device="cuda") > 0,
        torch.randn(1, device="cuda"),
    )


@pytest.mark.parametrize("pad", ["zero", "repeat"])
def test_a_padded_call_needs_no_operator_of_torch(pad: Any) -> None:
    graphed = cgraph.graphed(mixed, sizes=SIZES, pad=pad)
    for rows in ROWS:
        graphed(*arguments(rows))
    given = {rows: [arguments(rows) for _ in range(3)] for rows in ROWS}
    rights = {rows: [mixed(*one) for one in given[rows]] for rows in ROWS}
    torch.cuda.synchronize()
    with torch.profiler.profile(acc_events=True) as profile:
        found = {rows: [_copies(graphed, one) for one in given[rows]] for rows in ROWS}
    copies = len(ROWS) * 3 * 2
    names = [event.name for event in profile.events() or () if event.name.startswith("aten::")]
    assert names.count("aten::clone") == copies
    assert not {"aten::_foreach_copy_", "aten::_foreach_zero_", "aten::expand"} & set(names)
    for rows in ROWS:
        for results, right in zip(found[rows], rights[rows], strict=True):
            assert all(near(*pair) for pair in zip(results, right, strict=True)), rows


def _copies(graphed: Callable[..., Any], given: tuple[Tensor, ...]) -> list[Tensor]:
    return [one.clone() for one in graphed(*given)]
