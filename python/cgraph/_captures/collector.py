"""The garbage collector, and the captures that it must not disturb."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collections_held_off", "gc_frozen"]

_lock = threading.Lock()
# How many blocks there are, and whether the collector was enabled before the first one.
_blocks = 0
_was_enabled = False


@contextmanager
def collections_held_off() -> Iterator[None]:
    """A ``with`` block in which no collection starts by itself, on any thread.

    It might take a graph or a pool of torch's, which CUDA frees, and that ends all captures.
    """
    global _blocks, _was_enabled
    with _lock:
        if _blocks == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _blocks += 1
    try:
        yield
    finally:
        with _lock:
            _blocks -= 1
            if _blocks == 0 and _was_enabled:
                gc.enable()


@contextmanager
def gc_frozen() -> Iterator[None]:
    """Let the garbage collector leave alone what there is: captures make many objects."""
    if gc.get_freeze_count():
        # Somebody froze what we would thaw; so does Python 3.12 when it starts.
        with collections_held_off():
            yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
