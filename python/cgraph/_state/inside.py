"""What containers and objects have that may lead to tensors."""

from __future__ import annotations

import functools
import types
from collections import ChainMap, UserDict, UserList, deque
from typing import Any

import torch

from cgraph._state.code import is_looked_into
from cgraph._state.holders import HOLDING, held_in, slots_of, vars_of
from cgraph._state.surroundings import LEAVES, PLAIN

__all__ = ["CONTAINERS", "WRAPPERS", "attributes_in", "is_of_module", "items_in"]

CONTAINERS = (dict, list, tuple, deque)
"""Classes of containers whose items have ways."""
WRAPPERS = (ChainMap, UserDict, UserList, functools.partial, types.MethodType)
"""Classes of what code has by other names than it has their attributes."""
# Longer containers are of data.
_LONGEST = 4096
# What each module keeps its parts and hooks in.
_OF_MODULES = frozenset(vars(torch.nn.Module()))


def items_in(value: Any) -> list[tuple[Any, Any]]:
    """Those of a container that may have tensors; none of one that is too long."""
    if issubclass(type(value), set):
        # Without an order there is no way to an item.
        return []
    if issubclass(type(value), HOLDING):
        return [one for one in held_in(value) if may_lead(one[1])]
    base: Any = next(one for one in CONTAINERS if issubclass(type(value), one))
    if base.__len__(value) > _LONGEST:
        return []
    # A copy at once: other threads may add something meanwhile.
    copied = base.copy(value) if base is not tuple else value
    pairs = dict.items(copied) if base is dict else enumerate(base.__iter__(copied))
    return [item for item in pairs if may_lead(item[1])]


def attributes_in(value: object) -> list[tuple[Any, Any]]:
    """Those of an object, and its slots, that may have tensors; none but of classes of users."""
    kind = type(value)
    if issubclass(kind, torch.nn.Module):
        values = {name: one for name, one in vars(value).items() if name not in _OF_MODULES}
    elif issubclass(kind, (*LEAVES, type)):
        return []
    elif is_looked_into(kind) or issubclass(kind, WRAPPERS):
        return [item for item in (*slots_of(value), *vars_of(value).items()) if may_lead(item[1])]
    else:
        return []
    return [item for item in values.items() if may_lead(item[1])]


def may_lead(value: object) -> bool:
    """Whether a value may be a tensor, or have some."""
    return not issubclass(type(value), PLAIN)


def is_of_module(value: object) -> bool:
    """Whether a value is a method of a module, which has tensors."""
    is_method = issubclass(type(value), types.MethodType)
    return is_method and issubclass(type(value.__self__), torch.nn.Module)  # type: ignore[attr-defined]
