"""The memory that nodes name: which node names it, and whose it is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, TypeAlias

from cgraph._text import in_units
from cgraph.timeline import Span, Timeline

__all__ = ["NamedAddress", "Owners", "addresses_of"]

NamedAddress: TypeAlias = tuple[str | None, int, int, int]
"""A node's name, an address, and start and bytes of the allocation that it lies in."""


def addresses_of(
    nodes: Sequence[Mapping[str, Any]], found: Sequence[NamedAddress]
) -> list[list[tuple[int, int, int]]]:
    """Return the addresses of each node, and nothing where that is not certain.

    Addresses come in the order of the nodes, with a node's name and not its number. So they are
    known for a node whose neighbours have other names, if all names come in the same order.

    Args:
        nodes: The nodes, as in a template's JSON.
        found: The addresses, as ``Template.addresses()`` returns them.
    """
    known: list[list[tuple[int, int, int]]] = [[] for _ in nodes]
    named = {one[0] for one in found}
    with_some = [place for place, one in enumerate(nodes) if _name(one) in named]
    runs = [list(group) for _, group in groupby(with_some, lambda place: _name(nodes[place]))]
    told = [(name, list(group)) for name, group in groupby(found, lambda one: one[0])]
    if [_name(nodes[run[0]]) for run in runs] != [name for name, _ in told]:
        return known
    for run, (_, ranges) in zip(runs, told, strict=True):
        if len(run) == 1:
            known[run[0]] = [(address, base, size) for _, address, base, size in ranges]
    return known


class Owners:
    """The blocks of a timeline, by address.

    Args:
        timeline: The timeline; None if no blocks were recorded.
    """

    def __init__(self, timeline: Timeline | None) -> None:
        self._spans = defaultdict[int, list[Span]](list)
        for span in () if timeline is None else timeline.spans:
            for part in range(span.address // _PART, (span.address + span.bytes) // _PART + 1):
                self._spans[part].append(span)

    def of(self, address: int) -> str:
        """Return the origins of the blocks at an address, the latest first; empty without any."""
        near = self._spans.get(address // _PART, ())
        here = [one for one in near if one.address <= address < one.address + one.bytes]
        names = [one.label or f"a block of {in_units(one.bytes)}" for one in reversed(here)]
        unique = [*dict.fromkeys(names)]
        more = f" and {len(unique) - 3} more" if len(unique) > 3 else ""
        return f": {', '.join(unique[:3])}{more}" if unique else ""


# Bytes of the parts of memory that blocks are looked for in.
_PART = 1 << 20


def _name(node: Mapping[str, Any]) -> str:
    return str(node.get("name") or node["kind"])
