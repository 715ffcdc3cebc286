"""The order of nodes and their lanes, for random graphs and for forks of streams."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

from cgraph._viewer.lanes import MOST_LANES, in_lanes, ordered
from cgraph._viewer.nodes import Node
from viewed import chain, node

FORK = [node(), node("", [0]), node("", [0]), node("", [1]), node("", [2]), node("", [3, 4])]


@pytest.fixture(params=range(20))
def nodes(request: pytest.FixtureRequest) -> list[Node]:
    seed = request.param * 2**32 + int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}")  # pytest shows it if the test fails
    chance = random.Random(seed)
    made: list[Any] = []
    for place in range(chance.randrange(1, 120)):
        before = sorted({chance.randrange(place) for _ in range(chance.randrange(3)) if place})
        made.append(node(f"m{chance.randrange(4)}", before, str(place)))
    return made


def ancestors(nodes: list[Node]) -> list[set[int]]:
    found: list[set[int]] = []
    for one in nodes:
        found.append({*one.depends}.union(*(found[before] for before in one.depends)))
    return found


def test_each_node_comes_after_those_it_depends_on(nodes: list[Node]) -> None:
    before = {one.shape: {nodes[other].shape for other in one.depends} for one in nodes}
    found = ordered(nodes)
    for place, one in enumerate(found):
        assert all(other < place for other in one.depends)
        assert {found[other].shape for other in one.depends} == before[one.shape]
    assert len(found) == len(before)


def test_nodes_of_one_lane_are_always_in_order(nodes: list[Node]) -> None:
    found = ordered(nodes)
    count = in_lanes(found)
    above = ancestors(found)
    for place, one in enumerate(found):
        same = [other for other in range(place) if found[other].lane == one.lane]
        assert count == MOST_LANES or {*same} <= above[place]


def test_a_node_goes_on_in_the_lane_of_the_node_that_ends_there() -> None:
    found = ordered(chain(("", "a"), ("", "b"), ("", "c")))
    assert (in_lanes(found), [one.lane for one in found]) == (1, [0, 0, 0])


def test_a_branch_stays_in_its_lane_where_a_lower_one_is_free() -> None:
    forked = [node(), node("", [0]), node("", [0]), node("", [0])]
    joined = [node("", [1, 2]), node("", [4]), node("", [4, 3])]
    nodes = [*forked, *joined]
    in_lanes(nodes)
    assert [one.lane for one in nodes] == [0, 0, 1, 2, 0, 0, 2]


def test_a_fork_opens_a_lane_that_a_join_frees() -> None:
    again = [node("", [5]), node("", [5]), node("", [6, 7])]
    found = ordered([*FORK, *again])
    assert in_lanes(found) == 2
    assert [one.lane for one in found] == [0, 0, 0, 1, 1, 0, 0, 1, 0]


def test_branches_that_never_join_have_lanes_of_their_own() -> None:
    found = ordered([node(), node("", [0]), node(), node("", [2])])
    assert [one.lane for one in found if in_lanes(found)] == [0, 0, 1, 1]


def test_a_branch_is_not_torn_by_nodes_of_another_one() -> None:
    captured = [node(), node("a", [0]), node("b", [0]), node("a", [1]), node("b", [2])]
    assert [one.path for one in ordered(captured)] == [(), ("a",), ("a",), ("b",), ("b",)]


def test_so_many_branches_at_once_do_not_make_a_wall() -> None:
    assert in_lanes([node() for _ in range(MOST_LANES + 5)]) == MOST_LANES
