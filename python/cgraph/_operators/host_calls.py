"""Calls inside a capture on the simulator that no operator shows, and that a GPU refuses."""

from __future__ import annotations

from cgraph._operators.codes import Codes
from cgraph._source import user_line
from cgraph.errors import CaptureError

__all__ = ["HostCalls"]


class HostCalls(Codes):
    """The calls of one capture that set random states; one that reads a tensor on the host raises."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = _refuse

    @property
    def refusal(self) -> CaptureError | None:
        """The error of a capture that has set a random state; None if it has set none."""
        if self.seeds is None:
            return None
        return CaptureError(
            "the function seeds random numbers or sets their state, and replays do not: do it"
            f" before the call, or pass random numbers as an argument ({self.seeds})"
        )


def _refuse(method: str) -> None:
    raise CaptureError(
        f"{method} at {user_line()} reads a value from the device while the stream captures: keep"
        " it on the device, or read it after the replay"
    )
