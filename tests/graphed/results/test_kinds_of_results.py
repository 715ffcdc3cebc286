"""Kinds of results: nothing, constants, containers, arguments, views, parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import cgraph
from graphed_calls import agree, states
from lab import Lab, fresh


def test_a_function_that_returns_nothing_works_by_its_effects(lab: Lab) -> None:
    def add(x: Tensor, y: Tensor) -> None:
        x += y

    function = cgraph.graphed(add)
    for _ in range(3):
        agree(function, add, fresh(lab, 4), fresh(lab, 4))
    assert states(function) == ["captured"]


def test_constants_and_nested_containers_are_returned_as_they_are(lab: Lab) -> None:
    marker = object()

    def several(x: Tensor) -> Any:
        return (x + 1, "text", 3, None, marker, [], {}, {"a": (x, [x * 2])})

    function = cgraph.graphed(several)
    for _ in range(3):
        x = fresh(lab, 3)
        found = function(x)
        assert found[1:7] == ("text", 3, None, marker, [], {})
        assert_close(found[0], x + 1)
        assert found[7]["a"][0] is x
        assert_close(found[7]["a"][1][0], x * 2)
        del found


def test_a_container_of_the_result_that_the_caller_changes_does_not_come_back_so(lab: Lab) -> None:
    function = cgraph.graphed(lambda x: {"y": [x * 2], "rest": (1, [2])})
    for _ in range(3):
        x = fresh(lab, 3)
        found = function(x)
        assert_close(found["y"][0], x * 2)
        assert found["rest"] == (1, [2])
        found["y"].append(3)
        found["rest"][1].append(4)
        found["more"] = 5
        del found


def test_an_argument_that_is_returned_is_the_callers_own_tensor(lab: Lab) -> None:
    function = cgraph.graphed(lambda x, y: (y, x, x + y))
    for _ in range(3):
        x, y = fresh(lab, 3), fresh(lab, 3)
        found = function(x, y)
        assert found[0] is y
        assert found[1] is x
        assert_close(found[2], x + y)
        del found


def test_a_view_of_an_argument_has_the_values_of_this_call(lab: Lab) -> None:
    function = cgraph.graphed(lambda x: (x * 2, x.t(), x[1:], x.view(-1)))
    for _ in range(3):
        x = fresh(lab, 3, 3)
        assert_close(function(x), (x * 2, x.t(), x[1:], x.view(-1)))


def test_a_view_of_an_argument_that_a_caller_keeps_is_not_overwritten(lab: Lab) -> None:
    function = cgraph.graphed(lambda x: (x.sum(), x.t()))
    x, y = fresh(lab, 3, 3), fresh(lab, 3, 3)
    first = function(x)[1]
    second = function(y)[1]
    assert_close(first, x.t())
    assert_close(second, y.t())


def test_a_parameter_that_is_returned_is_the_parameter_and_so_are_views_of_it(lab: Lab) -> None:
    module = nn.Linear(3, 3, device=lab.device)
    function = cgraph.graphed(lambda x: (module.weight, module.weight[0], module(x)))
    with torch.no_grad():
        for _ in range(3):
            x = fresh(lab, 2, 3)
            found = function(x)
            assert found[0] is module.weight
            assert found[1].data_ptr() == module.weight.data_ptr()
            assert_close(found[2], module(x))
            module.weight.normal_()
            assert_close(found[1], module.weight[0])
            del found


def test_a_tensor_that_is_returned_twice_has_its_values_twice(lab: Lab) -> None:
    def double(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return y, y

    function = cgraph.graphed(double)
    for _ in range(3):
        x = fresh(lab, 3)
        first, second = function(x)
        assert_close((first, second), (x * 2, x * 2))
        first.add_(1)
        assert_close(second, first)
        del first, second


def test_a_tensor_of_the_surroundings_that_is_returned_is_itself(lab: Lab) -> None:
    table = fresh(lab, 4)
    function = cgraph.graphed(lambda x: (x * table, table, table[1:]))
    for _ in range(3):
        x = fresh(lab, 4)
        table.normal_()
        found = function(x)
        assert_close(found, (x * table, table, table[1:]))
        view = table[2:]
        table.normal_()
        assert_close(found[1:], (table, table[1:]))
        assert found[1].data_ptr() == table.data_ptr()
        del found
    assert_close(view, table[2:])


def test_results_that_share_memory_share_it_for_the_caller(lab: Lab) -> None:
    def parts(x: Tensor) -> tuple[Tensor, ...]:
        y = x * 2
        return y, y[1:], y.view(-1), y.t()

    function = cgraph.graphed(parts)
    for _ in range(3):
        agree(function, parts, fresh(lab, 3, 3))


@pytest.mark.parametrize(
    "function", [lambda x: None, lambda x: 3, lambda x: x, lambda x: x[1:], nn.Dropout().eval()]
)
def test_a_function_that_does_nothing_on_the_device_is_as_eager(lab: Lab, function: Any) -> None:
    graphed = cgraph.graphed(function)
    for _ in range(3):
        x = fresh(lab, 4)
        agree(graphed, function, x)
    assert states(graphed) == ["captured"]


def test_a_loop_that_shifts_values_is_told_nothing(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda a, b: (b, a + b))
    a, b = fresh(lab, 3), fresh(lab, 3)
    expected = a.clone(), b.clone()
    for _ in range(40):
        a, b = graphed(a, b)
        expected = expected[1], expected[0] + expected[1]
        assert_close((a, b), expected)
