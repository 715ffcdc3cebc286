"""The blocks of torch's caching allocator at one moment."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import Any

import torch

from cgraph._driver import Handle

__all__ = ["Blocks", "addressed"]

_NO_POOL = (0, 0)


def addressed(segment: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the blocks of a segment and their starts; one in the state ``active…`` is in use.

    A block that was freed while other streams may still use it counts as in use.
    """
    start = segment["address"]
    for block in segment["blocks"]:
        yield start, block
        start += block["size"]


class Blocks:
    """A snapshot of the allocator, to look up addresses.

    Args:
        snapshot: A result of ``torch.cuda.memory_snapshot()``, which is called if this is left out.
    """

    def __init__(self, snapshot: list[dict[str, Any]] | None = None) -> None:
        found = torch.cuda.memory_snapshot() if snapshot is None else snapshot
        self._segments = sorted(found, key=lambda segment: int(segment["address"]))
        self._starts = [segment["address"] for segment in self._segments]

    def pool(self, address: int) -> Handle | None:
        """Return the token of an address's pool: (0, 0) outside all pools, None outside torch."""
        segment = self._segment(address)
        if segment is None:
            return None
        first, second = segment.get("segment_pool_id", _NO_POOL)
        return first, second

    def active(self, address: int) -> tuple[int, int] | None:
        """Return start and size of the block around an address, if something is alive in it.

        A block that was freed while other streams may still use it counts as alive.
        """
        segment = self._segment(address)
        if segment is None:
            return None
        for start, block in addressed(segment):
            if start <= address < start + block["size"]:
                return (start, block["size"]) if block["state"].startswith("active") else None
        return None

    def is_active_in_pool(self, address: int) -> bool:
        """Return whether something is alive at an address, in a pool that graphs may share."""
        return self.pool(address) not in (None, _NO_POOL) and self.active(address) is not None

    def _segment(self, address: int) -> dict[str, Any] | None:
        place = bisect.bisect_right(self._starts, address) - 1
        if place < 0:
            return None
        segment = self._segments[place]
        return segment if address < segment["address"] + segment["total_size"] else None
