"""The garbage collector, and the captures that it must not disturb."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collections_held_off", "gc_frozen"]

_lock = threading.Lock()
# The number of open blocks, and the state of the collector before the first one.
_blocks = 0
_was_enabled = False


@contextmanager
def collections_held_off() -> Iterator[None]:
    """Keep collections from starting by themselves in a ``with`` block, on any thread.

    A collection might take a graph or a pool of torch's; CUDA frees it, and that ends all captures.
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
    """Hide existing objects from the garbage collector: captures make many new ones."""
    if gc.get_freeze_count():
        # Other code froze objects that we would thaw; Python 3.12 does so when it starts.
        with collections_held_off():
            yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
