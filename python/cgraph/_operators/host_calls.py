"""Calls inside a capture on the simulator that no operator shows, and that a GPU refuses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cgraph._operators.codes import Codes
from cgraph._source import user_line
from cgraph.errors import CaptureError

__all__ = ["HostCalls"]


class HostCalls:
    """The calls of one capture that read tensors on the host or set random states."""

    def __init__(self) -> None:
        self._codes = Codes()
        self._codes.reads = _refuse

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note calls in a block; one that reads a tensor raises.

        Raises:
            CaptureError: On a GPU it would wait for the capturing stream.
        """
        with self._codes.noted():
            yield

    @property
    def refusal(self) -> CaptureError | None:
        """The error of a capture that has set a random state; None if it has set none."""
        if self._codes.seeds is None:
            return None
        return CaptureError(
            "the function seeds random numbers or sets their state, and replays do not: do it"
            f" before the call, or pass random numbers as an argument ({self._codes.seeds})"
        )


def _refuse(method: str) -> None:
    raise CaptureError(
        f"{method} at {user_line()} reads a value from the device while the stream captures: keep"
        " it on the device, or read it after the replay"
    )
