"""The lines of code that change a place, found in the code by its name."""

from __future__ import annotations

import dis
import re
from collections.abc import Iterable
from types import CodeType

from cgraph._source import is_omitted

__all__ = ["line_that_changes"]

_STORES = ("STORE_ATTR", "STORE_GLOBAL", "STORE_NAME", "STORE_DEREF", "DELETE_ATTR")
_ITEMS = ("STORE_SUBSCR", "DELETE_SUBSCR")
# Methods of Python's containers that change them.
_METHODS = frozenset(
    "add append appendleft clear discard extend insert pop popitem popleft remove reverse rotate"
    " setdefault sort update".split()
)


def line_that_changes(name: str, codes: Iterable[CodeType]) -> str | None:
    """Return the first line of a user's code that assigns to a place or changes what is there.

    Args:
        name: The name of the place, as ``seen``, ``self.count`` or ``state['step']``.
        codes: The code that ran.

    Returns:
        The line as ``file:line``; None if none names the place.
    """
    # Items are changed through what holds them.
    known = re.sub(r"\[.*?\]|\(.*?\)", "", name).split(".")[-1]
    for code in codes:
        if not is_omitted(code.co_filename) and (line := _line_in(code, known)) is not None:
            return f"{code.co_filename}:{line}"
    return None


def _line_in(code: CodeType, name: str) -> int | None:
    loaded: int | None = None
    line, lines = code.co_firstlineno, dict(dis.findlinestarts(code))
    for one in dis.get_instructions(code):
        line = lines.get(one.offset) or line
        if one.argval == name:
            if one.opname in _STORES:
                return line
            loaded = line
        elif loaded == line and (one.opname in _ITEMS or one.argval in _METHODS):
            return line
    return None
