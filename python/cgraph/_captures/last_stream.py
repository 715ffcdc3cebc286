"""The stream of the last replay of graphs that share memory."""

from __future__ import annotations

import torch

from cgraph import _core, _driver, _torch
from cgraph._driver import Driver

__all__ = ["last_stream"]


def last_stream(driver: Driver) -> _core.LastStream | None:
    """Return what lets replays on the current device wait for each other; None on the simulator.

    There, replays are driven to their end.
    """
    if driver.device_type != "cuda":
        return None
    ordinal = torch.cuda.current_device()
    device, source = _core.Device.cuda(ordinal), _torch.current_stream_source()
    return _core.LastStream(device, source, ordinal, _wait_for_last)


def _wait_for_last(last: int | None, now: int) -> None:
    """Let a stream wait for the last one, or the host for the device if that one may be gone."""
    if last is None:
        _driver.current().synchronize()
    else:
        _torch.wait_between(last, now)
