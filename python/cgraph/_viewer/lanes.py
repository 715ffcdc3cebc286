"""The order of a graph's nodes, and the lanes in which independent branches stand side by side."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from cgraph._viewer.nodes import Node

__all__ = ["MOST_LANES", "in_lanes", "ordered"]

MOST_LANES = 16
"""Branches beyond so many at once go below others."""


def ordered(nodes: Sequence[Node]) -> list[Node]:
    """Return nodes in an order that keeps branches and groups together, renumbered.

    Each node comes after those it depends on. If the next one of a branch may come, it does; else
    one of the same group, else the first.

    Args:
        nodes: The nodes; ``depends`` has places among them.
    """
    waits = [len(node.depends) for node in nodes]
    behind: list[list[int]] = [[] for _ in nodes]
    for place, node in enumerate(nodes):
        for before in node.depends:
            behind[before].append(place)
    ready: list[int] = []
    by_path: dict[tuple[str, ...], list[int]] = {}

    def comes(place: int) -> None:
        heapq.heappush(ready, place)
        heapq.heappush(by_path.setdefault(nodes[place].path, []), place)

    for place, count in enumerate(waits):
        if count == 0:
            comes(place)
    done: dict[int, int] = {}
    last: int | None = None
    while ready:
        taken = ready[0] if last is None else _next(last, nodes, behind, waits, by_path, done)
        if taken is None:
            taken = ready[0]
        done[taken] = len(done)
        last = taken
        for place in behind[taken]:
            waits[place] -= 1
            if waits[place] == 0:
                comes(place)
        _forget(ready, done)
        _forget(by_path[nodes[taken].path], done)
    for node in nodes:
        node.depends = sorted(done[before] for before in node.depends)
    return [nodes[place] for place in done]


def in_lanes(nodes: Sequence[Node]) -> int:
    """Give each node its lane, and return how many there are.

    A node goes on in the lane of a node before it that ends there. Another one, as behind a fork,
    goes where all nodes come before it, or opens a lane. So nodes of one lane are in order.

    Args:
        nodes: The nodes in order.
    """
    tails: list[int] = []
    # For each node and lane, how many nodes of the lane come before it or are it: lanes are
    # chains, so that this tells of each node of a lane whether it comes before.
    seen: list[list[int]] = []
    heights: list[int] = []
    for place, node in enumerate(nodes):
        known = [0] * len(tails)
        for before in node.depends:
            for lane, count in enumerate(seen[before]):
                known[lane] = max(known[lane], count)
        ends = [nodes[one].lane for one in node.depends if tails[nodes[one].lane] == one]
        free = [lane for lane, count in enumerate(known) if count == heights[lane]]
        if ends or free:
            node.lane = min(ends or free)
        elif len(tails) < MOST_LANES:
            node.lane = len(tails)
            tails.append(place)
            heights.append(0)
            known.append(0)
        else:
            node.lane = min(range(len(tails)), key=tails.__getitem__)
        tails[node.lane] = place
        heights[node.lane] += 1
        known[node.lane] = heights[node.lane]
        seen.append(known)
    return len(tails)


def _next(
    last: int,
    nodes: Sequence[Node],
    behind: Sequence[Sequence[int]],
    waits: Sequence[int],
    by_path: dict[tuple[str, ...], list[int]],
    done: dict[int, int],
) -> int | None:
    """Return what comes after a node: a ready one behind it, or of its group; None if none is."""
    for place in sorted(behind[last]):
        if waits[place] == 0 and place not in done:
            return place
    same = by_path[nodes[last].path]
    _forget(same, done)
    return same[0] if same else None


def _forget(heap: list[int], done: dict[int, int]) -> None:
    """Take nodes off a heap that have come already."""
    while heap and heap[0] in done:
        heapq.heappop(heap)
