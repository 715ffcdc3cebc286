"""Groups of nodes: modules inside of modules, with equal neighbours folded into one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypeAlias

from cgraph._viewer.nodes import Node

__all__ = ["Fold", "Group", "Item", "nested", "numbers_in"]

# So many equal nodes, or sequences of nodes, are folded; of layers, two are enough.
_LEAST_NODES, _LONGEST, _MOST_NAMES = 4, 24, 4


@dataclass
class Group:
    """Items that belong together, as those of a module.

    Attributes:
        name: Its name.
        items: Nodes, by their place, and what contains nodes.
        lane: The first lane of its nodes.
        after: For the place of an item, the places of others in other lanes that come before it.
    """

    name: str
    items: list[Item]
    lane: int = 0
    after: dict[int, list[int]] = field(default_factory=dict)


@dataclass
class Fold:
    """Equal neighbours that are drawn as one.

    Attributes:
        name: Their common name.
        repetitions: Each of them.
        lane: The first lane of their nodes.
    """

    name: str
    repetitions: list[Group]
    lane: int = 0


Item: TypeAlias = "int | Group | Fold"


def nested(nodes: Sequence[Node]) -> Group:
    """Return nodes in groups by their paths, with equal neighbours folded.

    Neighbours are equal if they have the same operators, kernels and parts in the same order;
    numbers in names do not count. A group that has nothing but another one becomes one with it.

    Args:
        nodes: The nodes in order, with their lanes.
    """
    root = Group("", _grouped(range(len(nodes)), 0, nodes))
    return finished(root, nodes)


def finished(root: Group, nodes: Sequence[Node]) -> Group:
    """Fold what is equal in a group, and complete it.

    Args:
        root: The group, whose items are not folded.
        nodes: The nodes in order, with their lanes.
    """
    items, _ = _folded(root, nodes, {})
    folded = Group(root.name, items)
    _complete(folded, nodes)
    return folded


def numbers_in(item: Item) -> Iterator[int]:
    """List the places of the nodes of an item, in order."""
    if isinstance(item, int):
        yield item
    else:
        for one in item.items if isinstance(item, Group) else item.repetitions:
            yield from numbers_in(one)


def _grouped(places: Sequence[int], depth: int, nodes: Sequence[Node]) -> list[Item]:
    def name(place: int) -> str | None:
        path = nodes[place].path
        return path[depth] if len(path) > depth else None

    items: list[Item] = []
    for key, group in groupby(places, name):
        inside = [*group]
        if key is None:
            items += inside
        else:
            items.append(Group(key, _grouped(inside, depth + 1, nodes)))
    return items


def _folded(
    group: Group, nodes: Sequence[Node], shapes: dict[str, int]
) -> tuple[list[Item], list[int]]:
    """Return the items of a group, with equal neighbours folded, and what stood there before.

    Args:
        group: The group.
        nodes: The nodes.
        shapes: Numbers by what equal items have in common; new ones are added.
    """
    parts, keys = list[Item](), list[int]()
    for item in group.items:
        text = ""
        if isinstance(item, int):
            text = _without_numbers(nodes[item].shape)
        elif isinstance(item, Group):
            inside, known = _folded(item, nodes, shapes)
            text = f"{_without_numbers(item.name)}({known})"
            item = _merged(item.name, inside)
        keys.append(shapes.setdefault(text, len(shapes)))
        parts.append(item)
    items, place = list[Item](), 0
    while place < len(parts):
        length, count = _repeats(parts, keys, place)
        if count == 1:
            items.append(parts[place])
        else:
            cut = [parts[place + i * length : place + (i + 1) * length] for i in range(count)]
            names = [[_name(one, nodes) for one in cut[i]] for i in (0, -1)]
            name = _listed([_common_name(*pair) for pair in zip(*names, strict=True)])
            items.append(Fold(name, [_repetition(one, nodes) for one in cut]))
        place += length * count
    return items, keys


def _merged(name: str, items: list[Item]) -> Item:
    """Return items as a group, or as their only group under both names."""
    only = items[0]
    if len(items) > 1 or isinstance(only, int):
        return Group(name, items)
    only.name = f"{name}.{only.name}"
    return only


def _repeats(parts: Sequence[Item], keys: Sequence[int], place: int) -> tuple[int, int]:
    """Return the length of a sequence that begins at a place, and how often it stands there."""
    for length in range(1, min(_LONGEST, (len(keys) - place) // 2) + 1):
        first = keys[place : place + length]
        count = 1
        while keys[place + count * length : place + (count + 1) * length] == first:
            count += 1
        has_group = any(not isinstance(one, int) for one in parts[place : place + length])
        if count >= (2 if has_group else _LEAST_NODES):
            return length, count
    return 1, 1


def _repetition(items: list[Item], nodes: Sequence[Node]) -> Group:
    """Return one of several equal sequences as a group."""
    only = items[0]
    if len(items) == 1 and isinstance(only, Group):
        return only
    return Group(_listed([_name(one, nodes) for one in items]), items)


def _name(item: Item, nodes: Sequence[Node]) -> str:
    return nodes[item].title if isinstance(item, int) else item.name


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST_NAMES]) + (", …" if len(names) > _MOST_NAMES else "")


def _without_numbers(text: str) -> str:
    return re.sub(r"\d+", "#", text)


def _common_name(first: str, last: str) -> str:
    """Return one name for the equal items from one to another, as ``layers.0 … 11``."""
    if first == last:
        return first
    same = 0
    while same < min(len(first), len(last)) and first[same] == last[same]:
        same += 1
    # A number is not cut in two.
    while same > 0 and first[same - 1].isdigit():
        same -= 1
    return f"{first} … {last[same:]}"


def _complete(item: Group | Fold, nodes: Sequence[Node]) -> None:
    """Find the lanes of an item and its parts, and what comes after what in other lanes."""
    parts = item.items if isinstance(item, Group) else item.repetitions
    for one in parts:
        if not isinstance(one, int):
            _complete(one, nodes)
    lanes = [nodes[one].lane if isinstance(one, int) else one.lane for one in parts]
    item.lane = min(lanes, default=0)
    if isinstance(item, Fold) or len(set(lanes)) < 2:
        return
    owner = {node: place for place, one in enumerate(parts) for node in numbers_in(one)}
    for node, place in owner.items():
        for before in nodes[node].depends:
            other = owner.get(before, place)
            known = item.after.setdefault(place, [])
            if other != place and lanes[other] != lanes[place] and other not in known:
                known.append(other)
    item.after = {place: sorted(known) for place, known in item.after.items() if known}
