"""The instructions of code, which several readers go through one after the other."""

from __future__ import annotations

import dis
import functools
import types

__all__ = ["ASKING", "asked_of_itself", "instructions_of"]

ASKING = frozenset({"attrgetter", "getattr", "hasattr"})
"""Names of what asks for attributes by texts."""


@functools.lru_cache(maxsize=64)
def instructions_of(code: types.CodeType) -> tuple[dis.Instruction, ...]:
    """The instructions of code, without the functions defined in it.

    Also without those that only lengthen the next one, but where code jumps to them.
    """
    found = dis.get_instructions(code)
    return tuple(one for one in found if one.opname != "EXTENDED_ARG" or one.is_jump_target)


@functools.lru_cache(maxsize=4096)
def asked_of_itself(code: types.CodeType) -> frozenset[str] | None:
    """The attributes that a method names of its object; None if it does more with that."""
    itself = code.co_varnames[0] if code.co_argcount else None
    if itself is None or itself in code.co_cellvars or not _WHOLE.isdisjoint(code.co_names):
        return None
    asked = set[str]()
    instructions = instructions_of(code)
    for place, one in enumerate(instructions):
        names = one.argval if isinstance(one.argval, tuple) else (one.argval,)
        if "_FAST" not in one.opname or itself not in names:
            continue
        # As the last one of those that an instruction loads.
        is_loaded = one.opname.startswith("LOAD_FAST") and itself not in names[:-1]
        # It is there twice for `self.count += 1`.
        following = (it for it in instructions[place + 1 : place + 3] if it.opname not in _TWICE)
        user = next(following, None)
        if not is_loaded or user is None or user.opname not in _ASKED:
            return None
        asked.add(str(user.argval))
    return frozenset(asked)


_ASKED = ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR")
_TWICE = ("COPY", "DUP_TOP")
# By these, code comes to all that an object or a class has.
_WHOLE = frozenset({"__class__", "__dict__", "super"})
