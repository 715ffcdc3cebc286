"""The state of torch's CUDA generators, read where it lies in memory."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterable
from typing import Any

import torch

from cgraph._torch.private_names import torch_version

__all__ = ["CapturedDraws"]

# ATen/cuda/CUDAGeneratorImpl.h of these versions was read. Later ones keep a state a capture.
_FIRST, _BEYOND = (2, 8), (2, 12)

# In bytes: the state in ``at::CUDAGeneratorImpl``, and its fields.
_STATE = 80
_SEED, _OFFSET, _CAPTURED, _IS_CAPTURING = 16, 24, 32, 40


class CapturedDraws:
    """The random numbers that an open capture draws, told without a replay.

    Args:
        generators: The generators. The capture has registered them when it has begun.
    """

    def __init__(self, generators: Iterable[torch.Generator]) -> None:
        # A capture draws from these states, whichever ones the generators get meanwhile.
        # Two generators may share one, and then draw as one.
        states: dict[int, torch.Generator] = {}
        for one in generators:
            states.setdefault(_state_of(one), one)
        self._states = states

    @staticmethod
    def are_told() -> bool:
        """Return whether this torch keeps the states where they are looked for."""
        return _is_known_layout()

    def drawn(self) -> list[tuple[torch.Generator, int]]:
        """Return the generators drawn from, and the steps of their offsets; the host is alive."""
        steps = [(one, _word(state + _CAPTURED)) for state, one in self._states.items()]
        return [(one, step) for one, step in steps if step]


@functools.cache
def _is_known_layout() -> bool:
    """Compare the fields of a generator with torch's answers for it."""
    if not _FIRST <= torch_version() < _BEYOND:
        return False
    generator = torch.Generator(device="cuda")
    for _ in range(2):
        seed = int.from_bytes(os.urandom(7), "big")
        offset = 4 * int.from_bytes(os.urandom(5), "big")
        generator.manual_seed(seed)
        generator.set_offset(offset)
        state = _state_of(generator)
        # What it refers to is memory of torch's objects, or the words beside it would not agree.
        if state % 8 or state < 1 << 16 or state >> 48:
            return False
        found = [_word(state + place) for place in (_SEED, _OFFSET, _CAPTURED)]
        if found != [seed, offset, 0] or ctypes.c_uint8.from_address(state + _IS_CAPTURING).value:
            return False
    return True


def _state_of(generator: Any) -> int:
    return _word(generator._cdata + _STATE)


def _word(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value
