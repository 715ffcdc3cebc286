"""Values among the arguments that are no tensors: when two are the same, and what they were."""

from __future__ import annotations

import copy
import dataclasses
import sys
import types
import weakref
from collections import deque
from typing import Any

__all__ = ["Constant", "Same", "as_now", "is_array", "is_as_before", "is_loose", "put_back"]


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
    if is_array(value):
        return value.copy()
    try:
        return _copied(value)
    except Exception:  # whatever a class of the user's raises
        return value


def _copied(value: Any) -> Any:
    if isinstance(value, set | bytearray):
        return copy.copy(value)
    if type(value) is tuple:
        items = tuple(map(as_now, value))
        is_same = all(one is two for one, two in zip(items, value, strict=True))
        return value if is_same else items
    inner = _items(value)
    if inner is None:
        return value
    changing = {name: now for name, one in inner.items() if (now := as_now(one)) is not one}
    is_frozen = _is_compared(value) and value.__dataclass_params__.frozen
    if is_frozen and not changing:
        return value
    copied = copy.copy(value)
    for name, one in changing.items():
        if _is_container(value):
            copied[name] = one
        else:
            object.__setattr__(copied, name, one)
    return copied


def _items(value: Any) -> dict[Any, Any] | None:
    """What a value that can change consists of, by key, place or name; None if it is no such."""
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, list | deque):
        return dict(enumerate(value))
    if _is_compared(value):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: getattr(value, name) for name in names} | getattr(value, "__dict__", {})
    return dict(vars(value)) if isinstance(value, types.SimpleNamespace) else None


def _is_container(value: Any) -> bool:
    return isinstance(value, dict | list | deque)


def is_as_before(value: Any, before: Any) -> bool:
    """Whether a value is what :func:`as_now` has returned for it."""
    now, then = _items(value), _items(before)
    if now is None or then is None or is_array(value):
        return Constant(value) == Constant(before)
    return [*now] == [*then] and all(
        now[name] is then[name] or Constant(now[name]) == Constant(then[name]) for name in now
    )


def put_back(value: Any, before: Any) -> None:
    """Let a value be again what :func:`as_now` has returned for it."""
    now, then = _items(value), _items(before)
    if isinstance(value, set):
        value.clear()
        value.update(before)
    elif isinstance(value, bytearray):
        value[:] = before
    elif is_array(value):
        value[...] = before
    elif now is not None and then is not None:
        for name, one in then.items():
            known = now.get(name)
            if type(known) is type(one) and _items(known) is not None:
                put_back(known, one)
                then[name] = known
        if isinstance(value, dict):
            value.clear()
            value.update(then)
        elif _is_container(value):
            value.clear()
            value.extend(then.values())
        else:
            if hasattr(value, "__dict__"):
                vars(value).clear()
            for name, one in then.items():
                object.__setattr__(value, name, one)


def is_array(value: Any) -> bool:
    """Whether a value is an array of NumPy's."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


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
    if _is_compared(value) and value.__dataclass_params__.frozen:
        fields = [field for field in dataclasses.fields(value) if field.compare]
        return kind, tuple(Constant(getattr(value, field.name)) for field in fields)
    return value


def _is_compared(value: Any) -> bool:
    """Whether a value is of a dataclass that compares fields, and no class itself."""
    parameters = getattr(value, "__dataclass_params__", None)
    return parameters is not None and parameters.eq and not isinstance(value, type)
