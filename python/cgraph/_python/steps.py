"""Steps from what holds values to these values, and back: no code of the user runs."""

from __future__ import annotations

import threading
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch

from cgraph import _torch
from cgraph._python.libraries import is_library_class
from cgraph._python.values import attributes_of, is_plain

__all__ = [
    "NOTHING",
    "OF_MODULE",
    "found_at",
    "has_parts",
    "items_of",
    "keys_of",
    "name_of_item",
    "put_at",
    "slots_of",
]

NOTHING: Any = object()
"""The value that is found where nothing is."""
OF_MODULE = ("_parameters", "_buffers", "_modules")
"""The dictionaries of a module whose items are its attributes."""


def found_at(holder: Any, step: tuple[Any, ...]) -> Any:
    """Return the value at a place now, without running user code; ``NOTHING`` if none is there."""
    kind, *rest = step
    if holder is NOTHING:
        return NOTHING
    if kind == "root":
        return rest[0]
    if kind == "attr":
        return attributes_of(holder).get(rest[0], NOTHING)
    if kind == "class":
        of = holder if isinstance(holder, type) else type(holder)
        return next((vars(b)[rest[0]] for b in of.__mro__ if rest[0] in vars(b)), NOTHING)
    if kind == "item" and isinstance(holder, dict):
        return dict.get(holder, rest[0], NOTHING)
    # An empty slot, cell or variable, or the end of a list.
    with suppress(AttributeError, ValueError, LookupError):
        if kind == "slot":
            return rest[0].__get__(holder)
        if kind == "cell":
            return holder.cell_contents
        if kind == "context":
            return holder.get()
        return holder.grad if kind == "grad" else [*items_of(holder)][rest[0]]
    return NOTHING


def keys_of(value: dict[Any, Any]) -> tuple[Any, ...]:
    """Return the keys of a dictionary in its order, without running user code."""
    if isinstance(value, OrderedDict):
        return tuple(OrderedDict.keys(value))
    return tuple(dict.keys(value))


def name_of_item(holder: str, key: Any, place: int, addresses: Mapping[int, str]) -> str:
    """Return the name of an item of a dictionary, which is an attribute of a module in its own.

    Args:
        holder: The name of the dictionary.
        key: The key, whose text may not stay the same, or would be read from the device.
        place: The place of the item among the others.
        addresses: The names of tensors, by the addresses of their storages.
    """
    owner, _, last = holder.rpartition(".")
    if last in OF_MODULE:
        return f"{owner}.{key}"
    if is_plain(key):
        return f"{holder}[{key!r:.40}]"
    memory = _torch.memory_of(key) if isinstance(key, torch.Tensor) else None
    known = None if memory is None else addresses.get(memory.data_ptr())
    return f"{holder}[{known or f'{type(key).__name__} {place}'}]"


def put_at(holder: Any, step: tuple[Any, ...], value: Any) -> None:
    """Put a value at a place; ``NOTHING`` takes away what is there."""
    kind, *rest = step
    if kind in ("attr", "item") and isinstance(
        found := attributes_of(holder) if kind == "attr" else holder, dict
    ):
        if value is NOTHING:
            dict.pop(found, rest[0], None)
        else:
            dict.__setitem__(found, rest[0], value)
    elif kind == "item" and value is not NOTHING:
        base: Any = list if isinstance(holder, list) else deque
        base.__setitem__(holder, rest[0], value)
    elif kind == "cell" and value is not NOTHING:
        holder.cell_contents = value
    elif kind == "slot":
        rest[0].__delete__(holder) if value is NOTHING else rest[0].__set__(holder, value)
    elif kind == "grad":
        holder.grad = value
    elif kind == "class":
        type.__delattr__(holder, rest[0]) if value is NOTHING else setattr(holder, rest[0], value)


_slots: weakref.WeakKeyDictionary[type, tuple[Any, ...]] = weakref.WeakKeyDictionary()


def slots_of(kind: type) -> tuple[Any, ...]:
    """Return the descriptors of the slots of the user's classes."""
    known = _slots.get(kind)
    if known is None:
        known = _slots[kind] = tuple(
            one
            for base in kind.__mro__
            if not is_library_class(base)
            for one in vars(base).values()
            if isinstance(one, types.MemberDescriptorType)
        )
    return known


def items_of(value: Any) -> Iterator[Any]:
    """Iterate over a list, a tuple or a deque without running code of the user."""
    base = next(one for one in (list, tuple, deque) if isinstance(value, one))
    return base.__iter__(value)


def has_parts(value: Any) -> bool:
    """Return whether an object has attributes to look at."""
    if isinstance(value, _torch.TensorWeakRef):
        return False
    if isinstance(value, threading.local):
        return True
    return hasattr(type(value), "__dictoffset__") and (
        type(value).__dictoffset__ != 0 or bool(slots_of(type(value)))
    )
