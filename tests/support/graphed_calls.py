"""Calls of graphed functions, compared with eager ones."""

from __future__ import annotations

import copy
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils import _pytree as pytree

import cgraph
from cgraph.functions import GraphedFunction
from lab import Lab, fresh

__all__ = [
    "Case",
    "Change",
    "Table",
    "agree",
    "alike_after",
    "eager_calls",
    "exchanges",
    "follow_changes",
    "method",
    "misses",
    "near",
    "nothing",
    "numbers",
    "poison",
    "quiet",
    "same_gradients",
    "sets",
    "states",
    "twins_agree",
]

Change = Callable[[], object]
T = TypeVar("T")
CONTAINERS = (dict, list, deque)


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


@dataclass
class Case:
    """A function, changes between its calls, the state that its calls write, and its arguments."""

    function: Callable[..., Any]
    changes: Sequence[Change] = ()
    state: Callable[[], Any] = tuple
    shape: tuple[int, ...] = (2, 3)
    inputs: Callable[[], tuple[Any, ...]] | None = None


class Table(dict[str, Callable[[Lab], Case]]):
    """Cases by the names of the functions that make them."""

    def __call__(self, make: Callable[[Lab], Case]) -> Callable[[Lab], Case]:
        self[make.__name__.replace("_", " ")] = make
        return make


def method(
    make: Callable[[Lab], Any],
    call: Callable[[Any, Tensor], Any],
    changes: Callable[[Any], Sequence[Change]] = lambda one: (),
    state: Callable[[Any], Any] = lambda one: (),
) -> Callable[[Lab], Case]:
    """Return a maker of cases with a method of an object, changes of the object, and its state."""

    def made(lab: Lab) -> Case:
        one = make(lab)
        return Case(MethodType(call, one), changes(one), lambda: state(one))

    return made


def follow_changes(
    graphed: Callable[..., Any],
    eager: Callable[..., Any],
    changes: Sequence[Change],
    inputs: Callable[[], tuple[tuple[Any, ...], tuple[Any, ...]]],
    states: Callable[[], tuple[Any, Any]] = lambda: ((), ()),
    calls: int = 3,
    rtol: float = 0,
) -> None:
    """Compare calls with eager ones, at first and after each change.

    Results, arguments and states must be equal, or near each other with a tolerance. Each result
    is poisoned afterwards, so that the next call must write it anew.
    """

    def call() -> None:
        args, own_args = inputs()
        expected, found = eager(*own_args), graphed(*args)
        alike(found, expected, rtol)
        alike(args, own_args, rtol, check_stride=True)
        alike(*states(), rtol)
        poison(found)

    for change in (nothing, *changes):
        change()
        for _ in range(calls):
            call()


def nothing(*_: object) -> None:
    """Change nothing."""


def alike_after(
    lab: Lab,
    function: Callable[..., Any],
    *changes: Change,
    grad: bool = False,
    shape: tuple[int, ...] = (2, 3),
    calls: int = 3,
    rtol: float = 0,
) -> GraphedFunction:
    """Compare calls with those of the same function, which writes nothing, after each change."""
    graphed = graphed_one(function)

    def inputs() -> tuple[tuple[Tensor], tuple[Tensor]]:
        x = fresh(lab, *shape)
        return (x,), (x.clone(),)

    with torch.set_grad_enabled(grad):
        follow_changes(graphed, eager_one(function), changes, inputs, calls=calls, rtol=rtol)
    return graphed


def twins_agree(
    lab: Lab,
    make: Callable[[Lab], Case],
    *,
    grad: bool = True,
    calls: int = 3,
    rtol: float = 0,
    **options: Any,
) -> GraphedFunction:
    """Compare calls of one case with eager calls of its twin, after the same changes of both."""
    one, other = twice(make, lab)

    def given(case: Case) -> tuple[Any, ...]:
        return case.inputs() if case.inputs else (fresh(lab, *case.shape),)

    graphed = graphed_one(one.function, **options)
    with torch.set_grad_enabled(grad):
        follow_changes(
            graphed,
            eager_one(other.function),
            [partial(together, *pair) for pair in zip(one.changes, other.changes, strict=True)],
            lambda: together(partial(given, one), partial(given, other)),
            lambda: (one.state(), other.state()),
            calls,
            rtol,
        )
    return graphed


def twice(make: Callable[..., T], *args: Any) -> tuple[T, T]:
    """Return two twins: all random numbers in them are the same."""
    return together(partial(make, *args), partial(make, *args))


def together(one: Callable[[], T], other: Callable[[], T]) -> tuple[T, T]:
    """Call both with the same random numbers."""
    seed = int(torch.randint(2**31, ()))
    torch.manual_seed(seed)
    first = one()
    torch.manual_seed(seed)
    return first, other()


def graphed_one(function: Callable[..., Any], **options: Any) -> GraphedFunction:
    """Return the function with graphs, which may be what it is."""
    is_graphed = isinstance(function, GraphedFunction)
    return function if is_graphed else cgraph.graphed(function, **options)


def eager_one(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function without graphs."""
    return function.__wrapped__ if isinstance(function, GraphedFunction) else function


def alike(one: Any, other: Any, rtol: float = 0, check_stride: bool = False) -> None:
    """Require values to be put together alike of equal tensors and of values that read alike."""
    parts, spec = pytree.tree_flatten(one)
    others, its_spec = pytree.tree_flatten(other)
    assert spec == its_spec
    limits: Any = {"rtol": rtol, "atol": 1e-5 if rtol else 0, "check_stride": check_stride}
    for part, its in zip(parts, others, strict=True):
        if isinstance(its, Tensor):
            assert_close(part, its, equal_nan=True, **limits)
        elif not isinstance(its, nn.Module):
            assert type(part) is type(its) and repr(part) == repr(its)


def exchanges(holder: Any, name: Any, times: int = 2) -> list[Change]:
    """Return changes that put other tensors into an attribute or item; the former stay alive."""
    kept: list[Any] = []

    def exchange() -> None:
        has_items = isinstance(holder, CONTAINERS)
        kept.append(holder[name] if has_items else getattr(holder, name))
        sets(holder, name, torch.randn_like(kept[-1]))[0]()

    return [exchange] * times


def sets(holder: Any, name: Any, *values: Any) -> list[Change]:
    """Return changes that give an attribute or item one value after another."""
    put = holder.__setitem__ if isinstance(holder, CONTAINERS) else partial(setattr, holder)
    return [partial(put, name, value) for value in values]


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
