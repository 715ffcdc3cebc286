"""Functions that a command line names as ``module:function`` or ``file.py:function``."""

from __future__ import annotations

import importlib
import inspect
import runpy
import sys
from collections.abc import Callable
from inspect import ismodule
from pathlib import Path
from typing import Any

from cgraph._text import plural
from cgraph.errors import ArgumentError

__all__ = ["Target", "named"]


class Target:
    """A function with the arguments of one call.

    Args:
        function: The function.
        args: Its arguments.
        name: Its name, for people.
    """

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], name: str) -> None:
        self.function, self.args, self.name = function, args, name

    def __call__(self) -> Any:
        """Call the function."""
        return self.function(*self.args)

    def require_args(self) -> None:
        """Raise an error that names the option if the function cannot have these arguments."""
        try:
            inspect.signature(self.function).bind(*self.args)
        except TypeError as error:
            raise ArgumentError(
                f"{self.name} with {plural(len(self.args), 'argument')}: {error}. Fix: give its"
                " arguments by their name in the same module: --args NAME"
            ) from None
        except ValueError:  # it has no signature
            return


def named(place: str, args: str | None = None) -> Target:
    """Return what ``module:function`` or ``file.py:function`` names.

    Args:
        place: The function; behind the colon also an attribute, as ``model.forward``.
        args: The name, in the same module, of the arguments: a tuple, one argument, or a function
            that returns either. By default there are none.

    Raises:
        ArgumentError: There is no such module, function or name, or arguments are missing.
    """
    where, colon, name = place.rpartition(":")
    if not colon or not name:
        raise ArgumentError(f"{place!r} names no function: write module:function, or file.py:name")
    names = _names_of(where)
    function = _found(names, name, where)
    if not callable(function):
        kind = type(function).__name__
        raise ArgumentError(f"{place} is a {kind}, expected something that can be called")
    given = () if args is None else _found(names, args, where)
    if args is not None and callable(given) and not hasattr(given, "untyped_storage"):
        given = given()
    taken = tuple(given) if isinstance(given, (tuple, list)) else (given,)
    target = Target(function, taken, name)
    target.require_args()
    return target


def _names_of(where: str) -> dict[str, Any]:
    """Return the global names of a module or a file."""
    if where.endswith(".py"):
        path = Path(where)
        if not path.is_file():
            raise ArgumentError(f"{where} is no file: name one, or a module without .py")
        sys.path.insert(0, str(path.parent.resolve()))
        return runpy.run_path(str(path))
    sys.path.insert(0, "")
    try:
        return vars(importlib.import_module(where))
    except ModuleNotFoundError as error:
        if error.name is None or not where.startswith(error.name):
            raise
        raise ArgumentError(f"there is no module {where!r} here: {error}") from None


def _found(names: dict[str, Any], dotted: str, where: str) -> Any:
    first, *others = dotted.split(".")
    if first not in names:
        own = (one for one in names if not (one.startswith("_") or ismodule(names[one])))
        known = ", ".join(sorted(own)[:20])
        raise ArgumentError(f"{where} has no name {first!r}; it has {known}")
    found = names[first]
    for one in others:
        try:
            found = getattr(found, one)
        except AttributeError:
            raise ArgumentError(f"{first!r} of {where} has no {one!r}") from None
    return found
