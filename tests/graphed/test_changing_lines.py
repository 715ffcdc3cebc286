"""The lines that messages blame for a change of Python's state."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cgraph._python.changing_lines import line_that_changes

state, other = SimpleNamespace(n=0, seen=[]), SimpleNamespace(n=0)
hist: list[int] = []
total = 0


class Counter:
    calls = 0

    def bump(self) -> None:
        self.calls += 1


def reads_first(x: Any, out: Any, counter: Counter) -> None:
    out[0] = x[0] * counter.calls
    counter.bump()


def assigns_another(x: Any) -> Any:
    other.n = 5
    state.n = state.n + 1
    return x * state.n


def calls_an_add(x: Any, torch: Any) -> Any:
    y = x * len(hist) + torch.add(x, 1)
    hist.append(1)
    return y


def has_a_local_of_that_name(x: Any) -> Any:
    global total
    for hist in x:
        hist = hist + 1
    total += 1
    return hist


def sets_items() -> None:
    state.seen[0:1] = [1]


def changes_two(a: Any, b: Any) -> None:
    a.n = 1
    b.n = 2


@pytest.mark.parametrize(
    ("name", "functions", "line"),
    [
        ("counter.calls", [reads_first, Counter.bump], Counter.bump.__code__.co_firstlineno + 1),
        ("state.n", [assigns_another], assigns_another.__code__.co_firstlineno + 2),
        ("hist", [calls_an_add], calls_an_add.__code__.co_firstlineno + 2),
        ("total", [has_a_local_of_that_name], has_a_local_of_that_name.__code__.co_firstlineno + 4),
        ("hist", [has_a_local_of_that_name], None),
        ("state.seen[0]", [sets_items], sets_items.__code__.co_firstlineno + 1),
        ("thing.n", [changes_two], None),
        ("thing.n", [len.__call__], None),
    ],
)
def test_the_line_that_changes_a_place_is_named_or_none(
    name: str, functions: list[Any], line: int | None
) -> None:
    codes = [one.__code__ for one in functions if hasattr(one, "__code__")]
    found = line_that_changes(name, codes)
    assert found == (None if line is None else f"{__file__}:{line}")
