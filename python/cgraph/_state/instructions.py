"""The instructions of code, which several readers go through one after the other."""

from __future__ import annotations

import dis
import functools
import types

__all__ = ["ASKING", "instructions_of"]

ASKING = frozenset({"attrgetter", "getattr", "hasattr"})
"""Names of what asks for attributes by texts."""


@functools.lru_cache(maxsize=64)
def instructions_of(code: types.CodeType) -> tuple[dis.Instruction, ...]:
    """The instructions of code, without the functions defined in it.

    Also without those that only lengthen the next one, but where code jumps to them.
    """
    found = dis.get_instructions(code)
    return tuple(one for one in found if one.opname != "EXTENDED_ARG" or one.is_jump_target)
