"""Conditions on the open size that a compilation takes for true, in a form that can be stored."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["Guard"]


class Guard(tuple[Any, ...]):
    """A condition: the name of a function, and its arguments.

    An argument is a number, the name of an open size, or again a name with arguments.
    """

    @classmethod
    def of(cls, expression: Any) -> Guard:
        """Make a guard of an expression of sympy's.

        Raises:
            ValueError: It has a function that is not known here.
        """
        found = _stored(expression)
        if not isinstance(found, tuple):
            raise ValueError(f"{expression} is no condition")
        return cls(found)

    @classmethod
    def parsed(cls, stored: Any) -> Guard:
        """Make a guard of what JSON has kept.

        Raises:
            ValueError: It is no guard.
        """
        found = _checked(stored)
        if not isinstance(found, tuple):
            raise ValueError(f"a guard is {stored!r:.80}, expected a function with arguments")
        return cls(found)

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Return whether it is true for these sizes; False if it needs others."""
        try:
            return bool(_value(tuple(self), sizes))
        except (KeyError, ZeroDivisionError):
            return False


def _all(*values: Any) -> bool:
    return all(values)


def _any(*values: Any) -> bool:
    return any(values)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Add": lambda *values: sum(values),
    "And": _all,
    "CleanDiv": operator.floordiv,
    "Equality": operator.eq,
    "FloorDiv": operator.floordiv,
    "GreaterThan": operator.ge,
    "LessThan": operator.le,
    "Max": max,
    "Min": min,
    "Mod": operator.mod,
    "Mul": lambda *values: math.prod(values),
    "Not": operator.not_,
    "Or": _any,
    "Pow": operator.pow,
    "PythonMod": operator.mod,
    "StrictGreaterThan": operator.gt,
    "StrictLessThan": operator.lt,
    "Unequality": operator.ne,
}


_OF_ANY = ("Add", "And", "Max", "Min", "Mul", "Or")


def _stored(expression: Any) -> Any:
    if expression.is_Symbol:
        return str(expression)
    if expression.is_Integer:
        return int(expression)
    name = type(expression).__name__
    if name not in _FUNCTIONS:
        raise ValueError(f"{expression} has {name}, which is not known")
    return (name, *map(_stored, expression.args))


def _checked(stored: Any) -> Any:
    if isinstance(stored, str) or type(stored) is int:
        return stored
    is_call = isinstance(stored, (list, tuple)) and stored and isinstance(stored[0], str)
    if not is_call or stored[0] not in _FUNCTIONS:
        raise ValueError(f"a guard has {stored!r:.80}, which is not known")
    # Those of two arguments are operators or comparisons.
    name, count = stored[0], len(stored) - 1
    if count == 0 or (name not in _OF_ANY and count != (1 if name == "Not" else 2)):
        raise ValueError(f"a guard has {name} of {count} arguments")
    return (stored[0], *map(_checked, stored[1:]))


def _value(stored: Any, sizes: Mapping[str, int]) -> Any:
    if isinstance(stored, str):
        return sizes[stored]
    if isinstance(stored, int):
        return stored
    name, *arguments = stored
    return _FUNCTIONS[name](*(_value(one, sizes) for one in arguments))
