"""Changes of functions outside their tensors, and other reads of them."""

from __future__ import annotations

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
from graphed_calls import agree, states
from lab import Lab, fresh

eager_fallback = pytest.mark.filterwarnings("ignore:.*runs eagerly")


def replace_first(items: Any) -> Tensor:
    items[0] = items[0] * 2
    return items[0] + 1


def count_calls(items: Any) -> Tensor:
    items["n"] += 1
    return items["x"] * items["n"]


def add_item(items: Any) -> Tensor:
    items["new"] = items["x"] * 2
    return items["new"] + 1


def drop_nested(items: Any) -> Tensor:
    items["rest"] = None
    return items["x"] * 2


def append(items: Any) -> Tensor:
    items.append(items[0] * 2)
    return items[0] + 1


@eager_fallback
@pytest.mark.parametrize(
    ("function", "make"),
    [
        (replace_first, lambda x: [x]),
        (count_calls, lambda x: {"x": x, "n": 1}),
        (add_item, lambda x: OrderedDict(x=x)),
        (append, lambda x: deque([x])),
        (drop_nested, lambda x: {"x": x, "rest": [x]}),
        (lambda items: items.reverse() or items[0] * 2, lambda x: [x, x + 1]),
    ],
)
def test_a_container_that_the_function_changes_is_changed_for_the_caller(
    lab: Lab, function: Callable[[Any], Tensor], make: Callable[[Tensor], Any]
) -> None:
    graphed = cgraph.graphed(function)
    for _ in range(3):
        x = fresh(lab, 3)
        own, other = make(x.clone()), make(x.clone())
        assert torch.equal(graphed(own), function(other))
        assert str(own) == str(other)
    # Replays assign to items of dictionaries.
    assert set(states(graphed)) == {"captured" if type(own) is dict else "eager"}


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


@eager_fallback
@pytest.mark.parametrize(
    "make",
    [
        lambda: {5},
        lambda: bytearray(b"a"),
        lambda: np.ones(2),
        lambda: types.SimpleNamespace(n=1),
        lambda: Count(1),
    ],
)
def test_a_value_that_the_function_changes_is_changed_once_in_each_call(
    lab: Lab, make: Callable[[], Any]
) -> None:
    graphed = cgraph.graphed(lambda x, value: x * grow(value))
    own, other = make(), make()
    for _ in range(3):
        x = fresh(lab, 3)
        assert torch.equal(graphed(x, own), x * grow(other))
        assert str(own) == str(other)


@eager_fallback
@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.unsqueeze_(0),
        lambda x: x.t_(),
        lambda x: x.resize_(1, 2),
        lambda x: x.set_(torch.ones(2, 2, device=x.device)),
        lambda x: setattr(x, "data", x.data * 2),
    ],
)
def test_an_argument_whose_shape_or_memory_the_function_changes_is_changed_for_the_caller(
    lab: Lab, change: Callable[[Tensor], Any]
) -> None:
    def function(x: Tensor) -> Tensor:
        change(x)
        return x * 2

    graphed = cgraph.graphed(function)
    for _ in range(3):
        x = fresh(lab, 2, 3)
        other = x.clone()
        assert torch.equal(graphed(x), function(other))
        assert x.stride() == other.stride() and torch.equal(x, other)


@pytest.mark.parametrize("write", [lambda x: x.data.add_(1), lambda x: torch._foreach_add_([x], 1)])
def test_writes_that_no_version_counts_reach_the_caller(
    lab: Lab, write: Callable[[Tensor], Any]
) -> None:
    def function(x: Tensor) -> Tensor:
        write(x)
        return x * 2

    graphed = cgraph.graphed(function)
    for _ in range(3):
        agree(graphed, function, fresh(lab, 3))
    assert states(graphed) == ["captured"]


def write_second(a: Tensor, b: Tensor) -> Tensor:
    b.add_(1)
    return a * 2


def write_row(x: Tensor) -> Tensor:
    x[0].add_(1)
    return x * 2


@pytest.mark.parametrize("sizes", [None, [4]])
def test_arguments_that_share_memory_which_is_written_are_read_as_written(
    lab: Lab, sizes: list[int] | None
) -> None:
    graphed = cgraph.graphed(write_second, sizes=sizes)
    for _ in range(3):
        agree(graphed, write_second, fresh(lab, 3), fresh(lab, 3))
        x = fresh(lab, 3)
        other = x.clone()
        assert torch.equal(graphed(x, x), write_second(other, other))
        assert torch.equal(x, other)


@pytest.mark.parametrize("sizes", [None, [4]])
def test_a_view_of_a_buffer_that_is_written_is_read_as_written(
    lab: Lab, sizes: list[int] | None
) -> None:
    class Adder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(4, device=lab.device))

        def forward(self, x: Tensor) -> Tensor:
            x.add_(1)
            return x * self.total.sum()

    own, other = Adder(), Adder()
    graphed = cgraph.graphed(own, sizes=sizes)
    for _ in range(3):
        agree(graphed, other, fresh(lab, 3))
        assert torch.equal(graphed(own.total[:3]), other(other.total[:3]))
        assert torch.equal(own.total, other.total)


@pytest.mark.parametrize(
    "make",
    [lambda x: x[:1].expand(3, 4), lambda x: x.as_strided((3, 2), (1, 1))],
)
def test_a_written_argument_whose_elements_share_memory_is_written_as_in_eager(
    lab: Lab, make: Callable[[Tensor], Tensor]
) -> None:
    graphed = cgraph.graphed(write_row)
    for _ in range(3):
        x = fresh(lab, 3, 4)
        other = x.clone()
        assert torch.equal(graphed(make(x)), write_row(make(other)))
        assert torch.equal(x, other)
    agree(graphed, write_row, fresh(lab, 3, 4))


def test_an_expanded_result_of_arguments_that_share_memory_is_right(lab: Lab) -> None:
    def function(a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        return b.expand(2, -1)

    graphed = cgraph.graphed(function)
    for _ in range(3):
        x = fresh(lab, 3)
        other = x.clone()
        assert torch.equal(graphed(x, x), function(other, other))
        assert torch.equal(x, other)


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
    own, other = (torch.zeros(3, device=lab.device) for _ in range(2))

    def adding(state: Tensor) -> Callable[[Tensor], Tensor]:
        def function(x: Tensor) -> Tensor:
            state.add_(1)
            return x * 1

        return function

    graphed, eager = cgraph.graphed(adding(own)), adding(other)
    for _ in range(3):
        assert torch.equal(graphed(own[:2]), eager(other[:2]))
        assert torch.equal(own, other)


def test_an_argument_beside_what_is_written_in_one_piece_of_memory_is_captured(lab: Lab) -> None:
    own, other = (torch.zeros(16, device=lab.device) for _ in range(2))

    def adding(arena: Tensor) -> Callable[[Tensor], Tensor]:
        def function(x: Tensor) -> Tensor:
            arena[8:].add_(1)
            return x + arena[8:]

        return function

    graphed, eager = cgraph.graphed(adding(own)), adding(other)
    for _ in range(3):
        assert torch.equal(graphed(own[:8]), eager(other[:8]))
        assert torch.equal(own, other)
    assert states(graphed) == ["captured"]


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


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.long(),
        lambda x: (x * 2).half(),
        lambda x: (x + 1).t().reshape(-1),
        lambda x: x.t().contiguous(),
        lambda x: nn.functional.linear(x, x).flatten(),
        lambda x: (x * 2).double().sum(),
    ],
)
def test_operators_that_consist_of_others_are_replayed_in_inference_mode(
    lab: Lab, function: Callable[[Tensor], Tensor]
) -> None:
    graphed = cgraph.graphed(function)
    with torch.inference_mode():
        for _ in range(3):
            x = fresh(lab, 3, 3) * 10
            assert torch.allclose(graphed(x), function(x))


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
    graphed = cgraph.graphed(function)
    for _ in range(3):
        agree(graphed, function, fresh(lab, 2, 3))


def test_an_argument_that_is_written_and_returned_may_be_another_one_too(lab: Lab) -> None:
    def function(a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        return a

    graphed = cgraph.graphed(function, sizes=[4])
    for _ in range(3):
        x = fresh(lab, 3, 2)
        other = x + 1
        assert graphed(x, x) is x and torch.equal(x, other)


def test_warm_up_calls_and_timed_replays_go_no_further_than_the_call(lab: Lab) -> None:
    class Cache(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("rows", torch.zeros(3, 2, device=lab.device))
            self.register_buffer("place", torch.tensor([2], device=lab.device))

        def forward(self, x: Tensor) -> Tensor:
            self.rows.index_copy_(0, self.place, x)
            self.place.add_(1)
            return self.rows * 1

    own, other = Cache(), Cache()
    graphed = cgraph.graphed(own)
    x = fresh(lab, 1, 2)
    with torch.no_grad():
        assert torch.equal(graphed(x), other(x))
        assert own.place.item() == 3
        for cache in (own, other):
            cache.place.fill_(0)
        for _ in range(3):
            x = fresh(lab, 1, 2)
            assert torch.equal(graphed(x), other(x))
    assert states(graphed) == ["captured"]
