"""The instructions of code, which several readers go through one after the other."""

from __future__ import annotations

import dis
import functools
import types

__all__ = ["instructions_of"]


@functools.lru_cache(maxsize=64)
def instructions_of(code: types.CodeType) -> tuple[dis.Instruction, ...]:
    """The instructions of code, without the functions defined in it."""
    return tuple(dis.get_instructions(code))
