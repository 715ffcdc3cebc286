"""Whether a function draws on from where a random state is, or sets it, which replays do not."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from cgraph.errors import CaptureError

__all__ = ["RandomOfPython", "draws_on", "random_state_is_set"]

# No call draws so many numbers. Offsets are multiples of four.
_AHEAD = 1 << 40


@contextmanager
def draws_on(generators: Sequence[torch.Generator]) -> Iterator[None]:
    """A ``with`` block with a call, in which generators are far ahead of where they are.

    torch takes it for no change if a captured function seeds with the seed that there is, as after
    the calls before. So what these do is looked at.

    Args:
        generators: Those of the device, whose states have an offset.

    Raises:
        CaptureError: One of them is not ahead any more: the call has set its state.
    """
    before = [(one, one.initial_seed(), one.get_offset()) for one in generators]
    for generator, _, offset in before:
        generator.set_offset(offset + _AHEAD)
    is_set = False
    try:
        yield
    finally:
        for generator, seed, offset in before:
            now = generator.get_offset()
            is_ahead = generator.initial_seed() == seed and now >= offset + _AHEAD
            if is_ahead:
                generator.set_offset(now - _AHEAD)
            is_set |= not is_ahead
    if is_set:
        raise random_state_is_set()


def random_state_is_set() -> CaptureError:
    """What a function is refused with that does so."""
    return CaptureError(
        "the function seeds random numbers or sets their state, and replays do not: do it before"
        " the call, or pass random numbers as an argument"
    )


class RandomOfPython:
    """The states of Python's and NumPy's random numbers, as they are now."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = _state_of_numpy()

    @property
    def has_moved(self) -> bool:
        """Whether some were drawn since, or a seed was set."""
        if random.getstate() != self._python:
            return True
        numpy = _state_of_numpy()
        return self._numpy is not None and numpy is not None and _differ(numpy, self._numpy)

    def put_back(self) -> None:
        """Let them be drawn again."""
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


def _state_of_numpy() -> dict[str, Any] | None:
    """That of the functions of ``numpy.random``; None without NumPy, or of another generator."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not hasattr(numpy, "random"):
        return None
    state: dict[str, Any] = numpy.random.get_state(legacy=False)
    return state if state["bit_generator"] == "MT19937" else None


def _differ(one: dict[str, Any], other: dict[str, Any]) -> bool:
    keys = one["state"]["key"].tobytes(), other["state"]["key"].tobytes()
    places = one["state"]["pos"], other["state"]["pos"]
    return bool(places[0] != places[1] or keys[0] != keys[1])
