"""The comparison of a graph's work with that of its function, called eagerly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from cgraph import _driver
from cgraph._debug.differences import Leaf, difference, named, wrong_value
from cgraph._ladder.rung import Rung
from cgraph._operators.rollback import Rollback
from cgraph._operators.snapshots import (
    RandomSnapshot,
    StorageSnapshot,
    bytes_of,
    in_type,
    storage_snapshot,
)

__all__ = ["difference_from_eager"]


def difference_from_eager(
    rung: Rung,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    tensors: Iterable[torch.Tensor],
) -> str | None:
    """Return how the first replay of a graph differs from an eager call; None if it does not.

    The memory that either writes and random states are as before afterwards.

    Args:
        rung: The graph, which is instantiated.
        fn: The function.
        args: The arguments, whose memory the graph works on.
        tensors: Other tensors that the graph may write; there must be room for copies.
    """
    driver, random = _driver.current(), RandomSnapshot()
    before = [storage_snapshot(one.untyped_storage(), one.dtype) for one in tensors]
    # Snapshots are copied on another stream than the one that may still write.
    driver.synchronize()
    with Rollback() as rollback:
        result = named(fn(*args))
    try:
        written = rollback.storages
        expected = [*result, *_contents(written)]
        rollback.rewind()
        random.rewind(rollback)
        rung.graph.replay()
        found = [*named(rung.result), *_contents(written)]
        wrong = difference(found, expected, wrong_value)
    finally:
        rollback.undo()
        for one in before:
            one.rewind()
        random.put_back()
    return None if wrong is None else wrong.text


def _contents(storages: Sequence[StorageSnapshot]) -> list[Leaf]:
    """Copy what lies in storages now."""
    now = [in_type(bytes_of(one.storage).clone(), one.dtype) for one in storages]
    return [Leaf(f"written memory {place}", one) for place, one in enumerate(now)]
