"""Whether this thread runs a function for the capture of a graphed one, warm-up included."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from cgraph import _core
from cgraph._torch import is_autograds_thread

__all__ = ["busy", "is_busy"]

_here = threading.local()


def is_busy() -> bool:
    """Whether graphed functions that are called now are part of another one.

    On a GPU a backward pass has a thread of autograd's, of which nobody says whose pass it is.
    """
    return getattr(_here, "is_busy", False) or (_core.is_any_busy() and is_autograds_thread())


@contextmanager
def busy() -> Iterator[None]:
    """A ``with`` block in which they are, on this thread."""
    before = getattr(_here, "is_busy", False)
    # Native entries ask only while somebody is.
    _core.enter_busy()
    try:
        _here.is_busy = True
        yield
    finally:
        _here.is_busy = before
        _core.leave_busy()
