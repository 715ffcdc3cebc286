"""Trees of containers, in which a ``torch.Size`` is a value: torch's own make a tuple of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree

__all__ = ["tree_flatten", "tree_iter", "tree_iter_once", "tree_map", "tree_unflatten"]

tree_unflatten = _pytree.tree_unflatten


def tree_flatten(tree: Any) -> tuple[list[Any], Any]:
    """The leaves of a tree, and how they are put together."""
    return _pytree.tree_flatten(tree, is_leaf=_is_size)


def tree_iter(tree: Any) -> Iterator[Any]:
    """The leaves of a tree."""
    return iter(_pytree.tree_iter(tree, is_leaf=_is_size))


def tree_iter_once(tree: Any, seen: dict[int, Any]) -> Iterator[Any]:
    """The leaves of a tree that were not met before; containers may contain themselves.

    Args:
        tree: The tree.
        seen: What was met, by its ``id``; it gets leaves and containers, and keeps them alive.
    """

    def is_leaf(value: Any) -> bool:
        if id(value) in seen or _is_size(value):
            return True
        if isinstance(value, dict | list | tuple | deque):
            seen[id(value)] = value
        return False

    for leaf in _pytree.tree_iter(tree, is_leaf=is_leaf):
        if id(leaf) not in seen:
            seen[id(leaf)] = leaf
            yield leaf


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """A tree of the same containers, with what the function returns for each leaf."""
    return _pytree.tree_map(function, tree, is_leaf=_is_size)


def _is_size(value: Any) -> bool:
    return type(value) is torch.Size
