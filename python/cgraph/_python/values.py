"""Plain values: those that are compared by type and value, and belong to the key of a call."""

from __future__ import annotations

import enum
import sys
import types
from collections.abc import Hashable, Iterator
from typing import Any

import torch

__all__ = [
    "as_key",
    "attributes_of",
    "has_no_parts",
    "is_array",
    "is_atom",
    "is_plain",
    "is_same",
    "tensors_behind",
]

# So many parts of an object are looked at.
_MOST_PARTS = 1000

_ATOMS = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    type(Ellipsis),
    range,
)
# Compared by identity: nothing in them can be compared.
_WHOLE = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.GeneratorType,
    types.CoroutineType,
    types.CodeType,
    types.FrameType,
    property,
    staticmethod,
    classmethod,
    torch.Generator,
    torch.Stream,
    torch.cuda.Stream,
    torch.cuda.Event,
)


def is_plain(value: Any) -> bool:
    """Whether a value is compared by type and value.

    None, bool, int, float, complex, str, bytes, enum members, dtypes, devices, NumPy scalars, and
    tuples, slices and frozen sets of these.
    """
    kind = type(value)
    if kind in _ATOMS or isinstance(value, enum.Enum):
        return True
    if kind is slice:
        return is_plain((value.start, value.stop, value.step))
    if kind is frozenset or isinstance(value, tuple):
        items = frozenset.__iter__(value) if kind is frozenset else tuple.__iter__(value)
        return all(map(is_plain, items))
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(kind, numpy.generic) and kind is not numpy.object_


def is_atom(value: Any) -> bool:
    """Whether a plain value is compared natively, where it is an argument."""
    return (type(value) in _ATOMS and type(value) is not complex) or isinstance(value, enum.Enum)


def as_key(value: Any) -> Hashable:
    """What tells a plain value from others: ``1``, ``1.0`` and ``True`` are three."""
    kind = type(value)
    if isinstance(value, float | complex):
        # Zeros of both signs differ, and a NaN is equal to itself.
        return kind, repr(value)
    if isinstance(value, tuple):
        return kind, tuple(map(as_key, tuple.__iter__(value)))
    if kind is frozenset:
        return kind, frozenset(map(as_key, value))
    if kind is slice:
        return kind, as_key((value.start, value.stop, value.step))
    numpy = sys.modules.get("numpy")
    if numpy is not None and issubclass(kind, numpy.generic):
        return kind, value.dtype.str, value.tobytes()
    return kind, value


def has_no_parts(value: Any) -> bool:
    """Whether a value is compared by identity: functions, classes, generators, streams."""
    return isinstance(value, _WHOLE)


def is_array(value: Any) -> bool:
    """Whether a value is an array of NumPy's or a bytearray, whose contents nothing compares."""
    if isinstance(value, bytearray | memoryview):
        return True
    numpy = sys.modules.get("numpy")
    # By its type: an object may stand for another one, and raise when it is asked.
    return numpy is not None and issubclass(type(value), numpy.ndarray)


def is_same(value: Any, other: Any) -> bool:
    """Whether two values are the same: plain ones by type and value, others as they compare."""
    if value is other:
        return True
    if type(value) is not type(other):
        return False
    try:
        if is_plain(value):
            return as_key(value) == as_key(other)
        return bool(value == other)
    except Exception:  # what cannot be compared is equal to itself alone
        return False


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes that an object has itself; none if it has no dictionary."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else {}


def tensors_behind(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in an object that pytree does not take apart, but for those of modules."""
    waiting, seen, left = [value], {id(value)}, _MOST_PARTS
    while waiting:
        one = waiting.pop()
        if is_plain(one) or isinstance(one, type | torch.nn.Module | types.ModuleType):
            continue
        parts: list[Any] = [*attributes_of(one).values()]
        if isinstance(one, dict):
            parts += dict.values(one)
        elif isinstance(one, list | tuple | set | frozenset):
            parts += one
        for part in parts:
            left -= 1
            if left < 0:
                return
            if isinstance(part, torch.Tensor):
                yield part
            elif id(part) not in seen:
                seen.add(id(part))
                waiting.append(part)
