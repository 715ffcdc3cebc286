"""The times of calls and of replays that reports compare."""

from __future__ import annotations

import time
from collections.abc import Callable

from cgraph._driver import Driver

__all__ = ["replay_seconds", "seconds_of"]

_REPLAYS = 3


def seconds_of(run: Callable[[], object], driver: Driver) -> float:
    """What a call takes, with the work of the device that it enqueues."""
    began = time.perf_counter()
    run()
    driver.synchronize()
    return time.perf_counter() - began


def replay_seconds(
    replay: Callable[[], object], driver: Driver, rewind: Callable[[], object] = bool
) -> float:
    """The same for the fastest of some replays, of which the first may load what others have.

    Args:
        replay: Enqueues one.
        driver: The driver in force.
        rewind: Puts back what the one before has written, so that none goes further than a call.
    """
    seconds = []
    for _ in range(_REPLAYS):
        rewind()
        driver.synchronize()
        seconds.append(seconds_of(replay, driver))
    return min(seconds[1:])
