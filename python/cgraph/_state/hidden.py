"""Tensors inside objects that pytree does not know."""

from __future__ import annotations

import functools
import gc
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from cgraph._state.code import is_looked_into
from cgraph._state.holders import slots_of, vars_of
from cgraph._state.surroundings import FUNCTIONS, LEAVES, PLAIN, tensors_of
from cgraph._torch import tree_iter

__all__ = ["has_any", "hides_tensors", "is_opaque", "tensors_inside"]

# So many parts are looked at in all, in containers that are not longer, and so many objects away:
# each call asks that has no graph.
_MOST_PARTS, _MOST_STEPS = 1000, 6


def is_opaque(value: Any) -> bool:
    """Whether a value that is no tensor cannot be told apart from others of its class."""
    return isinstance(value, Iterator) or hides_tensors(value)


def hides_tensors(value: Any) -> bool:
    """Whether an object has tensors that pytree does not find in it, or one that it has does.

    Those of modules and optimizers are found elsewhere. Of the objects that it has, those of
    classes of the user's count, and functions do not. No code of the user's runs, but where pytree
    knows it.
    """
    if issubclass(type(value), _FUNCTIONS):
        return any(True for _ in tensors_of(value, modules=False))
    return _may_hide(value) and any(True for _ in _tensors_behind(value))


def tensors_inside(value: Any) -> Iterator[torch.Tensor]:
    """A tensor, the parameters and buffers of a module, or those in containers and objects.

    Looked for as by :func:`hides_tensors`.
    """
    if issubclass(type(value), torch.Tensor):
        yield value
    elif issubclass(type(value), torch.nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    elif _may_hide(value):
        yield from _tensors_behind(value, modules=True)


def has_any(tells: Callable[[torch.Tensor], bool], value: Any) -> bool:
    """Whether a value is such a tensor, or has one.

    Args:
        tells: Tells of tensors.
        value: A tensor, a module, a container or an object.
    """
    return any(map(tells, tensors_inside(value)))


def _tensors_behind(value: Any, *, modules: bool = False) -> Iterator[torch.Tensor]:
    waiting: deque[tuple[Any, int]] = deque([(value, 0)])
    # What was seen stays alive, as long as it is known by its number.
    seen, left = {id(value): value}, _MOST_PARTS
    while waiting:
        one, steps = waiting.popleft()
        for part in _held_by(one):
            left -= 1
            if left < 0:
                return
            if issubclass(type(part), torch.Tensor):
                yield part
            if modules and issubclass(type(part), torch.nn.Module):
                yield from tensors_inside(part)
            if not _may_hide(part) or id(part) in seen:
                continue
            seen[id(part)] = part
            is_container = issubclass(type(part), _CONTAINERS)
            if is_container or is_looked_into(type(part)):
                if steps < _MOST_STEPS:
                    waiting.append((part, steps + (not is_container)))
            else:
                leaves = tree_iter(part)
                yield from (leaf for leaf in leaves if issubclass(type(leaf), torch.Tensor))


def _may_hide(value: Any) -> bool:
    # Also what can be called: many a class of data has a method for that.
    return not issubclass(type(value), (*PLAIN, *LEAVES, *FUNCTIONS, *_BUILT_IN))


def _held_by(value: Any) -> Iterator[Any]:
    """The items and attributes of an object."""
    yield from vars_of(value).values()
    yield from (one for _, one in slots_of(value))
    if issubclass(type(value), types.MappingProxyType):
        # What stands behind it, whose methods may be the user's.
        yield from gc.get_referents(value)
        return
    base: Any = next((one for one in _CONTAINERS if issubclass(type(value), one)), None)
    if base is not None and base.__len__(value) <= _MOST_PARTS:
        items: Iterable[Any] = dict.values(value) if base is dict else base.__iter__(value)
        yield from items


_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_BUILT_IN = (types.BuiltinFunctionType, types.MethodDescriptorType, types.ModuleType)
_CONTAINERS = (dict, list, tuple, deque, set, frozenset, types.MappingProxyType)
