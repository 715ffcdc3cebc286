"""Calls of graphed functions, compared with eager ones."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils import _pytree as pytree

import cgraph
from cgraph.functions import GraphedFunction
from lab import Lab, fresh

__all__ = [
    "agree",
    "alike_after",
    "eager_calls",
    "misses",
    "near",
    "numbers",
    "poison",
    "quiet",
    "same_gradients",
    "states",
]


def agree(function: GraphedFunction, eager: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Call both with arguments of the same contents; results and arguments must be equal.

    The result of the graphed one is poisoned afterwards, so that the next call must write it anew.
    """
    own_args, own_kwargs = copy.deepcopy((args, kwargs))
    expected = eager(*own_args, **own_kwargs)
    found = function(*args, **kwargs)
    assert_close(found, expected, equal_nan=True, rtol=0, atol=0)
    tensors = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    wanted = [one for one in pytree.tree_leaves((own_args, own_kwargs)) if isinstance(one, Tensor)]
    assert_close(tensors, wanted, equal_nan=True, rtol=0, atol=0)
    poison(found)


def alike_after(
    lab: Lab,
    function: Callable[[Tensor], Tensor],
    *changes: Callable[[], object],
    grad: bool = False,
) -> None:
    """Compare calls with eager ones, bit by bit, at first and after each change."""
    graphed = cgraph.graphed(function)
    with torch.set_grad_enabled(grad):
        for change in (lambda: None, *changes):
            change()
            for _ in range(3):
                x = fresh(lab, 2, 3)
                assert_close(graphed(x).clone(), function(x), rtol=0, atol=0)


def poison(result: Any) -> None:
    """Overwrite the tensors of a result with values that no function of the tests computes."""
    with torch.no_grad():
        for one in pytree.tree_leaves(result):
            if isinstance(one, Tensor) and one.numel() and not one.is_leaf:
                one.fill_(77)
            elif isinstance(one, Tensor) and one.numel() and not one.requires_grad:
                one.fill_(77)


def states(function: GraphedFunction) -> list[str]:
    """Return the state of each key, the first one first."""
    return [key.state for key in function.report().keys]


@contextmanager
def misses() -> Iterator[list[GraphedFunction]]:
    """Collect the functions whose calls no native entry served."""
    seen: list[GraphedFunction] = []
    original = GraphedFunction._miss

    def counting(self: GraphedFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seen.append(self)
        return original(self, args, kwargs)

    GraphedFunction._miss = counting  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        GraphedFunction._miss = original  # type: ignore[method-assign]


def near(one: Tensor, other: Tensor) -> bool:
    """Return whether two results are equal but for the order of sums."""
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-4, atol=1e-5)


@contextmanager
def quiet() -> Iterator[list[warnings.WarningMessage]]:
    """Collect warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def numbers(function: Any) -> tuple[int, int, int]:
    """Return the numbers of keys with a graph, of replays, and of eager calls."""
    report = function.report()
    return report.captured, report.replays, eager_calls(function)


def eager_calls(function: Any) -> int:
    """Return the number of eager calls."""
    return sum(key.eager_calls for key in function.report().keys)


def same_gradients(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    """Return whether the parameters of two modules have about the same gradients."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(
        second.grad is None
        if first.grad is None
        else second.grad is not None and near(first.grad, second.grad)
        for first, second in pairs
    )
