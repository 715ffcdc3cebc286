"""The garbage collector, and the captures that it must not disturb."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collections_held_off", "gc_frozen"]

# A collection inside of it may end a block that was forgotten.
_lock = threading.RLock()
# The number of open blocks, and the state of the collector before the first one.
_blocks = 0
_was_enabled = False


class collections_held_off:
    """A block in which no collection starts by itself, on any thread.

    A collection might take a graph or a pool of torch's; CUDA frees it, and that ends all captures.
    """

    _is_open = False

    def __enter__(self) -> None:
        """Turn the collector off."""
        global _blocks, _was_enabled
        with _lock:
            _blocks += 1
            self._is_open = True
            if _blocks == 1:
                _was_enabled = gc.isenabled()
                gc.disable()

    def __exit__(self, *_: object) -> None:
        """Turn it on again if it was on and no other block is open."""
        global _blocks
        if not self._is_open:
            return
        with _lock:
            _blocks -= 1
            self._is_open = False
            if _blocks == 0 and _was_enabled:
                gc.enable()

    def __del__(self) -> None:
        """End a block that was entered and forgotten."""
        self.__exit__()


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
