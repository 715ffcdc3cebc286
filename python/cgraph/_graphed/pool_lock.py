"""Pools that a capture is under way in, for which other threads do not wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cgraph.errors import StateError

__all__ = ["PoolBusyError", "locked_pool"]

_lock = threading.Lock()
_claimed: set[tuple[Any, ...]] = set()


class PoolBusyError(StateError):
    """Another thread captures into the pool."""


@contextmanager
def locked_pool(pool: Any) -> Iterator[None]:
    """A ``with`` block in which only this thread captures into a pool.

    Raises:
        PoolBusyError: Another one does. To wait could be to wait for each other: its function may
            call the one that this thread captures.
    """
    handle = tuple(getattr(pool, "id", pool))
    with _lock:
        if handle in _claimed:
            raise PoolBusyError(
                f"pool {handle} is being captured into by another thread: capture into a pool from"
                " one thread at a time"
            )
        _claimed.add(handle)
    try:
        yield
    finally:
        with _lock:
            _claimed.remove(handle)
