"""Results of graphed functions that the graph of another key, in the same pool, may overwrite."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import cgraph
from cgraph.errors import StateError
from cgraph.functions import GraphedFunction
from lab import Lab, fresh


def twice(x: Tensor) -> Tensor:
    return x * 2


def deep(x: Tensor, is_deep: bool) -> Tensor:
    return x.sin().cos().tan() if is_deep else x * 2


def in_one_pool(
    function: Callable[[Tensor], object], x: Tensor
) -> tuple[GraphedFunction, GraphedFunction]:
    """A function that was captured, and ``twice``, which raises if its results are overwritten."""
    pool = cgraph.graph_pool_handle()
    first = cgraph.graphed(function, pool=pool, on_held="ignore")
    first(x)
    return first, cgraph.graphed(twice, pool=pool, on_held="raise")


@pytest.mark.parametrize("sizes", [None, [4]])
def test_a_result_is_kept_from_a_graph_that_was_captured_before_its_own(
    lab: Lab, sizes: list[int] | None
) -> None:
    function = cgraph.graphed(deep, sizes=sizes, on_held="clone")
    function(fresh(lab, 3), True)
    for _ in range(3):
        x = fresh(lab, 3)
        kept = function(x, False)
        function(fresh(lab, 3), True)
        assert torch.equal(kept, x * 2)


def test_a_result_that_another_graph_may_overwrite_is_told_of(lab: Lab) -> None:
    function = cgraph.graphed(deep, on_held="raise")
    function(fresh(lab, 3), True)
    x = fresh(lab, 3)
    kept = function(x, False)
    for _ in range(2):
        with pytest.raises(StateError, match=r"output 0 of deep.*may overwrite it"):
            function(fresh(lab, 3), True)
        assert torch.equal(kept, x * 2)
    del kept
    function(fresh(lab, 3), True)


def test_a_result_is_told_of_whichever_function_of_the_pool_may_overwrite_it(lab: Lab) -> None:
    first, second = in_one_pool(lambda x: deep(x, True), fresh(lab, 3))
    kept = second(fresh(lab, 3))
    with pytest.raises(StateError, match="may overwrite it"):
        first(fresh(lab, 3))
    del kept
    first(fresh(lab, 3))


def test_a_graph_that_only_writes_its_result_overwrites_no_others(lab: Lab) -> None:
    function = cgraph.graphed(twice, on_held="raise")
    function(fresh(lab, 3))
    x, y = fresh(lab, 4), fresh(lab, 5)
    first, second = function(x), function(y)
    for _ in range(40):
        z = fresh(lab, 3)
        assert torch.equal(function(z), z * 2)
    assert torch.equal(first, x * 2) and torch.equal(second, y * 2)


def test_what_another_function_has_left_is_no_matter_of_a_capture(lab: Lab) -> None:
    for rows in (1 << 12, 1 << 16, 1 << 20):
        other = cgraph.graphed(lambda x: deep(x, True), on_held="ignore")
        other(fresh(lab, rows))
        # While its replay may be under way.
        other(fresh(lab, rows))
        del other
        function = cgraph.graphed(twice, on_held="raise")
        function(fresh(lab, 3))
        x = fresh(lab, 4)
        first = function(x)
        for _ in range(40):
            z = fresh(lab, 3)
            assert torch.equal(function(z), z * 2)
        assert torch.equal(first, x * 2)


def test_a_graph_whose_function_keeps_a_tensor_may_overwrite_results_of_others(lab: Lab) -> None:
    seen: set[Tensor] = set()  # nobody notices that it grows

    def keeps(x: Tensor) -> Tensor:
        seen.add(x * 3)
        return x * 2

    first, second = in_one_pool(keeps, fresh(lab, 3))
    seen.clear()
    kept = second(fresh(lab, 3))
    with pytest.raises(StateError, match="may overwrite it"):
        first(fresh(lab, 3))
    del kept


def test_results_of_a_graph_that_overwrites_none_are_told_of_to_one_that_may(lab: Lab) -> None:
    function = cgraph.graphed(deep, on_held="raise")
    function(fresh(lab, 3), True)
    function(fresh(lab, 3), False)
    function(fresh(lab, 3), True)
    kept = function(fresh(lab, 3), False)
    with pytest.raises(StateError, match="may overwrite it"):
        function(fresh(lab, 3), True)
    del kept


@pytest.mark.parametrize("ending", ["reset", "deleted"])
def test_a_result_is_told_of_after_its_graph_is_gone(lab: Lab, ending: str) -> None:
    first, second = in_one_pool(lambda x: deep(x, True), fresh(lab, 3))
    x = fresh(lab, 3)
    kept = second(x)
    if ending == "reset":
        second.reset()
    else:
        del second
        gc.collect()
    for _ in range(2):
        with pytest.raises(StateError, match=r"output 0 of twice.*may overwrite it"):
            first(fresh(lab, 3))
        assert torch.equal(kept, x * 2)
    del kept
    first(fresh(lab, 3))


def test_clone_keeps_a_result_whose_graph_was_captured_anew(lab: Lab) -> None:
    def scaled(x: Tensor, is_deep: bool, scale: Tensor) -> Tensor:
        return deep(x, True) if is_deep else x * scale

    function = cgraph.graphed(scaled, static_argnames="scale", on_held="clone")
    x, scale, other = fresh(lab, 3), fresh(lab, 3), fresh(lab, 3)
    function(x, True, scale)
    kept = function(x, False, scale)
    # Another graph, as the scale lies elsewhere; the one of `kept` is gone.
    again = function(x, False, other)
    assert torch.equal(again, x * other)
    function(fresh(lab, 3), True, scale)
    assert torch.equal(kept, x * scale)
    assert torch.equal(again, x * other)


def test_a_result_that_dies_after_its_graph_is_not_told_of(lab: Lab) -> None:
    first, second = in_one_pool(lambda x: deep(x, True), fresh(lab, 3))
    kept = second(fresh(lab, 3))
    second.reset()
    memory = weakref.ref(kept)
    del kept
    assert memory() is None
    first(fresh(lab, 3))


def test_results_of_graphs_captured_one_after_the_other_can_be_held_together(lab: Lab) -> None:
    function = cgraph.graphed(deep, on_held="raise")
    for _ in range(40):
        x, y = fresh(lab, 3), fresh(lab, 3)
        first = function(x, True)
        second = function(y, False)
        assert torch.equal(first, deep(x, True)) and torch.equal(second, y * 2)
        del first, second


def test_a_variable_that_takes_results_of_one_graph_after_another_is_no_holder(lab: Lab) -> None:
    function = cgraph.graphed(deep, on_held="raise")
    for call in range(80):
        x = fresh(lab, 3)
        result = function(x, call % 3 == 0)
        assert torch.equal(result, deep(x, call % 3 == 0))


def test_a_result_that_is_not_the_pools_hides_nothing_that_a_function_keeps(lab: Lab) -> None:
    seen, table = set[Tensor](), SimpleNamespace(values=fresh(lab, 1 << 16))

    def keeps(x: Tensor) -> tuple[Tensor, Tensor]:
        seen.add(x * 3)
        return x * 2, table.values

    first, second = in_one_pool(keeps, fresh(lab, 3))
    seen.clear()
    kept = second(fresh(lab, 3))
    with pytest.raises(StateError, match="may overwrite it"):
        first(fresh(lab, 3))
    del kept
