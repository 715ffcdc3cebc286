"""The stream of the last replay of graphs that share memory."""

from __future__ import annotations

from cgraph import _core
from cgraph._driver import Driver

__all__ = ["last_stream"]


def last_stream(driver: Driver) -> _core.LastStream:
    """Return what lets replays on the current device wait for each other."""
    return _core.LastStream(*driver.stream_source(), driver.wait_between)
