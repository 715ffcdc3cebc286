"""The names that the code of a function has, and that of what it calls."""

from __future__ import annotations

import argparse
import collections
import dis
import functools
import inspect
import sys
import threading
import types
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from cgraph import _core

__all__ = [
    "Reached",
    "asks_for_gradients",
    "globals_in",
    "is_looked_into",
    "is_users",
    "named_of_module",
    "reached_by",
    "reached_in_methods",
]

# Their code and classes are not looked into: there is no end to what they refer to.
_NOT_USERS = frozenset({*sys.stdlib_module_names, "torch", "cgraph"}) - {"__main__"}


class Reached(NamedTuple):
    """What code comes to.

    Attributes:
        names: The names that it has.
        functions: Functions of the user's that it consists of, by their numbers.
        kinds: The classes of the user's whose methods are among them.
    """

    names: frozenset[str]
    functions: dict[int, types.FunctionType]
    kinds: frozenset[type]

    def __or__(self, other: Reached) -> Reached:
        """What both come to."""
        functions = {**self.functions, **other.functions}
        return Reached(self.names | other.names, functions, self.kinds | other.kinds)


def reached_by(function: object, parts: Iterable[torch.nn.Module]) -> Reached:
    """What a function comes to, and functions and methods of the user's which it names.

    Args:
        function: The function.
        parts: Modules, whose forward and hooks count as well.
    """
    parts = [*parts]
    kinds = {type(one) for one in parts}
    hooks = (hook for one in parts for kind in _HOOKS for hook in vars(one).get(kind, {}).values())
    hooked = ((hook, None) for hook in hooks)
    return _reached([(function, None), *((kind.forward, kind) for kind in kinds), *hooked])


def reached_in_methods(names: Collection[str], kinds: Iterable[type]) -> Reached:
    """What methods come to that code names of classes of the user's, or operators but comparisons.

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
        if (name in names or name.startswith("__") or name == "forward") and name not in _NOT_CALLED
    ]
    return _reached(methods)


def _reached(functions: Iterable[tuple[object, type | None]]) -> Reached:
    """What functions come to, each with the class whose method it is, and what they call."""
    names: set[str] = set()
    found: dict[int, types.FunctionType] = {}
    kinds: set[type] = set()
    # What was seen stays alive, as long as it is known by its number.
    seen: dict[tuple[int, type | None], object] = {}
    waiting = [*functions]
    while waiting:
        one, owner = waiting.pop()
        if (id(one), owner) in seen:
            continue
        seen[id(one), owner] = one
        if isinstance(one, types.FunctionType):
            names.update(_names_in(one.__code__))
            if is_users(one.__globals__.get("__name__")):
                found[id(one)] = one
                kinds.update(() if owner is None else (owner,))
        waiting += _called_by(one, owner)
    return Reached(frozenset(names), found, frozenset(kinds))


def named_of_module(
    module: types.ModuleType, names: frozenset[str], depth: int = 2
) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """What code with these names may use of a module of Python's, and of those inside it.

    Each with its name and the dictionary that has it.
    """
    if not is_users(module.__name__):
        return
    values = vars(module)
    for name in names.intersection(values):
        value = values[name]
        if not isinstance(value, types.ModuleType):
            yield values, name, value
        elif depth > 0:
            yield from named_of_module(value, names, depth - 1)


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
        names = _names_in(one.__code__)
        for name in globals_in(one.__code__):
            yield from _called_of(one.__globals__.get(name), names)
        for cell in (cell for cell in one.__closure__ or () if cell != _UNASSIGNED):
            yield from _called_of(cell.cell_contents, names)
        if owner is not None:
            for name in names:
                yield inspect.getattr_static(owner, name, None), owner
    elif issubclass(kind, torch.nn.Module):
        yield kind.forward, kind
    elif is_users(vars(kind).get("__module__")) and not issubclass(kind, type):
        yield inspect.getattr_static(kind, "__call__", None), kind


def _called_of(value: Any, names: frozenset[str]) -> Iterator[tuple[object, type | None]]:
    """What code with these names may call of a value, each with the class whose method it is."""
    yield value, None
    if type(value) in (list, tuple, dict) and len(value) <= _MOST_FUNCTIONS:
        items = value.values() if isinstance(value, dict) else value
        yield from ((one, None) for one in items if isinstance(one, _FUNCTIONS))
    elif issubclass(type(value), types.ModuleType):
        yield from ((one, None) for _, _, one in named_of_module(value, names))
    elif issubclass(type(value), type) and is_users(vars(value).get("__module__")):
        of_autograd = issubclass(value, torch.autograd.Function)
        for name in names | _OF_AUTOGRAD if of_autograd else names:
            found = inspect.getattr_static(value, name, None)
            if isinstance(found, staticmethod | classmethod | types.FunctionType):
                yield found, value


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
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_AUTOGRAD = frozenset({"forward", "setup_context", "backward"})
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
# Larger containers are of data.
_MOST_FUNCTIONS = 256
# Longer texts are no names.
_LONG = 100
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME")
_UNASSIGNED = types.CellType()
_NAMESPACES = (
    *(types.SimpleNamespace, argparse.Namespace, threading.local),
    *(collections.UserDict, collections.UserList),
)
