"""Reads from the instructions of code what becomes of the result of a call, and who reads what."""

from __future__ import annotations

import bisect
import dis
import functools
from collections.abc import Iterator
from types import CodeType
from typing import Any, NamedTuple

__all__ = ["Target", "arguments_of", "assigned_after", "unread_after"]


class Target(NamedTuple):
    """What a result is assigned to.

    Attributes:
        kind: The name of the instruction that stores it.
        name: The variable, or that of the object which has the attribute or item.
        item: The name of the attribute; the item, or the variable that has it.
        is_constant: Whether ``item`` is the item itself.
    """

    kind: str
    name: str
    item: Any = None
    is_constant: bool = True


@functools.lru_cache(maxsize=1024)
def arguments_of(code: CodeType, instruction: int) -> int | None:
    """How many arguments a plain call has; None if it hands a tuple on, as ``f(*args)`` does."""
    before = [one for one in dis.get_instructions(code) if one.offset <= instruction]
    last = before[-1] if before else None
    if last is None or not last.opname.startswith("CALL") or last.opname == "CALL_FUNCTION_EX":
        return None
    return last.arg


@functools.lru_cache(maxsize=1024)
def assigned_after(code: CodeType, instruction: int) -> tuple[Target, ...]:
    """What the result of an instruction is assigned to."""
    found: list[Target] = []
    # Variables and constants that were loaded: the object of an attribute or item, and the item.
    loaded: list[tuple[Any, bool]] = []
    for one in dis.get_instructions(code):
        kind = one.opname
        if one.offset <= instruction or kind in _PASSED_OVER:
            continue
        given = one.argval if isinstance(one.argval, tuple) else (one.argval,)
        if kind.startswith("LOAD_") and len(loaded) < 2:
            loaded += [(name, "_CONST" in kind or "_SMALL_INT" in kind) for name in given]
        elif kind == "STORE_ATTR" and [is_constant for _, is_constant in loaded] == [False]:
            found.append(Target(kind, loaded.pop()[0], one.argval))
        elif kind == "STORE_SUBSCR" and len(loaded) == 2 and not loaded[0][1]:
            found.append(Target(kind, loaded[0][0], *loaded[1]))
            loaded = []
        elif loaded or not kind.startswith("STORE_") or kind in ("STORE_ATTR", "STORE_SUBSCR"):
            break
        elif kind == "STORE_FAST_LOAD_FAST":
            found.append(Target(kind, given[0]))
            loaded = [(given[1], False)]
        else:
            found += [Target(kind, name) for name in given]
    return tuple(found)


@functools.lru_cache(maxsize=1024)
def unread_after(code: CodeType, instruction: int) -> frozenset[str]:
    """Local variables that nothing reads behind an instruction, unless it was assigned before."""
    offsets, read = _read_behind(code)
    if not offsets:
        return frozenset()
    still = read[bisect.bisect_right(offsets, instruction) - 1]
    return frozenset(code.co_varnames).difference(code.co_cellvars, still)


@functools.lru_cache(maxsize=256)
def _read_behind(code: CodeType) -> tuple[list[int], list[set[str]]]:
    """Where the instructions are, and what is read behind each; nothing if that may be anything."""
    instructions = [*dis.get_instructions(code)]
    # Before Python 3.11 a block says itself that it has a handler, and nothing where it ends.
    has_blocks = any(one.opname.startswith("SETUP_") for one in instructions)
    if has_blocks or not _READING_ALL.isdisjoint(code.co_names):
        return [], []
    offsets = [one.offset for one in instructions]
    places = {one.offset: place for place, one in enumerate(instructions)}
    following = [[*_following(one, place, places)] for place, one in enumerate(instructions)]
    for entry in getattr(dis.Bytecode(code), "exception_entries", ()):
        first, last = (bisect.bisect_left(offsets, end) for end in (entry.start, entry.end))
        for place in range(first, last):
            following[place].append(places[entry.target])
    # Which variables are read behind each, until nothing is added any more.
    read = [set[str]() for _ in instructions]
    is_new = True
    while is_new:
        is_new = False
        for place in reversed(range(len(instructions))):
            later = set[str]().union(*(read[one] for one in following[place]))
            now = _before(instructions[place], later)
            is_new |= now != read[place]
            read[place] = now
    return offsets, [set[str]().union(*(read[one] for one in some)) for some in following]


def _following(one: dis.Instruction, place: int, places: dict[int, int]) -> Iterator[int]:
    """The places of what may come next, but for handlers of exceptions."""
    if one.opcode in dis.hasjrel or one.opcode in dis.hasjabs:
        yield places[one.argval]
    if one.opname not in _ENDING and place + 1 < len(places):
        yield place + 1


def _before(one: dis.Instruction, later: set[str]) -> set[str]:
    """The variables that are read from an instruction on, of those that are read behind it."""
    if "_FAST" not in one.opname:
        return later
    names = one.argval if isinstance(one.argval, tuple) else (one.argval,)
    if one.opname == "STORE_FAST_LOAD_FAST":
        return {*(later - {names[0]}), names[1]} if names[0] != names[1] else later - {names[0]}
    # Who deletes a variable means it to be there until then.
    is_read = one.opname.startswith(("LOAD", "DELETE"))
    return later.union(names) if is_read else later.difference(names)


# They change nothing of what comes next, or make a second reference for another target.
_PASSED_OVER = {"UNPACK_SEQUENCE", "CACHE", "EXTENDED_ARG", "COPY", "DUP_TOP"}
# Behind these comes what they jump to, or nothing.
_ENDING = {
    *("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE", "JUMP"),
    *("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"),
}
# What is called by these may read all variables.
_READING_ALL = {"locals", "vars", "dir", "eval", "exec", "f_locals", "_getframe", "currentframe"}
