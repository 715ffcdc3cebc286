"""The names that the code of a function has."""

from __future__ import annotations

import argparse
import dis
import functools
import inspect
import sys
import threading
import types
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch

from cgraph import _core

__all__ = [
    "asks_for_gradients",
    "globals_in",
    "is_looked_into",
    "is_users",
    "names_in",
    "names_in_methods",
]

# Their code and classes are not looked into: there is no end to what they refer to.
_NOT_USERS = frozenset({*sys.stdlib_module_names, "torch", "cgraph"}) - {"__main__"}


def names_in(function: object, parts: Iterable[torch.nn.Module]) -> frozenset[str]:
    """The names that code has, and that of functions and methods of the user's which it names.

    Args:
        function: The function.
        parts: Modules, whose forward counts as well.
    """
    kinds = {type(one) for one in parts}
    return _names_of([(function, None), *((kind.forward, kind) for kind in kinds)])


def names_in_methods(names: Collection[str], kinds: Iterable[type]) -> frozenset[str]:
    """The names in methods of classes of the user's that code names, or operators but comparisons.

    Args:
        names: Those that the code has.
        kinds: The classes, of objects that it may call them on.
    """
    methods = [
        (value, kind)
        for kind in kinds
        for base in kind.__mro__
        if is_users(vars(base).get("__module__"))
        for name, value in vars(base).items()
        if (name in names or name.startswith("__")) and name not in _NOT_CALLED
    ]
    return _names_of(methods)


def _names_of(functions: Iterable[tuple[object, type | None]]) -> frozenset[str]:
    """The names in functions, each with the class whose method it is, and in what they call."""
    found: set[str] = set()
    # What was seen stays alive, as long as it is known by its number.
    seen: dict[tuple[int, type | None], object] = {}
    waiting = [*functions]
    while waiting:
        one, owner = waiting.pop()
        if (id(one), owner) in seen:
            continue
        seen[id(one), owner] = one
        if isinstance(one, types.FunctionType):
            found.update(_names_in(one.__code__))
        waiting += _called_by(one, owner)
    return frozenset(found)


def asks_for_gradients(names: Iterable[str]) -> bool:
    """Whether code with these names may ask which tensors have gradients, or clear them."""
    return not _OF_GRADIENTS.isdisjoint(names)


def is_users(module: object) -> bool:
    """Whether a module's name is that of one of the user's."""
    return isinstance(module, str) and module.partition(".")[0] not in _NOT_USERS


def is_looked_into(kind: type) -> bool:
    """Whether objects of a class have attributes that a user's code sets, and that count."""
    return issubclass(kind, _NAMESPACES) or is_users(vars(kind).get("__module__"))


@functools.lru_cache(maxsize=4096)
def globals_in(code: types.CodeType) -> tuple[str, ...]:
    """The globals that code names, with that of the functions defined in it; each once."""
    loads = (one for one in dis.get_instructions(code) if one.opname in _LOADS)
    found = {one.argval: None for one in loads}
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            found.update(dict.fromkeys(globals_in(inner)))
    return tuple(found)


def _called_by(one: Any, owner: type | None) -> Iterator[tuple[object, type | None]]:
    """What a function or another callable may call, each with the class whose method it is."""
    # By their types: other objects may stand for these, and raise when they are asked.
    kind = type(one)
    if issubclass(kind, types.MethodType):
        yield one.__func__, type(one.__self__)
    elif issubclass(kind, functools.partial):
        yield one.func, None
    elif issubclass(kind, _core.Dispatcher):
        yield one.__wrapped__, owner
    elif issubclass(kind, property):
        yield from ((way, owner) for way in (one.fget, one.fset))
    elif issubclass(kind, functools.cached_property | functools.partialmethod):
        yield one.func, owner
    elif issubclass(kind, functools._lru_cache_wrapper):
        yield one.__wrapped__, owner
    elif issubclass(kind, staticmethod | classmethod):
        yield one.__func__, owner
    elif issubclass(kind, types.FunctionType):
        if not is_users(one.__globals__.get("__name__")):
            # That of a decorator, as of `torch.no_grad()`.
            yield vars(one).get("__wrapped__"), owner
            return
        yield from ((one.__globals__.get(name), None) for name in globals_in(one.__code__))
        cells = (cell for cell in one.__closure__ or () if cell != _UNASSIGNED)
        yield from ((cell.cell_contents, None) for cell in cells)
        if owner is not None:
            for name in _names_in(one.__code__):
                yield inspect.getattr_static(owner, name, None), owner
    elif is_users(vars(kind).get("__module__")) and not issubclass(kind, type):
        yield inspect.getattr_static(kind, "__call__", None), kind


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> frozenset[str]:
    """Names of globals, attributes and methods, with those of the functions defined in it.

    Also those in texts, as for ``getattr`` and ``operator.attrgetter``.
    """
    inner = (one for one in code.co_consts if isinstance(one, types.CodeType))
    texts = (one for one in code.co_consts if isinstance(one, str) and len(one) < _LONG)
    words = (word for text in texts for word in text.split(".") if word.isidentifier())
    return frozenset(code.co_names).union(words, *map(_names_in, inner))


# What makes an object is called before anybody has it, and what shows and compares one names all
# that it has.
_NOT_CALLED = frozenset(
    {
        *("__init__", "__new__", "__post_init__", "__del__", "__repr__", "__str__", "__eq__"),
        *("__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__getstate__", "__setstate__"),
        *("__reduce__", "__reduce_ex__", "__copy__", "__deepcopy__", "__replace__"),
    }
)
_OF_GRADIENTS = frozenset(
    {"grad", "zero_grad", "clip_grad_norm_", "clip_grad_norm", "clip_grad_value_", "unscale_"}
)
# Longer texts are no names.
_LONG = 100
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME")
_UNASSIGNED = types.CellType()
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace, threading.local)
