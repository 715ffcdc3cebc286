"""What goes wrong in a graphed function: whose error comes out, and that the next call works."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import cgraph
from cgraph.errors import ArgumentError
from lab import Lab, fresh


@pytest.mark.parametrize("fn", [3, "f", [fresh]])
def test_what_cannot_be_called_cannot_be_graphed(fn: Any) -> None:
    with pytest.raises(ArgumentError, match="expected a function"):
        cgraph.graphed(fn)
    with pytest.raises(ArgumentError, match="expected a function"):
        cgraph.graphed()(fn)


def test_a_graphed_function_is_not_graphed_again(lab: Lab) -> None:
    function = cgraph.graphed(torch.sin)
    with pytest.raises(ArgumentError, match="graphed already"):
        cgraph.graphed(function)


def test_an_option_that_does_not_exist_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="size"):
        cgraph.graphed(torch.sin, size=[1])


def test_a_call_inside_a_capture_becomes_part_of_it(lab: Lab) -> None:
    function = cgraph.graphed(lambda x: x * 3)
    x = fresh(lab, 4)
    for is_known in (False, True):
        graph = cgraph.CUDAGraph()
        with cgraph.graph(graph):
            y = function(x) + 1
        x.normal_()
        graph.replay()
        assert_close(y, x * 3 + 1)
        if not is_known:
            function(x)
    replays = function.report().replays
    graph.replay()
    assert function.report().replays == replays


def test_a_graphed_function_that_is_known_stays_quiet_in_anothers_warm_up(lab: Lab) -> None:
    inner = cgraph.graphed(lambda x: x.sin())
    inner(fresh(lab, 4))
    outer = cgraph.graphed(lambda x: inner(x) + inner(x * 2), on_fail="raise")
    for _ in range(2):
        x = fresh(lab, 4)
        assert_close(outer(x), x.sin() + (x * 2).sin())


def test_graphs_before_a_failed_capture_of_a_ladder_serve_calls(lab: Lab) -> None:
    def picky(x: Tensor) -> Tensor:
        if x.shape[0] == 2:
            raise ValueError("two are not enough")
        return x * 2

    graphed = cgraph.graphed(picky, sizes=[1, 2, 4, 8])
    with pytest.raises(ValueError, match="two are not enough"):
        graphed.capture(fresh(lab, 8, 2))
    graphed.freeze()
    for rows in (8, 4):
        x = fresh(lab, rows, 2)
        assert torch.equal(graphed(x), x * 2)


@pytest.mark.parametrize("is_explicit", [True, False])
@pytest.mark.parametrize("options", [{}, {"on_fail": "raise"}, {}, {"sizes": [4]}])
def test_what_a_function_raises_comes_out_with_what_it_came_from(
    lab: Lab, options: dict[str, Any], is_explicit: bool
) -> None:
    def load(x: Tensor) -> Tensor:
        try:
            raise KeyError("missing weight")
        except KeyError as error:
            if is_explicit:
                raise ValueError("cannot load") from error
            raise ValueError("cannot load")  # noqa: B904

    function = cgraph.graphed(load, **options)
    with pytest.raises(ValueError, match="cannot load") as caught:
        function(fresh(lab, 3))
    assert isinstance(caught.value.__context__, KeyError)
    assert isinstance(caught.value.__cause__, KeyError if is_explicit else type(None))
    assert caught.value.__suppress_context__ == is_explicit
