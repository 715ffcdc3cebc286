"""The names that stand in code."""

from __future__ import annotations

from collections.abc import Iterable
from types import CodeType
from typing import Any

__all__ = ["names_in"]

# By ``id``: hashing a code object takes longer than a call.
_known: dict[int, tuple[CodeType, frozenset[str]]] = {}


def names_in(codes: Iterable[CodeType]) -> frozenset[str]:
    """Return the names and literal strings that stand in code.

    >>> def read(box):
    ...     return box.lid, box["size"]
    >>> sorted(names_in([read.__code__]) - {None})
    ['lid', 'size']
    """
    found: set[str] = set()
    for code in codes:
        known = _known.get(id(code))
        if known is None or known[0] is not code:
            known = _known[id(code)] = code, _names(code)
        found |= known[1]
    return frozenset(found)


def _names(code: CodeType) -> frozenset[str]:
    found = {*code.co_names, *code.co_freevars}
    waiting: list[Any] = [*code.co_consts]
    while waiting:
        one = waiting.pop()
        if type(one) is str:
            found.add(one)
        elif isinstance(one, tuple | frozenset):
            waiting += one
    return frozenset(found)
