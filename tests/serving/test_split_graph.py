"""`split_graph`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from cgraph._piecewise.split import operator_name
from cgraph.errors import ArgumentError, CgraphWarning
from cgraph.piecewise import SplitItem, split_graph
from served import graph_of


def splitting(items: list[SplitItem]) -> list[bool]:
    return [item.is_splitting_graph for item in items]


def test_each_call_of_an_operator_is_a_part_by_itself() -> None:

    def body(x: Tensor) -> Tensor:
        x = (x + 1).cos()
        x = torch.ops.served.routed(x) * 2
        return torch.ops.served.routed(x)

    x = torch.randn(4)
    graph = graph_of(body, x)
    whole, items = split_graph(graph, ["served::routed"])
    assert splitting(items) == [False, True, False, True]
    assert [item.graph_id for item in items] == [0, 1, 2, 3]
    assert [item.submod_name for item in items] == [f"submod_{number}" for number in range(4)]
    assert torch.equal(whole(x)[0], body(x))
    # The graph that was given stays as it is.
    assert torch.equal(graph(x)[0], body(x))


@pytest.mark.parametrize(
    "op",
    [
        "served::routed",
        "served.routed",
        torch.ops.served.routed,
        torch.ops.served.routed.default,
        "served.routed.default",
    ],
)
@pytest.mark.parametrize("trace", [graph_of, lambda body, x: make_fx(body)(x)])
def test_an_operator_is_found_by_each_of_its_names(op: Any, trace: Any) -> None:
    def body(x: Tensor) -> Tensor:
        return torch.ops.served.routed(x * 2) + 1

    _, items = split_graph(trace(body, torch.randn(4)), [op])
    assert splitting(items) == [False, True, False]


@pytest.mark.parametrize(
    "op",
    ["torch.nn.functional.softmax", torch.nn.functional.softmax, "softmax"],
)
def test_a_function_of_torchs_is_found_by_each_of_its_names(op: Any) -> None:
    def body(x: Tensor) -> Tensor:
        return torch.nn.functional.softmax(x * 2, dim=0) + 1

    _, items = split_graph(graph_of(body, torch.randn(4)), [op])
    assert splitting(items) == [False, True, False]


def test_calls_stay_in_their_order_with_their_writes() -> None:
    def body(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        before = y + 1
        y.add_(5)
        z = torch.ops.served.routed(y)
        y.mul_(3)
        after = y + 1
        z.sub_(after)
        return before + torch.ops.served.routed(z), y

    x = torch.randn(8)
    whole, items = split_graph(graph_of(body, x), ["served::routed"])
    assert len(items) == 5
    for one, other in zip(whole(x), body(x), strict=True):
        assert torch.equal(one, other)


def test_more_than_ten_parts_are_in_the_order_of_their_numbers() -> None:

    def body(x: Tensor) -> Tensor:
        for _ in range(8):
            x = torch.ops.served.routed(x) + 1
        return x

    x = torch.randn(4)
    whole, items = split_graph(graph_of(body, x), ["served::routed"])
    numbers = [item.graph_id for item in items]
    assert numbers == sorted(numbers)
    assert len(items) == 16
    assert all(torch.equal(one, other) for one, other in zip(whole(x), (body(x),), strict=True))


def test_items_of_a_result_stay_with_the_call_that_made_it() -> None:

    def body(x: Tensor) -> Tensor:
        first, second = torch.ops.served.mixed(x)
        y = first * 2
        low, high = y.chunk(2)
        return low + high + second

    x = torch.randn(4, 3)
    whole, items = split_graph(graph_of(body, x), ["served::mixed"])
    assert splitting(items) == [True, False]
    # Between parts there are tensors, and no sequences.
    calls = [node for node in items[0].graph.graph.nodes if node.op == "call_function"]
    assert len(calls) == 3
    assert torch.equal(whole(x)[0], body(x))


def test_a_tensor_is_indexed_after_the_writes_before() -> None:
    """Only items of a sequence belong to the call that returned it."""

    def last(x: Tensor, cache: Tensor, places: Tensor) -> Tensor:
        y = x * 2
        out = torch.zeros_like(y)
        torch.ops.served.attend(y, cache, out)
        return out[places] * 3

    def late(x: Tensor, cache: Tensor, places: Tensor) -> Tensor:
        y = torch.ops.served.routed(x)
        part = y[:, :2]
        y.add_(1)
        return y[places + 1] * part.sum()

    for body, op in ((last, "served::attend"), (late, "served::routed")):
        inputs = torch.randn(4, 3), torch.zeros(4, 3), torch.tensor([0, 2])
        whole, items = split_graph(graph_of(body, *inputs), [op])
        assert sum(splitting(items)) == 1
        names = {node.target: place for place, node in enumerate(_placeholders(whole))}
        given = [inputs[{"L_x_": 0, "L_cache_": 1, "L_places_": 2}[name]] for name in names]
        assert torch.equal(whole(*given)[0], body(*inputs))


def _placeholders(graph: torch.fx.GraphModule) -> list[torch.fx.Node]:
    return [node for node in graph.graph.nodes if node.op == "placeholder"]


def test_operators_have_the_same_name_in_each_process() -> None:
    ops = [torch.ops.aten.add, torch.ops.aten.add.Tensor, torch.cumsum, torch.Tensor.cumsum]
    names = ["aten.add", "aten.add.Tensor", "torch.cumsum", "torch.Tensor.cumsum"]
    assert [operator_name(one) for one in ops] == names
    assert operator_name(torch.nn.functional.softmax) == "torch.nn.functional.softmax"
    graph = make_fx(lambda x: (x * 2 + 1).cos())(torch.randn(4))
    _, items = split_graph(graph, [torch.ops.aten.add])
    assert splitting(items) == [False, True, False]
    _, items = split_graph(
        graph_of(lambda x: (x * 2).cumsum(0) + 1, torch.randn(4)), [torch.Tensor.cumsum]
    )
    assert splitting(items) == [False, True, False]


def test_calls_that_follow_each_other_are_one_part_where_that_is_asked_for() -> None:
    def body(x: Tensor) -> Tensor:
        x = torch.ops.served.routed(torch.ops.served.routed(x * 2))
        return torch.ops.served.routed(x + 1)

    x = torch.randn(4)
    graph = graph_of(body, x)
    _, items = split_graph(graph, ["served::routed"])
    assert splitting(items) == [False, True, True, False, True]
    whole, items = split_graph(graph, ["served::routed"], merge=True)
    assert splitting(items) == [False, True, False, True]
    assert torch.equal(whole(x)[0], body(x))


def test_an_operator_that_does_not_occur_is_named_with_the_nearest() -> None:
    graph = graph_of(lambda x: torch.ops.served.routed(x) + 1, torch.randn(4))
    with pytest.warns(CgraphWarning, match=r"served\.router; the nearest names in it are serv"):
        _, items = split_graph(graph, ["served::router"])
    assert splitting(items) == [False]
    with pytest.raises(ArgumentError, match="a splitting operator is 5, expected an operator"):
        split_graph(graph, [5])
