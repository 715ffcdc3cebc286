"""The comparison of the first padded call of a size with an eager one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from cgraph import _driver, _torch
from cgraph._captures.busy import busy
from cgraph._debug.differences import wrong_value
from cgraph._debug.steps import Wrong
from cgraph._graphed.leaf_gradients import LeafGradients
from cgraph._operators.rollback import Rollback
from cgraph._operators.snapshots import (
    RandomSnapshot,
    StorageSnapshot,
    bytes_of,
    in_type,
    storage_snapshot,
)
from cgraph._padding.padded_replays import cut_leaves
from cgraph._padding.rows import Fit
from cgraph._torch import tree_flatten, tree_unflatten

__all__ = ["Compared", "compared", "rows_in"]


_OF_LARGEST = {
    torch.bfloat16: 1.6e-2,
    torch.float16: 4e-3,
    # Convolutions compute in TF32 by default.
    torch.float32: 1e-3,
    torch.float64: 1e-7,
}
"""The allowed difference of elements, in units of the largest element."""


class Compared(NamedTuple):
    """The outcome of a comparison.

    Attributes:
        result: The result of the call.
        batched: For each leaf of the graph's result the dimension of its rows; None without.
        shows: The effect of the padding as text; None if there is none.
    """

    result: Any
    batched: Sequence[int | None]
    shows: str | None


def compared(
    eager: Callable[[], Any],
    replays: Sequence[Callable[[], tuple[Sequence[Any], Any]]],
    written: Sequence[tuple[torch.UntypedStorage, torch.dtype]],
    leaves: Sequence[torch.Tensor],
    found: Fit,
    name_of: Callable[[torch.UntypedStorage], str],
) -> Compared | None:
    """Make a call eagerly, restore what it wrote, make it padded, and compare; for each padding.

    The effects of the last padded call stay, or those of the eager one if the padding shows. Return
    None if there is no memory for copies of written memory; then all state is as before.

    Args:
        eager: Makes the call.
        replays: Replay it with padding, and return the leaves of the result and its specification.
        written: The memory from outside that the graph writes, and the type of its elements.
        leaves: The tensors whose gradients it may exchange.
        found: The rows of the call.
        name_of: Returns the name of written memory.
    """
    driver = _driver.current()
    driver.synchronize()
    random, gradients = RandomSnapshot(), LeafGradients(leaves)
    rollback = Rollback(is_capturing=driver.is_capturing)
    try:
        with rollback, busy():
            result = eager()
        parts, spec = tree_flatten(result)
        expected = [one.detach().clone() if _is_tensor(one) else one for one in parts]
        gradients_after = LeafGradients(leaves)
        found_there = gradients_after.at_begin.values()
        right = [None if one is None else one.detach().clone() for one in found_there]
        storages = {_torch.storage_id(one.storage): one for one in rollback.storages}
        for storage, dtype in written:
            # Memory that eager has not written is unchanged.
            if (number := _torch.storage_id(storage)) not in storages:
                storages[number] = storage_snapshot(storage, dtype)
        left = {number: bytes_of(one.storage).clone() for number, one in storages.items()}
    except torch.OutOfMemoryError:
        rollback.undo()
        random.put_back()
        gradients.put_back()
        return None
    random_after = RandomSnapshot()
    batched: Sequence[int | None] = []
    shows: str | None = None
    for replay in replays:
        for one in reversed(storages.values()):
            one.rewind()
        random.put_back()
        gradients.put_back()
        try:
            padded, its_spec = replay()
            driver.synchronize()
            batched = rows_in(padded, found)
            shows = _difference(expected, cut_leaves(padded, batched, found.rows), found)
            if spec != its_spec:
                shows = "the result has another structure"
            shows = shows or _difference_of_written(storages, left, name_of)
            shows = shows or _difference_of_gradients(leaves, right)
        except torch.OutOfMemoryError:
            batched, shows = [], "there is no memory to compare it"
        if shows is not None:
            break
    if shows is None:
        rest = cut_leaves(padded, batched, found.rows)
        return Compared(tree_unflatten(rest, spec), batched, None)
    for number, known in storages.items():
        bytes_of(known.storage).copy_(left[number])
    gradients_after.put_back()
    random_after.put_back()
    return Compared(result, batched, shows)


def rows_in(leaves: Sequence[Any], found: Fit) -> list[int | None]:
    """Return the dimension of the rows in each leaf of a result, by its shape; None without."""
    dim = next(one for one in found.dims if one is not None)
    return [
        dim if _is_tensor(leaf) and leaf.dim() > dim and leaf.shape[dim] == found.size else None
        for leaf in leaves
    ]


def _difference(expected: Sequence[Any], leaves: Sequence[Any], found: Fit) -> str | None:
    if len(expected) != len(leaves):
        return "the result has another number of values"
    for place, (right, one) in enumerate(zip(expected, leaves, strict=True)):
        if _is_tensor(right) and _is_tensor(one):
            if (wrong := _wrong(one.detach(), right)) is not None:
                return f"output {place}: with {found.size} rows {wrong.text}"
        elif type(right) is not type(one) or (not _is_tensor(right) and right != one):
            return f"output {place} is {one!r:.40} for {found.size} rows, {right!r:.40} in eager"
    return None


def _difference_of_written(
    storages: dict[int, StorageSnapshot],
    left: dict[int, torch.Tensor],
    name_of: Callable[[torch.UntypedStorage], str],
) -> str | None:
    for number, storage in storages.items():
        pair = bytes_of(storage.storage), left[number]
        # Comparing elements takes less memory than comparing bytes.
        now, right = (in_type(one, storage.dtype) for one in pair)
        if not torch.equal(now, right) and (wrong := _wrong(now, right)) is not None:
            return f"what the function writes to {name_of(storage.storage)}: {wrong.text}"
    return None


def _difference_of_gradients(
    leaves: Sequence[torch.Tensor], right: Sequence[torch.Tensor | None]
) -> str | None:
    for leaf, one in zip(leaves, right, strict=True):
        if (leaf.grad is None) != (one is None):
            return "the gradients differ from eager"
        if leaf.grad is not None and one is not None and leaf.grad.layout is torch.strided:
            if _wrong(leaf.grad.detach(), one) is not None:
                return "the gradients differ from eager"
    return None


def _wrong(found: torch.Tensor, right: torch.Tensor) -> Wrong | None:
    """Describe how a tensor differs from the right one by more than other kernels would cause.

    Libraries choose kernels by the number of rows, and elements near zero differ by the rounding of
    large ones.
    """
    wrong = wrong_value(found, right)
    bound = _OF_LARGEST.get(right.dtype)
    if wrong is None or bound is None or found.shape != right.shape:
        return wrong
    with torch.no_grad(), _torch.without_modes():
        one, other, finite = found.double(), right.double(), right.isfinite()
        if not torch.equal(one.isfinite(), finite):
            return wrong
        both_nan = one.isnan() & other.isnan()
        if not bool((finite | both_nan | (one == other)).all()):
            return wrong
        one, other = (part.where(finite, torch.zeros_like(part)) for part in (one, other))
        farthest = (one - other).abs().max()
        return None if bool(farthest <= bound * other.abs().max()) else wrong


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
