"""The objects that a function could read, by the names in its code alone: nothing runs."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from types import CodeType
from typing import Any

import torch

from cgraph import _torch
from cgraph._python.libraries import is_library, is_library_class
from cgraph._python.names import names_in
from cgraph._python.places import Places

__all__ = ["functions_in", "named_by"]

_MOST_SETTINGS = 1 << 16
"""The most places that are looked at with all settings."""


def named_by(
    function: Callable[..., Any],
    objects: Sequence[tuple[str, Any]] = (),
    modules: Sequence[tuple[str, Any]] = (),
    *,
    callees: bool = False,
    settings: bool = False,
) -> Places:
    """Return the places that a function could read by all names in its code, and its arguments.

    Args:
        function: The function.
        objects: Objects among its arguments, with their names.
        modules: Modules among its arguments, with their names.
        callees: Use also all names in the functions that it names or reaches, and in the methods
            of the objects that it reaches.
        settings: Use also the names in the methods of torch's modules that it reaches, as ``eps``,
            and those of hooks.
    """
    called = inspect.getattr_static(type(function), "__call__", None)
    codes: dict[CodeType, dict[str, Any]] = {}
    _add_codes(codes, [function, called], callees=callees)
    while True:
        walk = Places(names_in(codes), codes, {})
        walk.room = _MOST_SETTINGS if settings else walk.room
        walk.walk(function, objects, modules)
        known = len(codes)
        if callees:
            found = [one.value for one in walk.found]
            # In an order that is the same in each process.
            kinds = dict.fromkeys(
                one if isinstance(one, type) and settings else type(one) for one in found
            )
            _add_codes(codes, [*found, *_methods_of(kinds)], callees=True)
        if settings and walk.modules:
            kinds = dict.fromkeys(map(type, walk.modules))
            found = [_torch.caller_of_forwards(), *_methods_of(kinds, of_library=True)]
            codes |= {one.__code__: one.__globals__ for one in found}
        if len(codes) == known:
            return walk


def _add_codes(codes: dict[CodeType, dict[str, Any]], waiting: list[Any], *, callees: bool) -> None:
    """Add the code of functions, and of the functions that they close over or name."""
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        if isinstance(one, types.MethodType | staticmethod | classmethod):
            one = one.__func__
        if isinstance(one, functools.partial):
            waiting.append(one.func)
        if callees and isinstance(one, functools._lru_cache_wrapper):
            waiting.append(one.__wrapped__)
        if not isinstance(one, types.FunctionType) or one.__code__ in codes or id(one) in seen:
            continue
        seen.add(id(one))
        if callees and is_library(one.__code__.co_filename):
            # A decorator of a library's may stand around a function of the user's.
            waiting += [vars(one)["__wrapped__"]] if "__wrapped__" in vars(one) else []
            continue
        scope, inside = one.__globals__, [one.__code__]
        while inside:
            code = inside.pop()
            codes[code] = scope
            # Comprehensions and functions inside of it.
            inside += [part for part in code.co_consts if isinstance(part, CodeType)]
            if callees:
                waiting += [scope[name] for name in code.co_names if name in scope]
        with suppress(ValueError):
            waiting += [cell.cell_contents for cell in one.__closure__ or ()]


def _methods_of(kinds: Iterable[type], *, of_library: bool = False) -> Iterator[types.FunctionType]:
    """Yield the functions in the user's classes, or in those of torch's modules."""
    for kind in kinds:
        for base in kind.__mro__:
            if is_library_class(base) is of_library and base is not torch.nn.Module:
                for one in vars(base).values():
                    yield from functions_in(one)


def functions_in(value: Any) -> list[types.FunctionType]:
    """Return the functions in an attribute of a class: itself, or behind what is around it."""
    found = [value]
    if isinstance(value, property):
        found = [value.fget, value.fset]
    elif isinstance(value, staticmethod | classmethod | types.MethodType):
        found = [value.__func__]
    elif isinstance(value, functools.cached_property):
        found = [value.func]
    # Only of what Python makes: other objects may run code when they are asked.
    around = types.FunctionType, functools._lru_cache_wrapper
    inside = [vars(one).get("__wrapped__") for one in found if isinstance(one, around)]
    return [one for one in (*found, *inside) if isinstance(one, types.FunctionType)]
