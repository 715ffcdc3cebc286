"""The names that stand in code."""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any, NamedTuple

__all__ = ["imports_in", "names_in", "stored_in"]


class _Names(NamedTuple):
    """The names in one code object.

    Attributes:
        all: All names and literal strings.
        stored: Those that it only assigns to.
        imported: The modules that it imports, each after the number of dots before its name.
    """

    all: frozenset[str]
    stored: frozenset[str]
    imported: frozenset[tuple[int, str]]


# By ``id``: hashing a code object takes longer than a call.
_known: dict[int, tuple[CodeType, _Names]] = {}
_STORES = ("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF")
_LOOKED_AT = frozenset(dis.opmap[name] for name in (*_STORES, "IMPORT_NAME"))


def names_in(codes: Iterable[CodeType]) -> frozenset[str]:
    """Return the names and literal strings that stand in code.

    >>> def read(box):
    ...     return box.lid, box["size"]
    >>> sorted(names_in([read.__code__]) - {None})
    ['lid', 'size']
    """
    return _joined(codes, lambda names: names.all)


def stored_in(codes: Iterable[CodeType]) -> frozenset[str]:
    """Return the names that code assigns to, and that no code among it reads.

    >>> def store(box, lid):
    ...     box.lid = lid
    >>> sorted(stored_in([store.__code__]))
    ['lid']
    """
    codes = [*codes]
    read = _joined(codes, lambda names: names.all - names.stored)
    return _joined(codes, lambda names: names.stored) - read


def imports_in(code: CodeType) -> frozenset[tuple[int, str]]:
    """Return the modules that code imports, each after the number of dots before its name."""
    return _of(code).imported


def _joined(codes: Iterable[CodeType], part: Callable[[_Names], frozenset[str]]) -> frozenset[str]:
    found: set[str] = set()
    for code in codes:
        found |= part(_of(code))
    return frozenset(found)


def _of(code: CodeType) -> _Names:
    known = _known.get(id(code))
    if known is None or known[0] is not code:
        known = _known[id(code)] = code, _names(code)
    return known[1]


def _names(code: CodeType) -> _Names:
    found = _literals(code) | {*code.co_names, *code.co_freevars}
    stored: set[str] = set()
    imported: set[tuple[int, str]] = set()
    # Most code has none of these, and to take it apart takes time.
    if not _LOOKED_AT.isdisjoint(code.co_code[::2]):
        read, consts = _literals(code), [0, 0]
        for one in dis.get_instructions(code):
            if one.opname in _STORES:
                stored.add(one.argval)
            elif one.opname == "IMPORT_NAME":
                imported.add((consts[-2], one.argval))
            elif one.opcode in _NAMED:
                read.add(one.argval)
            elif one.opcode in dis.hasconst:
                consts.append(one.argval)
        stored -= read
    return _Names(frozenset(found), frozenset(stored & found), frozenset(imported))


_NAMED = frozenset((*dis.hasname, *dis.hasfree))


def _literals(code: CodeType) -> set[str]:
    found: set[str] = set()
    waiting: list[Any] = [*code.co_consts]
    while waiting:
        one = waiting.pop()
        if type(one) is str:
            found.add(one)
        elif isinstance(one, tuple | frozenset):
            waiting += one
    return found
