"""Preparations of captures, once for many, and pools that are closed to captures."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cgraph import _driver, _torch
from cgraph._captures.collector import collections_held_off
from cgraph._captures.footprint import record_memory
from cgraph._captures.turns import Turn
from cgraph._driver import Driver, Pool
from cgraph.errors import StateError

__all__ = ["freeze", "prepare", "prepared", "require_thawed"]

_of_thread = threading.local()
_frozen: set[tuple[Any, ...]] = set()


@contextmanager
def prepared(driver: Driver) -> Iterator[None]:
    """Prepare once for all captures of this thread in a ``with`` block."""
    with Turn(driver, waits=True):
        driver.synchronize()
        gc.collect()
        driver.empty_cache()
    depth: int = getattr(_of_thread, "depth", 0)
    _of_thread.depth = depth + 1
    try:
        with collections_held_off(), record_memory(blocks=False):
            yield
    finally:
        _of_thread.depth = depth


def prepare(driver: Driver, *, waits: bool = False) -> None:
    """Prepare for one capture: in a block of :func:`prepared` only wait, if it must.

    Args:
        driver: The driver in force.
        waits: True if the capture is replayed at once, on another stream than the work before.
    """
    is_prepared = getattr(_of_thread, "depth", 0) > 0
    if waits or not is_prepared:
        driver.synchronize()
    if not is_prepared:
        if _torch.wants_gc():
            gc.collect()
        driver.empty_cache()


def freeze(pool: Pool) -> None:
    """Close a pool of the driver in force to captures."""
    _frozen.add(_name(pool))


def require_thawed(pool: Pool | None) -> None:
    """Raise if a pool is closed to captures."""
    if pool is not None and _frozen and _name(pool) in _frozen:
        raise StateError(
            f"a capture into pool {_name(pool)[1:]}, whose capture_scope(freeze=True) has ended."
            " CUDA graph capturing detected at an inappropriate time. This operation is currently"
            " disabled. Capture inside of that block, or into another pool"
        )


def _name(pool: Any) -> tuple[Any, ...]:
    return _driver.number(), *_driver.token(pool)
