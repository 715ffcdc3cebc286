"""Groups by module, and the folding of equal layers."""

from __future__ import annotations

from typing import Any

import pytest

from cgraph._viewer.lanes import in_lanes, ordered
from cgraph._viewer.nesting import Fold, Group, nested, numbers_in
from viewed import chain, node


def drawn(item: Any) -> Any:
    """Return groups as names and lists, folds as names and numbers."""
    if isinstance(item, Fold):
        return f"{item.name} x{len(item.repetitions)}"
    return item if isinstance(item, int) else [item.name, *map(drawn, item.items)]


def layers(count: int, *parts: str) -> list[Any]:
    return chain(*((f"M.layers.{i}.{part}", part) for i in range(count) for part in parts))


def test_nodes_are_nested_by_the_path_of_their_module() -> None:
    found = nested(chain(("M.a", "x"), ("M.a.b", "y"), ("M", "z"), ("", "w")))
    assert drawn(found) == ["", ["M", ["a", 0, ["b", 1]], 2], 3]


def test_equal_neighbouring_layers_are_folded_into_one() -> None:
    assert drawn(nested(layers(48, "norm", "mlp"))) == ["", "M.layers.0 … 47 x48"]


def test_a_layer_with_another_operator_is_not_folded() -> None:
    nodes = layers(4, "norm", "mlp")
    nodes[3].shape = "other"
    found = drawn(nested(nodes))
    alone = [[f"{i}", ["norm", 2 * i], ["mlp", 2 * i + 1]] for i in range(2)]
    assert found == ["", ["M.layers", *alone, "2 … 3 x2"]]


def test_numbers_in_names_do_not_tell_layers_apart() -> None:
    nodes = chain(*((f"M.h.{i}", f"gemm_{64 * (i + 1)}x8") for i in range(3)))
    assert drawn(nested(nodes)) == ["", "M.h.0 … 2 x3"]


def test_layers_with_nodes_between_them_are_folded_with_these() -> None:
    nodes = chain(*(one for i in range(5) for one in ((f"M.{i}", "mm"), ("M", "add"))))
    assert drawn(nested(nodes)) == ["", "M.0 … 4, add x5"]


@pytest.mark.parametrize(("count", "is_folded"), [(3, False), (4, True)])
def test_a_few_equal_nodes_stay_and_many_are_folded(count: int, is_folded: bool) -> None:
    items = nested(chain(*[("", "add")] * count)).items
    assert any(isinstance(one, Fold) for one in items) is is_folded


def test_folding_loses_no_node() -> None:
    nodes = layers(7, "norm", "attn", "mlp") + [node("", [20], "loss")] * 9
    assert [*numbers_in(nested(nodes))] == [*range(len(nodes))]


def test_a_group_in_another_lane_knows_what_comes_before_it() -> None:
    fork = [node(), node("a", [0]), node("b", [0]), node("a", [1]), node("b", [2])]
    nodes = ordered([*fork, node("", [3, 4])])
    in_lanes(nodes)
    root = nested(nodes)
    lanes = [one.lane if isinstance(one, Group) else nodes[one].lane for one in root.items]
    assert (drawn(root), lanes) == (["", 0, ["a", 1, 2], ["b", 3, 4], 5], [0, 0, 1, 0])
    assert root.after == {2: [0], 3: [2]}
