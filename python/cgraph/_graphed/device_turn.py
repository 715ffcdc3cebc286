"""The device for one capture of a graphed function; other threads do not wait for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cgraph._captures.turns import Turn
from cgraph._driver import Driver
from cgraph.errors import CaptureError, StateError

__all__ = ["DeviceBusyError", "device_taken", "wait_for_device"]


class DeviceBusyError(StateError):
    """Another thread captures on the device."""


def wait_for_device(driver: Driver) -> None:
    """Wait for all work of the device.

    Raises:
        DeviceBusyError: Another thread captures on the device, which allows no wait then.
    """
    try:
        driver.synchronize()
    except RuntimeError as error:
        if "capturing" not in str(error):
            raise
        raise DeviceBusyError("another thread captures on the device: capture later") from error


@contextmanager
def device_taken(driver: Driver) -> Iterator[None]:
    """Let only this thread capture on the device within a ``with`` block.

    Raises:
        DeviceBusyError: Another thread does. Waiting could deadlock: the other thread's function
            may call the one that this thread captures.
    """
    try:
        mine = Turn(driver)
    except CaptureError as error:
        raise DeviceBusyError(str(error)) from error
    with mine:
        yield
