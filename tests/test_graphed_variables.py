"""Results in variables that are assigned again before anybody reads them are not told of."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import cgraph
from graphed_calls import near
from lab import Lab, SimLab, fresh

Calls = Callable[[Any, Lab], None]


def check(found: Tensor, x: Tensor) -> None:
    # Where pytest rewrites an assertion, it reads all variables.
    assert near(found, x * 2)


def item(function: Any, lab: Lab) -> None:
    for _ in range(4):
        x = fresh(lab, 3)
        found = function(x)["all"][0]
        check(found, x)


def item_of_a_variable(function: Any, lab: Lab) -> None:
    for _ in range(4):
        x = fresh(lab, 3)
        results = function(x)
        found = results["all"][0]
        check(found, x)


def wrapped(function: Any, lab: Lab) -> None:
    def run(x: Tensor) -> Any:
        return function(x)

    for _ in range(4):
        x = fresh(lab, 3)
        found = run(x)
        check(found["all"][0], x)


def in_branches(function: Any, lab: Lab) -> None:
    found = None
    for turn in range(6):
        x = fresh(lab, 3)
        if turn % 2:
            found = function(x)["all"][0]
        else:
            found = function(x)["one"]
        check(found, x)


def sampler(function: Any, lab: Lab) -> None:
    state = fresh(lab, 3)
    for _ in range(4):
        noise = function(state)["one"]
        state = state - noise * 0.1


def in_a_block(function: Any, lab: Lab) -> None:
    for _ in range(4):
        with torch.no_grad():
            x = fresh(lab, 3)
            found = function(x)["one"]
            check(found, x)


QUIET = [item, item_of_a_variable, wrapped, in_branches, sampler, in_a_block]


def results(x: Tensor) -> dict[str, Any]:
    return {"one": x * 2, "all": [x * 2, x * 3]}


@pytest.mark.parametrize("on_held", ["warn", "raise"])
@pytest.mark.parametrize("calls", QUIET)
def test_a_result_that_nobody_reads_any_more_is_not_told_of(
    lab: Lab, calls: Calls, on_held: Any
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calls(cgraph.graphed(results, on_held=on_held), lab)


def read_later(function: Any, lab: Lab) -> Any:
    found = function(fresh(lab, 3))["one"]
    other = function(fresh(lab, 3))["one"]
    return found, other


def read_in_the_next_turn(function: Any, lab: Lab) -> None:
    found = None
    for _ in range(3):
        now = function(fresh(lab, 3))["one"]
        if found is not None:
            found.sum()
        found = now


def read_in_a_branch(function: Any, lab: Lab) -> None:
    found = fresh(lab, 3)
    for turn in range(3):
        x = fresh(lab, 3)
        other = function(x)["one"]
        if turn < 5:
            found.sum()
        found = other


def read_by_a_handler(function: Any, lab: Lab) -> None:
    found = None
    for _ in range(3):
        try:
            now = function(fresh(lab, 3))["one"]
            found = now
        except ValueError:
            print(found)


def read_by_a_closure(function: Any, lab: Lab) -> None:
    found = None

    def reads() -> Tensor | None:
        return found

    for _ in range(3):
        now = function(fresh(lab, 3))["one"]
        found = now
    reads()


def read_by_the_callers_caller(function: Any, lab: Lab) -> None:
    def run(x: Tensor) -> Any:
        return function(x)["one"]

    found = run(fresh(lab, 3))
    run(fresh(lab, 3))
    found.sum()


def in_a_list(function: Any, lab: Lab) -> None:
    kept = [function(fresh(lab, 3))["one"] for _ in range(3)]
    kept.clear()


def read_as_all_variables(function: Any, lab: Lab) -> None:
    for _ in range(3):
        found = function(fresh(lab, 3))["one"]
        if locals()["found"] is None:
            return


def read_by_a_handler_of_its_item(function: Any, lab: Lab) -> None:
    found = function(fresh(lab, 3))["one"]
    try:
        found = function(fresh(lab, 3))["missing"]
    except KeyError:
        found.sum()


TOLD = [
    read_by_a_handler_of_its_item,
    read_later,
    read_in_the_next_turn,
    read_in_a_branch,
    read_by_a_handler,
    read_by_a_closure,
    read_by_the_callers_caller,
    in_a_list,
]


@pytest.mark.parametrize("calls", TOLD)
def test_a_result_that_somebody_may_read_is_told_of(lab: Lab, calls: Calls) -> None:
    with pytest.warns(UserWarning, match="still referenced"):
        calls(cgraph.graphed(results), lab)


def test_a_call_of_a_trace_function_leaves_the_variables_of_others(sim: SimLab) -> None:
    function = cgraph.graphed(lambda x: x * 2)
    kept = []

    def traces(frame: Any, event: str, argument: object) -> Any:
        if frame.f_code.co_name == "works" and event == "line":
            kept[:] = [function(fresh(sim, 3))]
        return traces

    def works() -> int:
        total = 0
        for number in range(3):
            total += number
        return total

    before = sys.gettrace()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sys.settrace(traces)
        try:
            total = works()
        finally:
            sys.settrace(before)
    assert total == 3
