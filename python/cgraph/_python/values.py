"""Plain values, which are compared by type and value, and belong to the key of a call."""

from __future__ import annotations

import array
import enum
import sys
import threading
import types
from collections import deque
from collections.abc import Hashable, Iterator
from typing import Any

import torch

from cgraph import _torch

__all__ = [
    "ATOMS",
    "Form",
    "as_key",
    "attributes_of",
    "form_in_words",
    "has_no_parts",
    "is_array",
    "is_atom",
    "is_plain",
    "is_same",
    "tensors_behind",
]

# The most parts of an object that are looked at.
_MOST_PARTS = 1000


class Form(str):
    """The form of a tensor in words, which shows without quotation marks."""

    __slots__ = ()
    __repr__ = str.__str__


ATOMS = frozenset(
    {
        Form,
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
    }
)
# Compared by identity: their contents cannot be compared.
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
    """Return whether a value is compared by type and value.

    Such values are None, Ellipsis, bool, int, float, complex, str, bytes, ranges, enum members,
    torch's dtypes, devices, layouts and memory formats, NumPy scalars, and tuples, slices and
    frozen sets of these.
    """
    kind = type(value)
    if kind in ATOMS or isinstance(value, enum.Enum):
        return True
    if kind is slice:
        return is_plain((value.start, value.stop, value.step))
    if kind is frozenset or isinstance(value, tuple):
        items = frozenset.__iter__(value) if kind is frozenset else tuple.__iter__(value)
        return all(map(is_plain, items))
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(kind, numpy.generic) and kind is not numpy.object_


def is_atom(value: Any) -> bool:
    """Return whether a plain value is compared natively if it is an argument."""
    return (type(value) in ATOMS and type(value) is not complex) or isinstance(value, enum.Enum)


def as_key(value: Any) -> Hashable:
    """Return a key that tells a plain value from others: ``1``, ``1.0`` and ``True`` differ."""
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
    """Return whether a value is compared by identity: functions, classes, generators, streams."""
    return isinstance(value, _WHOLE)


def is_array(value: Any) -> bool:
    """Return whether a value is an array or other buffer, whose contents nothing compares."""
    if isinstance(value, bytearray | memoryview | array.array):
        return True
    numpy = sys.modules.get("numpy")
    # By its type: an object may be a proxy for another one, and raise when it is asked.
    return numpy is not None and issubclass(type(value), numpy.ndarray)


def is_same(value: Any, other: Any) -> bool:
    """Return whether two values are the same: plain ones by type and value, others by ``==``."""
    if value is other:
        return True
    if type(value) is not type(other):
        return False
    try:
        if is_plain(value):
            return as_key(value) == as_key(other)
        return bool(value == other)
    except Exception:  # a value that cannot be compared is equal only to itself
        return False


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object itself; empty if it has no dictionary."""
    get = type(value).__getattribute__ if isinstance(value, threading.local) else _get
    try:
        found = get(value, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else {}


_get = object.__getattribute__


def form_in_words(tensor: torch.Tensor) -> Form:
    """Return the class, dtype and shape of a tensor as text, and whether it requires a gradient."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if type(tensor) is not torch.Tensor:
        dtype = f"{type(tensor).__name__} {dtype}"
    if (form := _torch.form_of(tensor)) is not None:
        return Form(f"{form} {dtype}")
    grad = " with grad" if tensor.requires_grad else ""
    strides = "" if tensor.is_contiguous() else " not contiguous"
    return Form(f"{dtype}{list(tensor.shape)}{strides}{grad}")


def tensors_behind(value: Any) -> Iterator[torch.Tensor]:
    """Yield a tensor itself, or those in any other object, except those of modules."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    waiting, seen, left = [value], {id(value)}, _MOST_PARTS
    while waiting:
        one = waiting.pop()
        if is_plain(one) or isinstance(one, type | torch.nn.Module | types.ModuleType):
            continue
        parts: list[Any] = [*attributes_of(one).values()]
        if isinstance(one, dict):
            parts += dict.values(one)
        elif isinstance(one, list | tuple | set | frozenset | deque):
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
