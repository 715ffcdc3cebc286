"""Turns at capturing: on one device, one thread at a time captures.

torch's random state and allocator follow one capture of a device, and a thread that prepares a
capture waits for the device, which CUDA forbids while another one is open.
"""

from __future__ import annotations

import threading

from typing_extensions import Self

from cgraph import _driver, _torch
from cgraph._driver import Driver
from cgraph.errors import CaptureError

__all__ = ["Turn"]

_Place = tuple[int, int]
# A collection inside of it may end a capture that was forgotten.
_lock = threading.RLock()
_changed = threading.Condition(_lock)
_waiting = 0
_taken: dict[_Place, list[Turn]] = {}


class Turn:
    """The right of this thread to capture on a driver's current device, until it ends.

    It may be used in a ``with`` statement.

    Args:
        driver: The driver in force.
        waits: True to wait until no other thread has the right.

    Raises:
        CaptureError: Another thread has it, and this one does not wait, or that one has ended.
    """

    def __init__(self, driver: Driver, *, waits: bool = False) -> None:
        global _waiting
        self._is_over = True
        on_gpu = driver.device_type == "cuda"
        ordinal = _torch.current_ordinal() if on_gpu else 0
        self._place = _driver.number(), ordinal
        self._thread = threading.current_thread()
        with _lock:
            while (other := self._other()) is not None:
                if not waits or not other.is_alive():
                    where = f"cuda:{ordinal}" if on_gpu else "the simulator"
                    raise CaptureError(
                        f"a capture while another thread ({other.name}) is capturing on {where}:"
                        " captures of a device come one after another; begin it when that capture"
                        " has ended"
                    )
                _waiting += 1
                try:
                    # A thread may end without a word.
                    _changed.wait(1.0)
                finally:
                    _waiting -= 1
            _taken.setdefault(self._place, []).append(self)
            self._is_over = False

    def end(self) -> None:
        """Let other threads capture, from any thread."""
        if self._is_over:
            return
        with _lock:
            if not self._is_over:
                self._is_over = True
                _taken[self._place].remove(self)
                if _waiting:
                    _changed.notify_all()

    def _other(self) -> threading.Thread | None:
        """Return another thread that captures here."""
        for one in _taken.get(self._place, ()):
            if one._thread is not self._thread:
                return one._thread
        return None

    def __enter__(self) -> Self:
        """Return the turn, which ends with the block."""
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def __del__(self) -> None:
        self.end()
