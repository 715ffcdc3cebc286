"""The memory that nodes name: which node names it, and whose it is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from cgraph import _core
from cgraph._text import in_units
from cgraph.timeline import Span, Timeline

__all__ = ["Addresses", "Owners"]


class Addresses:
    """The addresses that nodes name, by node.

    Args:
        found: They, as ``Template.addresses()`` returns them.
    """

    def __init__(self, found: Iterable[_core.NodeAddress] = ()) -> None:
        self._of_node = defaultdict[int, list[_core.NodeAddress]](list)
        for one in found:
            self._of_node[one.node].append(one)

    def of(self, node: Mapping[str, Any]) -> Iterator[_core.NodeAddress]:
        """Return the addresses of a node of a template's JSON, and of its graphs' nodes."""
        yield from self._of_node.get(node["handle"], ())
        for body in node.get("bodies") or ():
            for inner in body["nodes"]:
                yield from self.of(inner)


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
