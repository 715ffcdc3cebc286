"""Values in words: other words for other values, and the same in each process."""

from __future__ import annotations

import enum
import functools
import hashlib
import types
import weakref
from collections import defaultdict, deque
from types import CodeType
from typing import Any

import torch

from cgraph import _torch
from cgraph._python.libraries import is_library, is_library_class
from cgraph._python.named_objects import functions_in
from cgraph._python.steps import NOTHING, has_parts, keys_of
from cgraph._python.values import ATOMS, attributes_of, has_no_parts, is_plain
from cgraph.errors import ArgumentError

__all__ = ["code_in_words", "digest", "in_words", "shares_nothing"]

_MOST_BYTES = 1 << 16
"""Of a tensor on the host whose contents are compared."""
_SILENT = (
    torch.Generator,
    torch.Stream,
    torch.cuda.Stream,
    torch.cuda.Event,
    weakref.ref,
    types.CellType,
    types.ModuleType,
)
"""Objects whose contents no capture reads, or that are read elsewhere."""

_RUNNING = types.GeneratorType, types.CoroutineType, types.FrameType


def in_words(name: str, value: Any) -> str:
    """Describe a value at a place, without the values inside that have places of their own.

    Raises:
        ArgumentError: Its contents cannot be compared.
    """
    if value is NOTHING:
        return "not there"
    if isinstance(value, torch.Tensor):
        return _tensor_in_words(value)
    if is_plain(value):
        return _plain_in_words(value)
    if isinstance(value, types.FunctionType):
        return _function_in_words(name, value)
    if isinstance(value, types.MethodType):
        return f"method {_function_in_words(name, value.__func__)}"
    if isinstance(value, functools.partial):
        return f"partial of {in_words(name, value.func)}"
    if isinstance(value, functools._lru_cache_wrapper):
        return f"cached {_function_in_words(name, value.__wrapped__)}"
    if isinstance(value, type):
        return _class_in_words(value)
    if isinstance(value, dict):
        made = _factory_in_words(name, value) if isinstance(value, defaultdict) else ""
        keys = keys_of(value)
        told = str(len(keys)) if name.endswith("_hooks") else str([*map(_key_in_words, keys)])
        return f"{_class_in_words(type(value))} {made} of {told}"
    if isinstance(value, list | tuple | deque):
        return f"{_class_in_words(type(value))} of {len(value)}"
    if isinstance(value, set | frozenset):
        return f"{_class_in_words(type(value))} of {sorted(map(_key_in_words, value))}"
    if isinstance(value, torch.jit.ScriptModule | torch.jit.ScriptFunction):
        raise ArgumentError(f"{name} is scripted, and its settings are not compared")
    if (known := _operator_in_words(name, value)) is not None:
        return known
    return _object_in_words(name, value)


def shares_nothing(value: Any) -> bool:
    """Return whether it does not matter that the same object is found at several places."""
    return value is NOTHING or is_plain(value)


def code_in_words(code: CodeType) -> str:
    """Return a digest of code: of all that it does, and not of where it stands."""

    def parts(one: Any) -> Any:
        if isinstance(one, CodeType):
            names = one.co_names, one.co_varnames, one.co_freevars, one.co_cellvars
            counts = one.co_argcount, one.co_posonlyargcount, one.co_kwonlyargcount, one.co_flags
            return one.co_name, one.co_code.hex(), names, counts, parts(one.co_consts)
        if isinstance(one, tuple):
            return tuple(map(parts, one))
        if isinstance(one, frozenset):
            return sorted(map(repr, map(parts, one)))
        return _plain_in_words(one) if is_plain(one) else type(one).__name__

    return digest(repr(parts(code)))


def digest(text: str) -> str:
    """Return a short digest of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _tensor_in_words(tensor: torch.Tensor) -> str:
    kind = f"{_name_of(type(tensor))} {tensor.dtype}"
    also = {key: one for key, one in attributes_of(tensor).items() if is_plain(one)}
    beside = f" with {sorted(map(_key_in_words, also.items()))}" if also else ""
    if tensor.layout is not torch.strided or _torch.memory_of(tensor) is None:
        return f"{kind} {tensor.layout} on {tensor.device}{beside}"
    flags = tensor.requires_grad, tensor.is_conj(), tensor.is_neg()
    form = f"{kind} {[*tensor.shape]} strides {[*tensor.stride()]} on {tensor.device} {flags}"
    if tensor.device.type != "cpu" or tensor.nbytes > _MOST_BYTES or tensor.is_quantized:
        return form + beside
    # A graph has what is read on the host as constants.
    with torch.no_grad(), _torch.without_modes():
        content = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
        return f"{form} of {digest(repr(content.view(torch.uint8).tolist()))}{beside}"


def _plain_in_words(value: Any) -> str:
    if isinstance(value, enum.Enum):
        inner = _plain_in_words(value.value) if is_plain(value.value) else ""
        return f"{_name_of(type(value))}.{value.name} {inner}"
    if type(value) is frozenset:
        return f"frozenset of {sorted(map(_plain_in_words, value))}"
    if isinstance(value, tuple):
        items = ", ".join(map(_plain_in_words, tuple.__iter__(value)))
        return f"{type(value).__name__} ({items})"
    return repr(value) if type(value) in ATOMS else f"{type(value).__name__} {value!r}"


def _key_in_words(key: Any) -> str:
    return _plain_in_words(key) if is_plain(key) else _name_of(type(key))


def _function_in_words(name: str, function: Any) -> str:
    if not isinstance(function, types.FunctionType):
        return in_words(name, function)
    title = f"{function.__module__}.{function.__qualname__}"
    cells = [one.cell_contents for one in function.__closure__ or () if _is_filled(one)]
    if is_library(function.__code__.co_filename):
        # The settings that a decorator was made with.
        return f"{title} {[*map(_setting_in_words, cells)]}"
    given = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()]
    scope = function.__globals__
    named = [one for one in function.__code__.co_names if is_plain(scope.get(one, scope))]
    read = [f"{one}={_plain_in_words(scope[one])}" for one in named]
    code = code_in_words(function.__code__)
    return f"{title} {code} defaults {[*map(_key_in_words, given)]} globals {read}"


def _factory_in_words(name: str, value: defaultdict[Any, Any]) -> str:
    """Describe the function that makes missing items, which has no place of its own."""
    made = value.default_factory
    cells = made.__closure__ or () if isinstance(made, types.FunctionType) else ()
    closed = [_key_in_words(one.cell_contents) for one in cells if _is_filled(one)]
    return f"{in_words(name, made)} {closed}"


def _is_filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _setting_in_words(value: Any) -> str:
    if is_plain(value):
        return _plain_in_words(value)
    plain = {key: one for key, one in attributes_of(value).items() if is_plain(one)}
    if isinstance(value, types.FunctionType | type | types.ModuleType):
        plain = {}
    return f"{_name_of(type(value))} {sorted(map(_key_in_words, plain.items()))}"


def _class_in_words(kind: type) -> str:
    """Describe a class, with a digest of the code in the user's classes among its bases."""
    found = []
    for base in kind.__mro__:
        if is_library_class(base):
            continue
        for key, one in sorted(vars(base).items()):
            found += [(key, code_in_words(part.__code__)) for part in functions_in(one)]
    return f"{_name_of(kind)} {digest(repr(found))}" if found else _name_of(kind)


def _operator_in_words(name: str, value: Any) -> str | None:
    """Describe an operator of torch's or a kernel of Triton's; None if it is none."""
    if (operator := _torch.operator_of(value)) is not None:
        title, function = operator
        code = "" if function is None else _function_in_words(name, function)
        return f"{_name_of(type(value))} {title} {code}"
    if type(value).__module__.startswith("triton."):
        if (inner := getattr(value, "fn", None)) is None:
            return _name_of(type(value))
        # The digest of its source, and of what that calls.
        key = getattr(value, "cache_key", None)
        return f"{_name_of(type(value))} {key if isinstance(key, str) else in_words(name, inner)}"
    return None


def _object_in_words(name: str, value: Any) -> str:
    kind = type(value)
    if isinstance(value, _SILENT):
        title = value.__name__ if isinstance(value, types.ModuleType) else ""
        return f"{_name_of(kind)} {title}"
    if has_no_parts(value) and not isinstance(value, _RUNNING):
        # Builtin functions, and the like.
        title = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
        return f"{_name_of(kind)} {title}"
    for base in (int, float, complex, str, bytes):
        if isinstance(value, base):
            return f"{_class_in_words(kind)} {base.__repr__(value)}"
    if has_parts(value):
        return _class_in_words(kind)
    text = repr(value)
    if kind.__module__ in ("_thread", "_weakref", "threading"):
        return _name_of(kind)
    if " at 0x" in text:
        raise ArgumentError(f"{name} is a {_name_of(kind)}, whose contents are not compared")
    return f"{_name_of(kind)} {text}"


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
