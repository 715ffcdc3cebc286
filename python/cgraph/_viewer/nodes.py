"""The nodes of a drawing, made of a template's data and the labels of its capture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from cgraph import _core, _torch, picture
from cgraph._text import in_units, plural, short_place
from cgraph._viewer.addresses import Addresses, Owners
from cgraph.labels import Label
from cgraph.timeline import Timeline

__all__ = ["FAMILIES", "Family", "Node", "break_node", "nodes_of"]


class Family(NamedTuple):
    """A kind of node in the legend.

    Attributes:
        glyph: A letter in each of its boxes, so that no colour stands alone.
        colour: One that people with colour blindness tell from the others (Okabe and Ito).
    """

    glyph: str
    colour: str


FAMILIES = {
    "attention": Family("A", "#e69f00"),
    "random": Family("?", "#d55e00"),
    "matrix product": Family("*", "#0072b2"),
    "reduction": Family("Σ", "#009e73"),
    "copy, index": Family("→", "#cc79a7"),
    "fill": Family("0", "#999999"),
    "host function": Family("H", "#d55e00"),
    "child graph": Family("G", "#56b4e9"),
    "memory": Family("M", "#56b4e9"),
    "order only": Family("·", "#999999"),
    "elementwise": Family("ƒ", "#f0c419"),
    "break": Family("B", "#d55e00"),
    "inference": Family("I", "#56b4e9"),
    "forward": Family("F", "#0072b2"),
    "backward": Family("R", "#e69f00"),
}
"""The families of nodes of a graph and of a tree."""


@dataclass
class Node:
    """A box of a drawing.

    Attributes:
        title: A short name.
        note: A text beside it, as the line of source.
        family: A key of :data:`FAMILIES`.
        path: The names of the groups around it, the outermost first.
        depends: The places of the nodes before it.
        measures: What its box can be scaled by, by name.
        facts: What a panel says of it: names and texts, in order.
        shape: What is the same in nodes of equal layers.
        lane: Its lane, where nodes are always in order.
    """

    title: str
    note: str
    family: str
    path: tuple[str, ...]
    depends: list[int]
    measures: dict[str, float] = field(default_factory=dict)
    facts: list[tuple[str, str]] = field(default_factory=list)
    shape: str = ""
    lane: int = 0

    def fact(self, name: str) -> str | None:
        """Return what is said under a name; None if nothing is."""
        return dict(self.facts).get(name)


def nodes_of(
    data: Mapping[str, Any],
    labels: Mapping[int, Label],
    addresses: Iterable[_core.NodeAddress] = (),
    timeline: Timeline | None = None,
) -> list[Node]:
    """Return the nodes of a template.

    Args:
        data: Its ``nodes``, each after those it depends on, and ``edges``, as a template's JSON.
        labels: The origins of nodes, by their ``handle``.
        addresses: What its nodes name, as ``Template.addresses()``.
        timeline: The blocks of its pool, which say whose memory an address is.
    """
    before: list[list[int]] = [[] for _ in data["nodes"]]
    for edge in data["edges"]:
        before[edge["to"]].append(edge["from"])
    named, owners = Addresses(addresses), Owners(timeline)
    return [
        _node(one, labels.get(one["handle"]), sorted(set(depends)), [*named.of(one)], owners)
        for one, depends in zip(data["nodes"], before, strict=True)
    ]


def break_node(title: str, depends: list[int]) -> Node:
    """Return the node of a break between segments, which runs eagerly.

    Args:
        title: Its name and the line that called it.
        depends: The places of the nodes before it.
    """
    facts = [("operator", title), ("kind", "break: eager code between two segments")]
    name = title.rpartition(" (")[0] or title
    return Node(name.rpartition(".")[2], "eager", "break", (), depends, {}, facts, "break")


# A graph has the same few kernels again and again.
_short_name = lru_cache(maxsize=4096)(picture.short_name)


@lru_cache(maxsize=4096)
def _family(name: str | None, kind: str) -> str:
    return picture.family({"name": name, "kind": kind})


def _node(
    data: Mapping[str, Any],
    label: Label | None,
    depends: list[int],
    touched: Sequence[_core.NodeAddress],
    owners: Owners,
) -> Node:
    operator = None if label is None else label.operator
    name = operator or data.get("name")
    title = _short_name(name) if name else data["kind"].replace("_", " ")
    if data.get("bodies"):
        title = f"graph of {plural(sum(len(body['nodes']) for body in data['bodies']), 'node')}"
    grid, block = data.get("grid"), data.get("block")
    measures: dict[str, float] = {}
    if grid and block:
        measures["threads"] = prod(grid.values()) * prod(block.values())
    if data.get("bytes") is not None:
        measures["bytes"] = data["bytes"]
    elif touched:
        measures["bytes"] = sum({one.base: one.bytes for one in touched}.values())
    if data.get("seconds") is not None:
        measures["seconds"] = data["seconds"]
    return Node(
        title=title,
        note=(label.source if label and label.source else "").rpartition("/")[2],
        family=_family(data.get("name"), data["kind"]),
        path=_path(label),
        depends=depends,
        measures=measures,
        facts=[*_facts(data, label), *_ranges(data, touched, owners)],
        # The shape says nothing of sizes: layers of different widths are equal.
        shape=f"{operator or ''}|{_short_name(data['name']) if data.get('name') else ''}"
        f"|{data['kind']}",
    )


def _path(label: Label | None) -> tuple[str, ...]:
    """Return the groups around a node: the modules, or outside of them the scopes."""
    if label is None:
        return ()
    if label.module is None:
        return tuple(f"«{scope}»" for scope in label.stack)
    return tuple(label.module.split("."))


def _facts(data: Mapping[str, Any], label: Label | None) -> list[tuple[str, str]]:
    facts: list[tuple[str, str | None]] = []
    if label is not None:
        facts += [("operator", label.operator), ("module", label.module)]
        facts += [("source", label.source), ("labels", " > ".join(label.stack))]
    if name := data.get("name"):
        short, whole = _short_name(name), _torch.demangled(name)
        facts.append(("kernel", whole if short == name else f"{short}\n{whole}"))
    facts += [("kind", data["kind"].replace("_", " ")), ("grid", _dim(data.get("grid")))]
    facts.append(("block", _dim(data.get("block"))))
    if data.get("shared_bytes"):
        facts.append(("shared memory", in_units(data["shared_bytes"])))
    if data.get("bytes") is not None:
        facts.append(("bytes", f"{data['bytes']:,}"))
    if data.get("bodies"):
        facts.append(("contains", "\n".join(_within(data))))
    if label is not None and label.frames:
        lines = [_short_frame(one) for one in reversed(label.frames)]
        facts.append(("frames, innermost first", "\n".join(lines)))
    return [(name, text) for name, text in facts if text]


def _within(data: Mapping[str, Any]) -> list[str]:
    """Return the short names of the nodes in a node's graphs."""
    inner = [one for body in data["bodies"] for one in body["nodes"]]
    return [_short_name(one["name"]) if one.get("name") else one["kind"] for one in inner]


def _short_frame(frame: str) -> str:
    place, _, function = frame.rpartition(" ")
    return f"{short_place(place)} {function}"


def _dim(dim: Mapping[str, int] | None) -> str | None:
    return None if dim is None else " x ".join(f"{one:,}" for one in dim.values())


def _ranges(
    data: Mapping[str, Any],
    touched: Sequence[_core.NodeAddress],
    owners: Owners,
) -> list[tuple[str, str]]:
    """Return the memory that a node names, with its owners where they are known."""
    sides = {data[key]: f"{key} " for key in ("dst", "src", "address") if data.get(key)}
    lines = []
    for one in touched:
        place = f"{one.address:#x} in {in_units(one.bytes)} at {one.base:#x}"
        lines.append(f"{sides.pop(one.address, '')}{place}{owners.of(one.address)}")
    lines += [f"{side}{address:#x}{owners.of(address)}" for address, side in sides.items()]
    return [("memory", "\n".join(lines))] if lines else []
