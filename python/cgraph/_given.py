"""Checks of what users give."""

from __future__ import annotations

from typing import Any

from cgraph._text import shown
from cgraph.errors import ArgumentError

__all__ = ["require_type"]


def require_type(name: str, given: object, kind: Any, expected: str) -> None:
    """Raise unless a value is of a type.

    Args:
        name: The name of the argument.
        given: The value.
        kind: The type or several, as ``isinstance`` takes them.
        expected: What was expected, in words.

    Raises:
        ArgumentError: It is not.

    >>> require_type("dim", 2, int, "a number")
    """
    if not isinstance(given, kind):
        raise ArgumentError(f"{name} is {shown(given):.80}, expected {expected}")
