"""A graphed function as an attribute of a class: a method with graphs for each object."""

from __future__ import annotations

import copy
import functools
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from cgraph import _core, _torch
from cgraph._graphed.options import Options
from cgraph.errors import ArgumentError

__all__ = ["Binding", "bound_to", "is_method", "is_named"]


class FunctionProxy(_core.Dispatcher):
    """A dispatcher that forwards attributes it does not have to its function or module."""

    _fn: Callable[..., Any]

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute of the module if it has one of that name, such as ``training``."""
        is_public = not name.startswith("_") and not hasattr(type(self), name)
        if is_public and isinstance(self._fn, torch.nn.Module) and hasattr(self._fn, name):
            setattr(self._fn, name, value)
        else:
            object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        """Delete an attribute from where :meth:`__setattr__` would set it."""
        is_own = name.startswith("_") or name in vars(self) or hasattr(type(self), name)
        if not is_own and isinstance(self._fn, torch.nn.Module):
            delattr(self._fn, name)
        else:
            object.__delattr__(self, name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        found = getattr(self._fn, name)
        is_method = name in _torch.OF_ITSELF and getattr(found, "__self__", None) is self._fn
        return functools.partial(self._itself, found) if is_method else found

    def _itself(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a module's method; return this proxy if it returns the module."""
        result = method(*args, **kwargs)
        return self if result is self._fn else result


class Binding(FunctionProxy):
    """A graphed function that classes may have as a method."""

    _options: Options
    # The name of the method, and the name under which objects keep their graphs.
    _attribute: str
    _kept_as: str
    _class: type | None = None
    # The binding in the class, if this is the method of one object.
    _bound_of: Binding | None = None

    @property
    def _name(self) -> str:
        return getattr(self._fn, "__qualname__", type(self._fn).__qualname__)

    @property
    def _is_method(self) -> bool:
        """True if it gets the object that it is called on."""
        return is_method(self._fn)

    @property
    def __isabstractmethod__(self) -> bool:
        return bool(getattr(self._fn, "__isabstractmethod__", False))

    def _is_called_on(self, args: tuple[Any, ...]) -> bool:
        """Return whether it is called through its class: then the object's graphs serve."""
        is_object = bool(args) and not isinstance(args[0], type)
        return is_object and self._is_method and isinstance(args[0], self._class or ())

    def __set_name__(self, owner: type, name: str) -> None:
        """Learn the name of this method."""
        self._attribute = name
        self._class = owner
        self._kept_as = f"{owner.__qualname__}.{name}"

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Return the graphed method of an object, which has graphs of its own."""
        if instance is None or not self._is_method:
            return self
        if isinstance(instance, type):
            return types.MethodType(self, instance)

        def make(method: Any, kept_as: str) -> Any:
            made = type(self)(method, self._options)  # type: ignore[call-arg, arg-type]
            made._attribute, made._kept_as, made._bound_of = self._attribute, kept_as, self
            return made

        return bound_to(instance, self, self._kept_as, make)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy without graphs, as these know only the original."""
        function = copy.deepcopy(self._fn, memo)
        if function is self._fn:
            return self
        copied: Any = type(self)(function, self._options)  # type: ignore[call-arg, arg-type]
        copied._attribute, copied._kept_as = self._attribute, self._kept_as
        copied._bound_of = self._bound_of
        return copied

    def __reduce__(self) -> Any:
        """Pickle by name or by function, without graphs and without pool."""
        if self._bound_of is not None:
            return getattr, (self._fn.__self__, self._attribute)  # type: ignore[attr-defined]
        if is_named(self, self._fn, self._name):
            return self._name
        return type(self), (self._fn, replace(self._options, pool=None))


# Callables that classes do not bind. From Python 3.14 on partial functions are methods.
_BOUND: tuple[type, ...] = (staticmethod, types.MethodType)
if sys.version_info < (3, 14):
    _BOUND = (*_BOUND, functools.partial)


def is_method(function: object) -> bool:
    """Return whether a function in a class gets the object that it is called on."""
    return hasattr(type(function), "__get__") and not isinstance(function, _BOUND)


def bound_to(instance: Any, unbound: Any, kept_as: str, make: Callable[[Any, str], Any]) -> Any:
    """Return an object's own binding of a method, which the object keeps.

    Args:
        instance: The object.
        unbound: The method of the class; it has the function as ``__wrapped__``. What is bound has
            it as ``_bound_of``.
        kept_as: The name under which the object keeps it, unless another method has that.
        make: Called with the function's method of the object and with the name, if there is none.
    """
    name = getattr(unbound.__wrapped__, "__qualname__", kept_as)
    try:
        attributes = instance.__dict__
    except AttributeError:
        raise ArgumentError(
            f"{type(instance).__name__} has no __dict__ to keep the graphs of {name} in:"
            " graph a function instead"
        ) from None
    # Not by the name of the method: a class that overrides it calls this one by ``super()``.
    bound = attributes.get(kept_as)
    while bound is not None and bound._bound_of is not unbound:
        # It belongs to another method of the same name, as of a base class with the same name.
        kept_as += "'"
        bound = attributes.get(kept_as)
    # A copy of an object has the attributes of the original.
    if bound is not None and bound.__wrapped__.__self__ is instance:
        return bound
    # As Python does: a method forwards attributes to its function.
    bind: Any = type(unbound.__wrapped__)
    bound = make(bind.__get__(unbound.__wrapped__, instance, type(instance)), kept_as)
    # If several threads come here first, one wins.
    kept = attributes.setdefault(kept_as, bound)
    if kept.__wrapped__.__self__ is not instance:
        attributes[kept_as] = kept = bound
    return kept


def is_named(found: object, function: object, name: str) -> bool:
    """Return whether the module of a function has something under the function's name."""
    at: Any = sys.modules.get(getattr(function, "__module__", None) or "")
    for one in name.split("."):
        at = getattr(at, one, None)
    return at is found
