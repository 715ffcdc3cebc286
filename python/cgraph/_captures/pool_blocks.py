"""Blocks of a pool that a capture gives up, so that others use them, or that somebody keeps."""

from __future__ import annotations

import gc
from collections.abc import Collection, Sequence
from typing import Any

import torch

from cgraph import _torch
from cgraph._driver import Driver, Handle, token

__all__ = ["PoolBlocks", "places_in", "unowned_at", "unowned_in"]


def unowned_in(driver: Driver, pool: Handle, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors over the memory of others in a pool, which keep the pool and no block of it.

    Args:
        driver: The driver of the pool.
        pool: The token of the pool, as its captures have it: it keeps the pool alive.
        tensors: The tensors, each as ``_torch.can_be_unowned`` has found it.
    """
    mem_pool = driver.mem_pool(pool)
    core: Any = None if mem_pool is None else mem_pool._core
    return _torch.unowned(tensors, pool, core)


def places_in(driver: Driver, pool: Handle, leaves: Sequence[Any]) -> list[int]:
    """Return the places of tensors that lie in a pool, and whose blocks others may have."""
    return [
        place
        for place, leaf in enumerate(leaves)
        if isinstance(leaf, torch.Tensor)
        and _torch.can_be_unowned(leaf)
        and driver.is_in_pool(leaf, pool)
    ]


def unowned_at(
    driver: Driver, pool: Handle, leaves: Sequence[Any], places: Sequence[int]
) -> list[Any]:
    """Return leaves with :func:`unowned_in` tensors at places of :func:`places_in`."""
    found = list(leaves)
    made = unowned_in(driver, pool, [leaves[place] for place in places])
    for place, one in zip(places, made, strict=True):
        found[place] = one
    return found


class PoolBlocks:
    """The blocks of a pool that are in use at one moment, and those since.

    Args:
        driver: The driver in force.
        pool: The pool, as captures are given it.

    Attributes:
        token: The pool's token; tensors keep it that do not own their blocks.
    """

    def __init__(self, driver: Driver, pool: Any) -> None:
        self._driver = driver
        self.token: Handle = token(pool)
        self._before = driver.block_starts(self.token)

    def are_left(self, but: Collection[int] = ()) -> bool:
        """Return whether others are in use now, which are no garbage either.

        Args:
            but: Addresses of blocks that may be.
        """
        known = self._before.union(but)
        if self._driver.block_starts(self.token) <= known:
            return False
        gc.collect()
        return not self._driver.block_starts(self.token) <= known

    def new_like(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a tensor without contents in a new block; None if none like this can be there."""
        if not _torch.can_be_unowned(tensor) or tensor.is_conj() or tensor.is_neg():
            return None
        if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
            return None
        return self._driver.empty_like(tensor, self.token)

    def without_blocks(self, value: Any) -> Any:
        """Return a tensor that does not own its block, in place of one in a block since then.

        In a tuple, each item is replaced. Other containers are the user's, who may change them.
        """
        found = [one for one in _items(value) if self._is_since(one)]
        if not found:
            return value
        made = unowned_in(self._driver, self.token, found)
        return _replaced(value, dict(zip(map(id, found), made, strict=True)))

    def _is_since(self, leaf: Any) -> bool:
        # What has attributes, or is of another class, is more than its memory.
        if type(leaf) is not torch.Tensor or vars(leaf) or not _torch.can_be_unowned(leaf):
            return False
        start = leaf.untyped_storage().data_ptr()
        return start not in self._before and self._driver.is_in_pool(leaf, self.token)


def _items(value: Any) -> list[Any]:
    """Return the items of tuples at any depth; a value itself if it is none."""
    if type(value) is not tuple:
        return [value]
    return [item for one in value for item in _items(one)]


def _replaced(value: Any, by: dict[int, torch.Tensor]) -> Any:
    """Replace items of tuples at any depth by others, which are found by ``id``."""
    if type(value) is tuple:
        return tuple([_replaced(one, by) for one in value])
    return by.get(id(value), value)
