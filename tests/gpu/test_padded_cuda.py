"""torch calls of a padded call on a GPU."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import cgraph
from cgraph import _core
from cgraph._captures.capture_options import CaptureOptions
from cgraph.errors import ArgumentError
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
    graphed = cgraph.graphed(mixed, sizes=SIZES, pad=pad, dim={"x": 0, "ids": 0, "flags": 0})
    for rows in ROWS * 3:  # each is observed, captured and compared
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


@pytest.mark.parametrize("pad", ["zero", "repeat"])
def test_calls_that_the_first_node_pads_and_others_may_alternate(pad: Any) -> None:
    graphed = cgraph.graphed(
        lambda x, scale: (x * scale, x.sum(0)),
        sizes=[4, 8],
        pad=pad,
        dim={"x": 0},
        check_padding=False,
    )
    for turn in range(4):
        for rows in (3, 8, 7, 3, 5, 8, 6):
            for kind in ("dense", "gaps", "shifted", "dense"):
                width = 10 if kind == "gaps" else 5
                x = torch.randn(rows * width + 1, device="cuda")[kind == "shifted" :]
                x = x[: rows * width].view(rows, width)[:, :5]
                scale = torch.randn(5, device="cuda")
                result, total = graphed(x, scale)
                size = rows if rows == 8 else 4 if rows <= 4 else 8
                last = x[-1] if pad == "repeat" else torch.zeros_like(x[-1])
                assert near(result, x * scale), (rows, kind)
                if turn > 0:  # the first call of a size is not padded
                    assert near(total, x.sum(0) + (size - rows) * last), (rows, kind)
                del result, total


def test_padded_calls_go_on_where_their_graph_comes_back() -> None:
    graphed = cgraph.graphed(lambda x: x * 2 + 1, sizes=[4, 8], max_graphs=1)
    for rows in (3, 7, 3, 2, 8, 4, 7, 3, 5, 1):
        x = torch.randn(rows, 3, device="cuda")
        assert torch.equal(graphed(x), x * 2 + 1), rows
    graphed.reset()
    x = torch.randn(3, 3, device="cuda")
    assert torch.equal(graphed(x), x * 2 + 1)


def test_padding_goes_with_its_function() -> None:
    graphed = cgraph.graphed(lambda x: x * 2, sizes=[4, 8])
    for rows in (3, 7):
        graphed(torch.randn(rows, 3, device="cuda"))
    gone = weakref.ref(graphed)
    del graphed
    gc.collect()
    assert gone() is None


def test_a_padded_graph_says_what_it_was_not_given() -> None:
    graph, x = cgraph.CUDAGraph(), torch.randn(8, 3, device="cuda")
    graph._options = CaptureOptions(statics=(x,))
    with cgraph.graph(graph):
        result = x * 2
    assert graph._captured is not None
    inputs = graph._captured.inputs
    assert inputs is not None
    for rows, of, fill, has_rows, words in (
        (3, 8, "ones", [True], "fill is ones, expected zero or repeat"),
        (9, 8, "zero", [True], "number of rows is 9, expected 1 to 8"),
        (3, 7, "zero", [True], "expected 7 rows of equal bytes"),
        (3, 8, "zero", [True, True], "number of slots is 2, expected 1"),
    ):
        with pytest.raises(ArgumentError, match=words):
            _core.PaddedGraph(graph, inputs, rows, of, fill, has_rows, print)
    del result
