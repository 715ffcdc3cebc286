"""Locks on pools that a capture allocates from; other threads do not wait for them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cgraph._driver import Driver
from cgraph.errors import StateError

__all__ = ["PoolBusyError", "locked_pool", "wait_for_device"]

_lock = threading.Lock()
_claimed: set[tuple[Any, ...]] = set()


class PoolBusyError(StateError):
    """Another thread captures into the pool."""


def wait_for_device(driver: Driver) -> None:
    """Wait for all work of the device.

    Raises:
        PoolBusyError: Another thread captures on the device, which allows no wait then.
    """
    try:
        driver.synchronize()
    except RuntimeError as error:
        if "capturing" not in str(error):
            raise
        raise PoolBusyError("another thread captures on the device: capture later") from error


@contextmanager
def locked_pool(pool: Any) -> Iterator[None]:
    """Let only this thread capture into a pool within a ``with`` block.

    Raises:
        PoolBusyError: Another thread captures into it. Waiting could deadlock: the other thread's
            function may call the one that this thread captures.
    """
    handle = tuple(getattr(pool, "id", pool))
    with _lock:
        if handle in _claimed:
            raise PoolBusyError(
                f"pool {handle} is in use by a capture on another thread: capture into a pool from"
                " one thread at a time"
            )
        _claimed.add(handle)
    try:
        yield
    finally:
        with _lock:
            _claimed.remove(handle)
