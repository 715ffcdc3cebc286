"""The mark of a thread that runs a function for its capture, warm-up included."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from cgraph import _core
from cgraph._torch import is_autograds_thread

__all__ = ["busy", "is_busy"]

_here = threading.local()


def is_busy() -> bool:
    """Return whether graphed functions that are called now are part of another one.

    On a GPU a backward pass runs on autograd's thread, and nothing tells whose pass it is.
    """
    return getattr(_here, "is_busy", False) or (_core.is_any_busy() and is_autograds_thread())


@contextmanager
def busy() -> Iterator[None]:
    """Let graphed functions in a ``with`` block on this thread be part of another one."""
    before = getattr(_here, "is_busy", False)
    # Native entries ask only while some thread is busy.
    _core.enter_busy()
    try:
        _here.is_busy = True
        yield
    finally:
        _here.is_busy = before
        _core.leave_busy()
