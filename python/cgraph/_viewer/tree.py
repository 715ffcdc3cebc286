"""The recorded calls of graph trees as nodes of a drawing: each box comes after its parent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cgraph._text import in_units, plural
from cgraph._viewer.nesting import Group, Item, finished
from cgraph._viewer.nodes import Node

if TYPE_CHECKING:
    from cgraph._trees.report import TreeNodeReport, TreesReport

__all__ = ["of_trees"]


def of_trees(report: TreesReport) -> tuple[list[Node], Group]:
    """Return the tree nodes of a report, and groups of them.

    A group is a tree, or one of several ways in which steps go on; such ways are lanes.

    Args:
        report: The report.
    """
    nodes, groups = list[Node](), list[Item]()
    for tree in report.trees:
        first = len(nodes)
        calls = tree.nodes
        nodes += [_node(one, first) for one in calls]
        behind: dict[int | None, list[int]] = {}
        for place, one in enumerate(calls):
            behind.setdefault(one.parent, []).append(place)
        name = f"tree of device {tree.device}: {in_units(tree.reserved_bytes)}"
        groups.append(_ways(name, behind.get(None, []), calls, behind, nodes, first, 0))
    return nodes, finished(Group("", groups), nodes)


def _ways(
    name: str,
    starts: Sequence[int],
    calls: Sequence[TreeNodeReport],
    behind: dict[int | None, list[int]],
    nodes: list[Node],
    first: int,
    lane: int,
) -> Group:
    """Return a group of the calls that steps go on with at a place, one after another.

    Args:
        name: Its name.
        starts: The calls that are next.
        calls: All calls of the tree.
        behind: The calls behind each.
        nodes: The nodes, whose lanes are set.
        first: The place of the tree's first node.
        lane: The first lane of the group.
    """
    items = list[Item]()
    while len(starts) == 1:
        nodes[first + starts[0]].lane = lane
        items.append(first + starts[0])
        starts = behind.get(starts[0], [])
    for number, start in enumerate(starts):
        way = f"way {number + 1} of {len(starts)}: {calls[start].function}"
        items.append(_ways(way, [start], calls, behind, nodes, first, lane + number))
    return Group(name, items)


def _node(call: TreeNodeReport, first: int) -> Node:
    facts = [
        ("function", call.function),
        ("kind", f"tree node, {call.mode}"),
        ("replays", f"{call.replays:,}"),
        ("graph", plural(call.nodes, "node")),
        ("held bytes", f"{call.held_bytes:,}"),
        ("copied inputs", f"{call.copied_bytes:,} bytes in each replay"),
    ]
    if call.kept_bytes:
        facts.append(("copied outputs", f"{call.kept_bytes:,} bytes, held at the end of steps"))
    measures: dict[str, float] = {"replays": call.replays, "bytes": call.held_bytes}
    note = f"{plural(call.replays, 'replay')}, {in_units(call.held_bytes)}"
    before = [] if call.parent is None else [first + call.parent]
    shape = f"{call.function}|{call.mode}"
    return Node(call.function, note, call.mode, (), before, measures, facts, shape)
