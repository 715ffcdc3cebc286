"""Blocks of pools that no capture has allocated: a graph may count on what lies there.

They are told apart only while images are recorded, as that costs two snapshots a capture.
"""

from __future__ import annotations

from collections.abc import Iterable

from cgraph import _torch
from cgraph._driver import Handle

__all__ = ["capture_begins", "capture_ended", "eager_blocks"]

_eager: dict[Handle, set[int]] = {}
_after: dict[Handle, set[int]] = {}


def capture_begins(handle: Handle) -> None:
    """Note what was allocated in a pool since the last capture into it."""
    if _torch.records_images():
        own = (handle[0], handle[1])
        now = set(_starts(own))
        if not _torch.take_routed(own):
            # Otherwise a new block may begin where one of a capture did.
            now -= _after.get(own, set())
        _eager.setdefault(own, set()).update(now)


def capture_ended(handle: Handle) -> None:
    """Note what is in use at the end of a capture."""
    if _torch.records_images():
        own = (handle[0], handle[1])
        _after[own] = set(_starts(own))


def eager_blocks(handle: Handle) -> set[int] | None:
    """Return the starts of blocks that no capture has allocated; None if that is not known."""
    return _eager.get((handle[0], handle[1]))


def _starts(handle: Handle) -> Iterable[int]:
    from cgraph._captures import cuda_pools

    return (start for start, _ in cuda_pools.state(handle).blocks)
