"""Tensors inside objects that pytree does not know."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from cgraph._state.code import is_looked_into
from cgraph._state.holders import slots_of, vars_of
from cgraph._state.surroundings import LEAVES, PLAIN
from cgraph._torch import tree_iter

__all__ = ["hides_tensors", "is_opaque"]

# So many are looked at in all, and so many steps away: each call asks that has no graph.
_MOST_PARTS, _MOST_STEPS = 1000, 6


def is_opaque(value: Any) -> bool:
    """Whether a value that is no tensor cannot be told apart from others of its class."""
    return isinstance(value, Iterator) or hides_tensors(value)


def hides_tensors(value: Any) -> bool:
    """Whether an object has tensors that pytree does not find in it, or one that it has does.

    Those of modules, optimizers and functions are found elsewhere. Of the objects that it has,
    those of classes of the user's count.
    """
    if not _may_hide(value):
        return False
    waiting: deque[tuple[Any, int]] = deque([(value, 0)])
    # What was seen stays alive, as long as it is known by its number.
    seen, left = {id(value): value}, _MOST_PARTS
    while waiting:
        one, steps = waiting.popleft()
        for part in _held_by(one):
            if isinstance(part, torch.Tensor):
                return True
            if not _may_hide(part) or id(part) in seen:
                continue
            left -= 1
            if left < 0:
                return False
            seen[id(part)] = part
            is_container = isinstance(part, _CONTAINERS)
            if is_container or is_looked_into(type(part)):
                if steps < _MOST_STEPS:
                    waiting.append((part, steps + (not is_container)))
            elif any(isinstance(leaf, torch.Tensor) for leaf in tree_iter(part)):
                return True
    return False


def _may_hide(value: Any) -> bool:
    return not (issubclass(type(value), (*PLAIN, *LEAVES)) or callable(value))


def _held_by(value: Any) -> list[Any]:
    """The items and attributes of an object, by no code of the user's."""
    held = [*vars_of(value).values(), *(one for _, one in slots_of(value))]
    if isinstance(value, dict):
        held += dict.values(value)
    elif isinstance(value, types.MappingProxyType):
        held += value.values()
    else:
        base = next((one for one in _CONTAINERS if isinstance(value, one)), None)
        held += [] if base is None else base.__iter__(value)
    return held


_CONTAINERS: tuple[Any, ...] = (dict, types.MappingProxyType, list, tuple, deque, set, frozenset)
