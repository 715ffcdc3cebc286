"""Whether a function draws on from where the random state is, or sets it, which replays do not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cgraph import _driver
from cgraph.errors import CaptureError

__all__ = ["Drawing"]


class Drawing:
    """What calls before a capture do to the random state.

    Args:
        driver: The driver in force.
    """

    def __init__(self, driver: _driver.Driver) -> None:
        self._driver = driver
        self._steps: list[int] = []

    @contextmanager
    def call(self) -> Iterator[None]:
        """A ``with`` block with one call.

        Raises:
            CaptureError: It has set the state.
        """
        before = self._driver.random_place()
        yield
        now = self._driver.random_place()
        if before is None or now is None:
            return
        if now[0] != before[0] or now[1] < before[1]:
            raise _is_set()
        self._steps.append(now[1] - before[1])

    def require_no_more(self, drawn: int | None) -> None:
        """Refuse a capture that draws more than the last call: that has put the state back.

        Args:
            drawn: How far a replay moves the offset; None where that is not known.

        Raises:
            CaptureError: It does.
        """
        # A first call may do what later ones do not.
        if drawn is not None and len(self._steps) > 1 and self._steps[-1] < drawn:
            raise _is_set()


def _is_set() -> CaptureError:
    return CaptureError(
        "the function seeds a generator or sets its state, and replays do not: do it before the"
        " call, or pass random numbers as an argument"
    )
