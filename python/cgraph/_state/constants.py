"""Values among the arguments that are no tensors: when two are the same, and what they were."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import itertools
import sys
import types
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

__all__ = ["Constant", "Same", "Snapshot", "as_now", "is_array", "is_compared_here", "is_loose"]


# Values of more lists, dictionaries and the like are compared as objects.
_MOST_PARTS = 1000


class Constant:
    """A value as part of a key: ``1``, ``1.0`` and ``True`` are three, ``0.0`` and ``-0.0`` two.

    What cannot be compared is equal to itself alone.

    >>> Constant(slice(0, 1)) == Constant(slice(0, True)), Constant(2.0) == Constant(2.0)
    (False, True)
    """

    def __init__(self, value: Any) -> None:
        self._value = value = as_now(value)
        try:
            self._value = value = _exact(value)
            self._hash = hash((type(value), self._value))
        except Exception:  # whatever a class of the user's raises
            self._hash = hash(type(value))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Constant):
            return False
        one, two = self._value, other._value
        if one is two:
            return True
        try:
            return type(one) is type(two) and bool(one == two)
        except Exception:  # likewise
            return False


def is_loose(value: Any) -> bool:
    """Whether ``==`` takes other values of the same type for this one, as ``0j`` and ``-0j``."""
    try:
        return _exact(value) is not value and type(value) is not float
    except Exception:  # whatever a class of the user's raises
        return True


def is_compared_here(value: Any) -> bool:
    """Whether only :class:`Constant` tells a value from others, and it is not just the same one."""
    if isinstance(value, set):
        return any(type(one) is not str for one in value)
    return is_array(value) or (_is_frozen(value) and as_now(value) is not value)


class Same:
    """An object as part of a key that does not keep it alive. It is equal to itself alone."""

    def __init__(self, value: object) -> None:
        self._value = weakref.ref(value)
        self._hash = id(value)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        value = self._value()
        return isinstance(other, Same) and value is not None and value is other._value()


def as_now(value: Any) -> Any:
    """A value that stays as it is, also if somebody changes what it consists of.

    Objects of classes that compare nothing are what they are, whatever they consist of.
    """
    try:
        return _copied(value, itertools.count())
    except Exception:  # whatever a class of the user's raises, and what has no end
        return value


def _copied(value: Any, count: Iterator[int]) -> Any:
    """A copy of what can change in a value; ``count`` counts the parts, in each place anew."""
    if isinstance(value, set | bytearray) or is_array(value):
        return copy.copy(value)
    if type(value) is tuple:
        items = tuple(_copied(one, count) for one in value)
        is_same = all(one is two for one, two in zip(items, value, strict=True))
        return value if is_same else items
    inner = _items(value)
    if inner is None:
        return value
    if next(count) > _MOST_PARTS:
        raise ValueError("too many parts, or one that leads back to itself")
    copies = {name: _copied(one, count) for name, one in inner.items()}
    changing = {name: one for name, one in copies.items() if one is not inner[name]}
    if not changing and _is_frozen(value):
        return value
    made = copy.copy(value)
    for name, one in changing.items():
        if _is_container(value):
            made[name] = one
        else:
            object.__setattr__(made, name, one)
    return made


class Snapshot:
    """What a value consists of, as it is now: each part that can change, and what it holds."""

    def __init__(self, value: Any) -> None:
        self._parts: dict[int, tuple[Any, Any]] = {}
        seen: dict[int, Any] = {}
        waiting = [value]
        while waiting:
            one = waiting.pop()
            if id(one) in seen:
                continue
            seen[id(one)] = one
            held = _items(one)
            if held is not None:
                waiting += held.values()
            elif type(one) is tuple:
                waiting += one
            if isinstance(one, set | bytearray) or is_array(one):
                self._parts[id(one)] = one, copy.copy(one)
            elif held is not None and not _is_frozen(one):
                self._parts[id(one)] = one, held

    def __bool__(self) -> bool:
        """Whether there is anything that can change."""
        return bool(self._parts)

    @property
    def changed(self) -> str | None:
        """The name of something that is another now; None if nothing is."""
        for value, held in self._parts.values():
            now = _items(value)
            if now is None:
                if Constant(value) != Constant(held):
                    return type(value).__name__
                continue
            for name in {**held, **now}:
                if name not in now or name not in held or _differ(now[name], held[name]):
                    return str(name)
            if [*now] != [*held]:
                return "the order"
        return None

    def put_back(self) -> None:
        """Let all that is another now be as it was, in the same objects."""
        for value, held in self._parts.values():
            if isinstance(value, set):
                value.clear()
                value.update(held)
            elif isinstance(value, bytearray):
                value[:] = held
            elif is_array(value):
                value[...] = held
            elif isinstance(value, dict):
                value.clear()
                value.update(held)
            elif _is_container(value):
                value.clear()
                value.extend(held.values())
            else:
                if hasattr(value, "__dict__"):
                    vars(value).clear()
                for name, one in held.items():
                    object.__setattr__(value, name, one)


def _differ(now: Any, then: Any) -> bool:
    return now is not then and Constant(now) != Constant(then)


def _items(value: Any) -> dict[Any, Any] | None:
    """What a value that can change consists of, by key, place or name; None if it is no such."""
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, list | deque):
        return dict(enumerate(value))
    if _is_compared(value):
        names = (field.name for field in dataclasses.fields(value))
        held = {name: getattr(value, name) for name in names if hasattr(value, name)}
        return held | getattr(value, "__dict__", {})
    plain = types.SimpleNamespace | argparse.Namespace
    return dict(vars(value)) if isinstance(value, plain) else None


def _is_container(value: Any) -> bool:
    return isinstance(value, dict | list | deque)


def is_array(value: Any) -> bool:
    """Whether a value is an array of NumPy's."""
    numpy = sys.modules.get("numpy")
    # By its type: an object may stand for another one, and raise when it is asked.
    return numpy is not None and issubclass(type(value), numpy.ndarray)


def _exact(value: Any) -> Any:
    """What is equal for the same values alone; the value itself where ``==`` tells them apart."""
    kind = type(value)
    # All floats that are not a number are one, and zeros have signs.
    if kind is float:
        return float, value.hex()
    if kind is complex:
        return complex, value.real.hex(), value.imag.hex()
    if kind is slice:
        return slice, Constant(value.start), Constant(value.stop), Constant(value.step)
    if kind in (set, frozenset) and any(type(one) is not str for one in value):
        return kind, frozenset(map(Constant, value))
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray | numpy.inexact):
        return kind, value.dtype.str, value.shape, value.tobytes()
    if _is_frozen(value):
        fields = [field for field in dataclasses.fields(value) if field.compare]
        return kind, tuple(Constant(getattr(value, field.name)) for field in fields)
    return value


def _is_compared(value: Any) -> bool:
    """Whether a value is of a dataclass that compares fields, and no class itself."""
    # Of the class: objects may answer to any name.
    parameters = getattr(type(value), "__dataclass_params__", None)
    return parameters is not None and parameters.eq


def _is_frozen(value: Any) -> bool:
    return _is_compared(value) and bool(value.__dataclass_params__.frozen)
