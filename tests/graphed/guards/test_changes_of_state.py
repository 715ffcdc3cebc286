"""Changes of functions outside their tensors, and other reads of them."""

from __future__ import annotations

import itertools
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import cgraph
from graphed_calls import Case, Table, agree, alike_after, nothing, states, twins_agree
from lab import Lab, fresh

eager_fallback = pytest.mark.filterwarnings("ignore:.*runs eagerly")


def replace_first(items: Any) -> Tensor:
    items[0] = items[0] * 2
    return items[0] + 1  # type: ignore[no-any-return]


def count_calls(items: Any) -> Tensor:
    items["n"] += 1
    return items["x"] * items["n"]  # type: ignore[no-any-return]


def add_item(items: Any) -> Tensor:
    items["new"] = items["x"] * 2
    return items["new"] + 1  # type: ignore[no-any-return]


def drop_nested(items: Any) -> Tensor:
    items["rest"] = None
    return items["x"] * 2  # type: ignore[no-any-return]


def append(items: Any) -> Tensor:
    items.append(items[0] * 2)
    return items[0] + 1  # type: ignore[no-any-return]


def turn(items: Any) -> Tensor:
    items.reverse()
    return items[0] * 2  # type: ignore[no-any-return]


def after(change: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    """Return a function that changes its argument first."""

    def function(x: Tensor) -> Tensor:
        change(x)
        return x * 2

    return function


def expand(a: Tensor, b: Tensor) -> Tensor:
    a.add_(1)
    return b.expand(2, -1, -1)


def alone(x: Tensor) -> tuple[Any, ...]:
    return (x,)


def with_list(x: Tensor) -> tuple[Any, ...]:
    return x, [1, 2]


# Functions that change arguments; these, made of a tensor; and the state of their keys, if certain.
CHANGES: dict[str, tuple[Callable[..., Any], Callable[[Tensor], tuple[Any, ...]], str | None]] = {
    "another first item of a list": (replace_first, lambda x: ([x],), "eager"),
    "a count of calls in a dictionary": (count_calls, lambda x: ({"x": x, "n": 1},), "captured"),
    "a new item of a subclass of a dictionary": (add_item, lambda x: (OrderedDict(x=x),), "eager"),
    "one more item of a deque": (append, lambda x: (deque([x]),), "eager"),
    "an item of a dictionary less": (drop_nested, lambda x: ({"x": x, "rest": [x]},), "captured"),
    "another order of a list": (turn, lambda x: ([x, x + 1],), "eager"),
    "one more number of a list": (lambda x, some: some.append(1) or x * 2, with_list, None),
    "a number of a list less": (lambda x, some: some.pop() and x * 2, with_list, None),
    "an empty list": (lambda x, some: some.clear() or x * 2, with_list, None),
    "one more dimension": (after(lambda x: x.unsqueeze_(0)), alone, None),
    "another layout": (after(lambda x: x.t_()), alone, None),
    "another size": (after(lambda x: x.resize_(1, 2)), alone, None),
    "other memory": (after(lambda x: x.set_(torch.ones(2, device=x.device))), alone, None),
    "other data": (after(lambda x: setattr(x, "data", x.data * 2)), alone, None),
    "a write that no version counts": (after(lambda x: x.data.add_(1)), alone, "captured"),
    "a write of many": (after(lambda x: torch._foreach_add_([x], 1)), alone, "captured"),
    "a write into what is expanded": (expand, lambda x: (x, x), None),
}


@eager_fallback
@pytest.mark.parametrize("what", CHANGES)
def test_a_caller_gets(lab: Lab, what: str) -> None:
    function, make, state = CHANGES[what]
    graphed = twins_agree(lab, lambda lab: Case(function, inputs=lambda: make(fresh(lab, 2, 3))))
    assert state is None or set(states(graphed)) == {state}


@dataclass
class Count:
    n: int = 0


def grow(value: Any) -> int:
    """Change a value; return its size then."""
    if isinstance(value, set):
        value.add(len(value))
        return len(value)
    if isinstance(value, bytearray):
        value[0] += 1
        return value[0]
    if isinstance(value, np.ndarray):
        value += 1
        return int(value.sum())
    value.n += 1
    return int(value.n)


VALUES: dict[str, Callable[[], Any]] = {
    "a set": lambda: {5},
    "a bytearray": lambda: bytearray(b"a"),
    "an array": lambda: np.ones(2),
    "a namespace": lambda: types.SimpleNamespace(n=1),
    "a dataclass": lambda: Count(1),
}


@eager_fallback
@pytest.mark.parametrize("kind", VALUES)
def test_each_call_changes_once(lab: Lab, kind: str) -> None:
    def growing(lab: Lab) -> Case:
        value = VALUES[kind]()
        return Case(lambda x, value: x * grow(value), inputs=lambda: (fresh(lab, 3), value))

    twins_agree(lab, growing)


ALIASES = Table()


def add_to_second(a: Tensor, b: Tensor) -> Tensor:
    b.add_(1)
    return a * 2


@ALIASES
def two_arguments_that_share_memory_at_times(lab: Lab) -> Case:
    is_shared = itertools.cycle([False, True])

    def inputs() -> tuple[Tensor, Tensor]:
        x = fresh(lab, 3)
        return x, x if next(is_shared) else fresh(lab, 3)

    return Case(add_to_second, inputs=inputs)


class Adder(nn.Module):
    def __init__(self, lab: Lab) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4, device=lab.device))

    def forward(self, x: Tensor) -> Tensor:
        x.add_(1)
        return x * self.total.sum()


@ALIASES
def a_view_of_a_buffer_at_times(lab: Lab) -> Case:
    net, is_view = Adder(lab), itertools.cycle([False, True])

    def inputs() -> tuple[Tensor]:
        return (net.total[:3] if next(is_view) else fresh(lab, 3),)

    return Case(net, state=lambda: net.total, inputs=inputs)


@pytest.mark.parametrize("sizes", [None, [4]])
@pytest.mark.parametrize("which", ALIASES)
def test_what_is_written_is_read_as_written_in(
    lab: Lab, which: str, sizes: list[int] | None
) -> None:
    twins_agree(lab, ALIASES[which], calls=6, sizes=sizes)


def write_row(x: Tensor) -> Tensor:
    x[0].add_(1)
    return x * 2


@pytest.mark.parametrize(
    "make",
    [lambda x: x[:1].expand(3, 4), lambda x: x.as_strided((3, 2), (1, 1))],
)
def test_a_written_argument_whose_elements_share_memory_is_written_as_in_eager(
    lab: Lab, make: Callable[[Tensor], Tensor]
) -> None:
    def sharing(lab: Lab) -> Case:
        memory: list[Tensor] = []

        def inputs() -> tuple[Tensor]:
            memory[:] = [fresh(lab, 3, 4)]
            return (make(*memory),)

        return Case(write_row, state=lambda: memory, inputs=inputs)

    agree(twins_agree(lab, sharing), write_row, fresh(lab, 3, 4))


@pytest.mark.parametrize("sizes", [None, [4]])
def test_a_result_that_is_handed_back_to_be_written_does_not_spoil_the_next_one(
    lab: Lab, sizes: list[int] | None
) -> None:
    def function(x: Tensor) -> Tensor:
        x.add_(1)
        return x * 2

    graphed = cgraph.graphed(function, sizes=sizes)
    own = fresh(lab, 3)
    other = own.clone()
    for _ in range(4):
        own, other = graphed(own), function(other)
        assert torch.equal(own, other)


@dataclass(frozen=True)
class Scale:
    by: float


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (complex(0.0, 0.0), complex(-0.0, 0.0)),
        (np.float64(0.0), np.float64(-0.0)),
        (Scale(0.0), Scale(-0.0)),
        (Scale(1), Scale(1.0)),
        (slice(0, 1), slice(0, True)),
        (frozenset({1}), frozenset({True})),
        ({1: 2}, {True: 2}),
    ],
)
def test_values_that_are_equal_and_not_the_same_have_a_graph_each(
    lab: Lab, one: object, two: object
) -> None:
    graphed = cgraph.graphed(lambda x, value: (x * 2, str(value)))
    for _ in range(3):
        for value in (one, two):
            assert graphed(fresh(lab, 2), value)[1] == str(value)
    assert states(graphed) == ["captured"] * 2


def test_a_size_is_a_size_as_an_argument_and_as_a_result(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda x, size: (x * size.numel(), type(size), x.shape))
    for _ in range(3):
        x = fresh(lab, 2, 3)
        result, kind, shape = graphed(x, x.shape)
        assert torch.equal(result, x * 6)
        assert kind is torch.Size and type(shape) is torch.Size


@eager_fallback
def test_an_argument_in_the_memory_of_state_that_is_written_is_read_as_written(lab: Lab) -> None:
    def adding(lab: Lab) -> Case:
        state = torch.zeros(3, device=lab.device)

        def function(x: Tensor) -> Tensor:
            state.add_(1)
            return x * 1

        return Case(function, state=lambda: state, inputs=lambda: (state[:2],))

    twins_agree(lab, adding)


def test_an_argument_beside_what_is_written_in_one_piece_of_memory_is_captured(lab: Lab) -> None:
    def adding(lab: Lab) -> Case:
        arena = torch.zeros(16, device=lab.device)

        def function(x: Tensor) -> Tensor:
            arena[8:].add_(1)
            return x + arena[8:]

        return Case(function, state=lambda: arena, inputs=lambda: (arena[:8],))

    assert states(twins_agree(lab, adding)) == ["captured"]


@eager_fallback
@pytest.mark.parametrize(
    "make", [lambda: {1}, lambda: bytearray(b"a"), lambda: np.ones(2), lambda: iter([1, 2])]
)
def test_a_result_that_can_change_is_a_new_one_in_each_call(
    lab: Lab, make: Callable[[], Any]
) -> None:
    graphed = cgraph.graphed(lambda x: (x * 2, make()))
    found = [graphed(fresh(lab, 2))[1] for _ in range(3)]
    assert len({id(one) for one in found}) == 3
    assert [list(one) for one in found] == [list(make())] * 3


COMPOSED: dict[str, Callable[[Tensor], Tensor]] = {
    "of whole numbers": lambda x: x.long(),
    "of half precision": lambda x: (x * 2).half(),
    "of another shape": lambda x: (x + 1).t().reshape(-1),
    "of another layout": lambda x: x.t().contiguous(),
    "of a layer": lambda x: nn.functional.linear(x, x).flatten(),
    "of double precision": lambda x: (x * 2).double().sum(),
}


@pytest.mark.parametrize("what", COMPOSED)
def test_inference_mode_replays_results(lab: Lab, what: str) -> None:
    def composed(lab: Lab) -> Case:
        return Case(COMPOSED[what], inputs=lambda: (fresh(lab, 3, 3) * 10,))

    with torch.inference_mode():
        twins_agree(lab, composed)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x.detach().unsqueeze_(0), x * 2),
        lambda x: (x.view(x.shape).t_(), x * 2),
        lambda x: (x[:1].squeeze_(0), x * 2),
    ],
)
def test_a_view_that_the_function_reshapes_is_returned_in_its_new_shape(
    lab: Lab, function: Callable[[Tensor], Any]
) -> None:
    alike_after(lab, function, grad=True)


def test_an_argument_that_is_written_and_returned_may_be_another_one_too(lab: Lab) -> None:
    def function(a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        return a

    graphed = cgraph.graphed(function, sizes=[4])
    for _ in range(3):
        x = fresh(lab, 3, 2)
        other = x + 1
        assert graphed(x, x) is x and torch.equal(x, other)


class Cache(nn.Module):
    def __init__(self, lab: Lab) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(3, 2, device=lab.device))
        self.register_buffer("place", torch.tensor([2], device=lab.device))

    def forward(self, x: Tensor) -> Tensor:
        self.rows.index_copy_(0, self.place, x)
        self.place.add_(1)
        return self.rows * 1


def test_warm_up_calls_and_timed_replays_go_no_further_than_the_call(lab: Lab) -> None:
    def caching(lab: Lab) -> Case:
        cache = Cache(lab)
        # The next call would write behind the last row.
        changes = [lambda: cache.place.fill_(0), nothing, nothing]
        return Case(cache, changes, lambda: [*cache.buffers()], shape=(1, 2))

    graphed = twins_agree(lab, caching, grad=False, calls=1)
    assert states(graphed) == ["captured"]
