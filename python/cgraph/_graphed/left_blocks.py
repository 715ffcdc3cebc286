"""Blocks of a pool that somebody keeps from a capture whose graph is not kept."""

from __future__ import annotations

import gc
import traceback

from cgraph._driver import Driver, Handle

__all__ = ["BlocksBefore", "forget_locals"]


class BlocksBefore:
    """The blocks of a pool that are in use before a capture.

    Args:
        driver: The driver in force.
        pool: The token of the pool.
    """

    def __init__(self, driver: Driver, pool: Handle) -> None:
        self._driver = driver
        self._pool = pool
        self._before = self._in_use()

    def are_left(self) -> bool:
        """Return whether others are in use now, which are no garbage either."""
        if self._in_use() <= self._before:
            return False
        gc.collect()
        return not self._in_use() <= self._before

    def _in_use(self) -> set[tuple[int, int]]:
        return set(self._driver.pool_state(self._pool).blocks)


def forget_locals(error: BaseException) -> None:
    """Let go the locals of all frames that an exception, and those that led to it, came through."""
    found: BaseException | None = error
    while found is not None:
        traceback.clear_frames(found.__traceback__)
        found = found.__cause__ or found.__context__
