"""The contract, "Results": each test quotes its sentence."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import cgraph
from cgraph.errors import EagerWarning, ResultWarning
from contract_calls import Box, equal, follow, states_of
from graphed_calls import numbers, quiet
from graphed_objects import Own
from lab import Lab, fresh


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "one": lambda x: x * 2,
    "tuple": lambda x: (x * 2, x + 1),
    "nested": lambda x: {"a": [x * 2, (x - 1,)], "n": 3, "t": "text"},
    "transposed": lambda x: (x * 2).t(),
    "view of a part": lambda x: (x * 2)[1:, :2],
    "strided": lambda x: torch.empty_strided(x.shape, (7, 2), device=x.device).copy_(x),
    "expanded": lambda x: (x[0] * 2).expand(4, -1),
    "channels last": lambda x: x.reshape(1, *x.shape, 1).contiguous(
        memory_format=torch.channels_last
    ),
    "half": lambda x: x.half(),
    "bool": lambda x: x > 0,
    "complex": lambda x: torch.complex(x, x),
    "empty": lambda x: (x[:0] * 2, x * 2),
    "scalar": lambda x: x.sum(),
}


@pytest.mark.parametrize("outputs", ["fresh", "static"])
@pytest.mark.parametrize("case", FUNCTIONS)
def test_results_are_what_eager_returns(lab: Lab, case: str, outputs: str) -> None:
    """**Results** are the caller's own."""
    graphed = cgraph.graphed(FUNCTIONS[case], outputs=outputs)
    for _ in range(4):
        x = fresh(lab, 3, 3)
        equal(graphed(x), FUNCTIONS[case](x))
    assert states_of(graphed) == {"captured"}


@pytest.mark.parametrize("case", FUNCTIONS)
def test_results_that_a_caller_keeps_and_writes_are_its_own(lab: Lab, case: str) -> None:
    """… `outputs="fresh"` (default) fills new memory by the graph's last node."""
    graphed = cgraph.graphed(FUNCTIONS[case])
    kept: list[tuple[Any, Any]] = []
    for _ in range(6):
        x = fresh(lab, 3, 3)
        kept.append((graphed(x), FUNCTIONS[case](x)))
    for found, expected in kept:
        equal(found, expected)
    follow(lab, graphed, FUNCTIONS[case], shape=(3, 3))


@pytest.mark.parametrize("case", ["one", "transposed", "channels last", "scalar", "half"])
def test_results_are_laid_out_as_clone_would_lay_them_out(lab: Lab, case: str) -> None:
    """… as `.clone()` would give them."""
    graphed = cgraph.graphed(FUNCTIONS[case])
    for _ in range(4):
        x = fresh(lab, 3, 3)
        found, like = graphed(x), FUNCTIONS[case](x).clone()
        assert (found.stride(), found.shape, found.dtype) == (like.stride(), like.shape, like.dtype)
        assert type(found) is type(like) and found.is_leaf and not found.requires_grad


def test_of_a_padded_result_are_cut(lab: Lab) -> None:
    """… rows cut."""
    graphed = cgraph.graphed(lambda x: x * 2, sizes=[4])
    for rows in (4, 4, 3, 2, 1, 3):
        x = fresh(lab, rows, 3)
        found = graphed(x)
        equal(found, x * 2)
        found.fill_(77)


def test_results_that_share_memory_share_it(lab: Lab) -> None:
    """… results that share memory share it."""

    def function(x: Tensor) -> tuple[Tensor, ...]:
        y = x * 2
        return y, y[1:], y.t(), y, x + 1

    graphed = cgraph.graphed(function)
    for _ in range(5):
        x = fresh(lab, 3, 3)
        found = graphed(x)
        equal(found, function(x))
        found[0].zero_()
        equal(found[1], torch.zeros_like(found[1]))
        equal(found[2], torch.zeros_like(found[2]))
        assert found[3].data_ptr() == found[0].data_ptr()
        equal(found[4], x + 1)


def test_aliases_of_what_was_there_before_the_call_are_returned_as_such(lab: Lab) -> None:
    """… aliases of what was there before the call are returned as such."""
    box = Box(table=torch.zeros(3, 3, device=lab.device))
    graphed = cgraph.graphed(lambda x: (box.table.add_(x), box.table[1:], x))
    twin = box.table.clone()
    for _ in range(5):
        x = fresh(lab, 3, 3)
        whole, part, given = graphed(x)
        twin.add_(x)
        assert given is x
        assert whole.data_ptr() == box.table.data_ptr()
        assert part.data_ptr() == box.table[1:].data_ptr()
        equal((whole, part), (twin, twin[1:]))


def test_a_view_of_an_argument_is_returned_as_such(lab: Lab) -> None:
    """… aliases of what was there before the call are returned as such."""
    graphed = cgraph.graphed(lambda x: (x[1:], x * 2))
    for _ in range(5):
        x = fresh(lab, 3)
        part, _ = graphed(x)
        x.fill_(5.0)
        equal(part, x[1:])


def test_results_of_subclasses_are_the_callers_own(lab: Lab) -> None:
    """… subclasses cost a launch more."""
    graphed = cgraph.graphed(lambda x: (x * 2).as_subclass(Own))
    kept = []
    for _ in range(5):
        x = fresh(lab, 3)
        found = graphed(x)
        assert type(found) is Own
        kept.append((found, x * 2))
    for found, expected in kept:
        equal(found.as_subclass(Tensor), expected)
    assert states_of(graphed) == {"captured"}


def test_a_function_with_a_result_on_the_host_runs_eagerly(lab: Lab) -> None:
    """… host results run eagerly."""
    if lab.device == "cpu":
        function: Callable[[Tensor], Any] = lambda x: (x * 2).sum().item()  # noqa: E731
    else:
        function = lambda x: (x * 2).cpu()  # noqa: E731
    graphed = cgraph.graphed(function)
    with quiet() as caught:
        for _ in range(6):
            x = fresh(lab, 3)
            equal(graphed(x), function(x))
    assert [one.category for one in caught] == [EagerWarning]
    assert states_of(graphed) == {"eager"}


def test_static_results_are_overwritten_by_the_next_call_of_who_shares_the_pool(lab: Lab) -> None:
    """`outputs="static"`: they lie in the graph's memory; the next call … overwrites them."""
    graphed = cgraph.graphed(lambda x: x * 2, outputs="static")
    for _ in range(2):
        graphed(fresh(lab, 3))
    first = graphed(torch.ones(3, device=lab.device))
    equal(first, torch.full_like(first, 2.0))
    address = first.data_ptr()
    del first
    second = graphed(torch.zeros(3, device=lab.device))
    assert second.data_ptr() == address
    equal(second, torch.zeros_like(second))


def test_a_static_result_of_the_call_before_last_that_still_lives_warns_once(lab: Lab) -> None:
    """… if the one of the call before last still lives, one warning names its line."""
    graphed = cgraph.graphed(lambda x: x * 2, outputs="static")
    held = []
    with quiet() as caught:
        for _ in range(8):
            held.append(graphed(fresh(lab, 3)))  # this line
    assert [one.category for one in caught] == [ResultWarning]
    assert "test_contract_results.py" in str(caught[0].message)


def test_a_static_result_that_is_let_go_in_time_does_not_warn(lab: Lab) -> None:
    """… if the one of the call before last still lives."""
    graphed = cgraph.graphed(lambda x: x * 2, outputs="static")
    before = None
    for _ in range(8):
        x = fresh(lab, 3)
        now = graphed(x)
        equal(now, x * 2)
        before = now
    assert before is not None and numbers(graphed) == (1, 7, 1)


def test_replays_look_at_no_frame_of_a_caller(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """No frame of a caller is looked at."""
    graphed = cgraph.graphed(lambda x: x * 2)
    for _ in range(3):
        graphed(fresh(lab, 3))

    def refuse(*_: Any) -> Any:
        raise AssertionError("a frame was looked at")

    for module, name in ((sys, "_getframe"), (gc, "get_referrers"), (sys, "getrefcount")):
        monkeypatch.setattr(module, name, refuse)
    x = fresh(lab, 3)
    held = graphed(x)
    other = graphed(x + 1)
    monkeypatch.undo()
    equal((held, other), (x * 2, (x + 1) * 2))


def test_a_result_of_a_break_that_is_returned_is_the_callers_own(lab: Lab) -> None:
    """Results are the caller's own."""
    doubled = cgraph.eager_break(lambda x: x * 2)
    graphed = cgraph.graphed(lambda x: doubled(x))
    given = [fresh(lab, 3) for _ in range(5)]
    found = [graphed(x) for x in given]
    for x, one in zip(given, found, strict=True):
        equal(one, x * 2)
    assert states_of(graphed) == {"captured"}
