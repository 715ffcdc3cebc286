"""Common parts of the contract tests."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils import _pytree as pytree

import cgraph
from graphed_calls import poison
from lab import Lab, fresh

__all__ = [
    "Box",
    "changed",
    "counted",
    "equal",
    "follow",
    "keys_of",
    "runs_of",
    "setting",
    "states_of",
]


class Box:
    """An object with given attributes."""

    shared: Any = 1.0

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


def equal(one: Any, other: Any) -> None:
    """Require two results to be equal bit for bit, and put together alike."""
    parts, spec = pytree.tree_flatten(one)
    others, its_spec = pytree.tree_flatten(other)
    assert spec == its_spec
    for part, its in zip(parts, others, strict=True):
        if isinstance(its, Tensor):
            assert_close(part, its, rtol=0, atol=0, equal_nan=True)
        else:
            assert type(part) is type(its) and repr(part) == repr(its)


def counted(function: Callable[..., Any]) -> tuple[Callable[..., Any], itertools.count[int]]:
    """Return the function, and a counter of its Python runs, which guards ignore."""
    counter = itertools.count()

    def counting(*args: Any, **kwargs: Any) -> Any:
        next(counter)
        return function(*args, **kwargs)

    return counting, counter


def runs_of(counter: itertools.count[int]) -> int:
    """Return the number of runs of a counted function."""
    return int(repr(counter).removeprefix("count(").removesuffix(")"))


def follow(
    lab: Lab,
    graphed: Callable[[Tensor], Any],
    eager: Callable[[Tensor], Any],
    calls: int = 4,
    shape: tuple[int, ...] = (2, 3),
) -> None:
    """Require a number of calls with fresh numbers to equal eager ones; poison each result."""
    for _ in range(calls):
        x = fresh(lab, *shape)
        expected = eager(x.clone())
        found = graphed(x)
        equal(found, expected)
        with torch.no_grad():
            poison(found)


def keys_of(function: cgraph.GraphedFunction) -> int:
    """Return the number of keys that have a graph."""
    return function.report().captured


def states_of(function: cgraph.GraphedFunction) -> set[str]:
    """Return the states of all keys."""
    return {one.state for one in function.report().keys}


def changed(
    lab: Lab,
    function: Callable[..., Any],
    *changes: Callable[[], object],
    args: Callable[[], tuple[Any, ...]] = tuple,
    **options: Any,
) -> cgraph.GraphedFunction:
    """Require calls to equal eager ones at first and after each change, and to be replays again."""
    counting, counter = counted(function)
    graphed = cgraph.graphed(counting, **options)
    for change in (lambda: None, *changes):
        change()
        for _ in range(4):
            x = fresh(lab, 2, 3)
            expected = function(x.clone(), *args())
            found = graphed(x, *args())
            equal(found, expected)
            found.fill_(77)
        before = runs_of(counter)
        graphed(fresh(lab, 2, 3), *args())
        assert runs_of(counter) == before
    return graphed


def setting(holder: Any, name: str, value: Any) -> Callable[[], None]:
    """Return a function that sets an attribute or an item."""
    if isinstance(holder, dict):
        return lambda: holder.__setitem__(name, value)
    return lambda: setattr(holder, name, value)
