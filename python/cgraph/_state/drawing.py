"""Whether a function draws on from where a random state is, or sets it, which replays do not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from cgraph.errors import CaptureError

__all__ = ["draws_on", "random_state_is_set"]

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
