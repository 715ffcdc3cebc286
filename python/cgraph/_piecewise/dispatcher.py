"""The choice of a graph for a batch."""

from __future__ import annotations

import bisect
import enum
from collections.abc import Collection, Iterable
from typing import NamedTuple

from cgraph.errors import ArgumentError, StateError

__all__ = ["BatchKey", "Dispatcher", "RuntimeMode"]


class RuntimeMode(enum.Enum):
    """The way in which a batch runs: uncaptured, in captured pieces, or as one graph."""

    NONE = 0
    PIECEWISE = 1
    FULL = 2


class BatchKey(NamedTuple):
    """A kind of batch that has graphs.

    Attributes:
        size: The padded size.
        fields: What else distinguishes batches: the number of requests, whether all are as long,
            adapters. Pieces do not depend on it, and have none.
    """

    size: int
    fields: tuple[object, ...] | None = None


class Dispatcher:
    """A table of the graphs of a server, which chooses one for each batch.

    Args:
        sizes: The sizes that are captured; a batch is padded to the next of them.
        compile_sizes: The sizes that are compiled for by themselves.

    Raises:
        ArgumentError: A size is no number, at least 1, or a size that is compiled for is padded to
            another one, so that no batch ever has it.

    >>> from cgraph.piecewise import Dispatcher, RuntimeMode
    >>> table = Dispatcher([1, 2, 4, 8])
    >>> table.add(RuntimeMode.PIECEWISE, 4)
    >>> table.add(RuntimeMode.FULL, 4, ("decode", 4))
    >>> table.freeze()
    >>> table.dispatch(3, ("decode", 4))[0].name, table.dispatch(3, ("decode", 3))[0].name
    ('FULL', 'PIECEWISE')
    >>> table.padded(3), table.padded(0), table.padded(9)
    (4, 0, None)
    """

    def __init__(self, sizes: Iterable[int], compile_sizes: Iterable[int] = ()) -> None:
        self._sizes = sorted(set(sizes))
        for one in self._sizes:
            if type(one) is not int or one < 1:
                raise ArgumentError(f"sizes has {one!r:.80}, expected numbers, each at least 1")
        for one in compile_sizes:
            if (padded := self.padded(one)) not in (one, None):
                raise ArgumentError(
                    f"compile_sizes has {one}, which batches are padded from to {padded}: add it"
                    " to sizes, or leave it out"
                )
        self._keys: dict[RuntimeMode, set[BatchKey]] = {one: set() for one in RuntimeMode}
        self._is_frozen = False

    def __repr__(self) -> str:
        """Return the sizes, and how many keys each way of running has."""
        keys = ", ".join(f"{len(found)} {one.name}" for one, found in self._keys.items() if found)
        state = ", frozen" if self._is_frozen else ""
        return f"<cgraph.Dispatcher: sizes {self._sizes}, keys: {keys or 'none'}{state}>"

    def padded(self, size: int) -> int | None:
        """Return the size that a batch is padded to; None if it is beyond all sizes."""
        if size == 0:
            return 0
        place = bisect.bisect_left(self._sizes, size)
        return self._sizes[place] if place < len(self._sizes) else None

    def add(self, mode: RuntimeMode, size: int, fields: tuple[object, ...] | None = None) -> None:
        """Note that there is a graph, or are pieces, for a kind of batch.

        Args:
            mode: The way of running.
            size: The padded size.
            fields: What else the batch must equal. Pieces fit any.

        Raises:
            StateError: The table is frozen.
            ArgumentError: The size is none that batches are padded to, or the mode is ``NONE``.
        """
        if self._is_frozen:
            raise StateError(f"a new key of size {size} after freeze(): add it before")
        if size not in self._sizes:
            known = ", ".join(map(str, self._sizes))
            raise ArgumentError(f"size is {size!r:.80}, expected one that is captured: {known}")
        if not isinstance(mode, RuntimeMode) or mode is RuntimeMode.NONE:
            raise ArgumentError(f"mode is {mode!r:.80}, expected RuntimeMode.PIECEWISE or .FULL")
        self._keys[mode].add(BatchKey(size, fields if mode is RuntimeMode.FULL else None))

    def freeze(self) -> None:
        """Take no more keys."""
        self._is_frozen = True

    def dispatch(
        self,
        size: int,
        fields: tuple[object, ...] | None = None,
        *,
        allowed: Collection[RuntimeMode] = tuple(RuntimeMode),
    ) -> tuple[RuntimeMode, BatchKey]:
        """Return how a batch runs, and the key of its graph.

        A whole graph comes before pieces. Its key must equal in all fields; that of pieces has a
        size only. A batch that fits none, or is beyond all sizes, runs uncaptured with the size
        that it has.

        Args:
            size: The size of the batch, before it is padded.
            fields: What else distinguishes it.
            allowed: The modes to choose from, besides ``NONE``.
        """
        padded = self.padded(size)
        if padded:
            for mode, key in (
                (RuntimeMode.FULL, BatchKey(padded, fields)),
                (RuntimeMode.PIECEWISE, BatchKey(padded)),
            ):
                if mode in allowed and key in self._keys[mode]:
                    return mode, key
        return RuntimeMode.NONE, BatchKey(size, fields)
