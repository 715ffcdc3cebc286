"""The stream of the last replay of graphs that share memory."""

from __future__ import annotations

from cgraph import _core, _driver, _torch
from cgraph._driver import Driver

__all__ = ["last_stream"]


def last_stream(driver: Driver) -> _core.LastStream:
    """Return what lets replays on the current device wait for each other."""
    return _core.LastStream(*driver.stream_source(), _wait_for_last)


def _wait_for_last(last: int | None, now: int) -> None:
    """Let a stream wait for the last one, or the host for the device if that one may be gone."""
    if last is None:
        _driver.current().synchronize()
    else:
        _torch.wait_between(last, now)
