"""Whether a function draws on from where a random state is, or sets it, which replays do not."""

from __future__ import annotations

import io
import queue
import random
import sys
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Any

import torch

from cgraph._state.code import is_users
from cgraph.errors import CaptureError

__all__ = ["RandomOfPython", "draws_on", "is_drained", "is_drawn_from", "random_state_is_set"]

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
        " the call, or pass random numbers as an argument; cgraph.explain(function, ...) names the"
        " line"
    )


def is_drawn_from(value: object) -> bool:
    """Whether a value is a generator of random numbers of Python's or NumPy's."""
    # Those of the system have no state.
    is_pythons = issubclass(type(value), random.Random) and not issubclass(
        type(value), random.SystemRandom
    )
    return is_pythons or _is_numpys(value)


def is_drained(value: object, names: AbstractSet[str], *, is_whole: bool, is_got: bool) -> bool:
    """Whether a value gives something else each time: a queue, or an iterator that is no user's.

    Args:
        value: The value.
        names: The names of the code that has it, which may take from it by some of them.
        is_whole: Whether that code uses all of it, as in a loop.
        is_got: Whether it may call ``get`` on it.
    """
    kind = type(value)
    if issubclass(kind, _QUEUES):
        return is_got and not names.isdisjoint(_OF_QUEUES)
    is_iterator = issubclass(kind, Iterator) and not issubclass(kind, io.IOBase)
    is_librarys = is_iterator and not is_users(vars(kind).get("__module__"))
    return is_librarys and (is_whole or not names.isdisjoint(_OF_ITERATORS))


class RandomOfPython:
    """The states of random numbers of Python and NumPy, as they are now.

    Args:
        shared: Whether that of all functions of ``random`` and ``numpy.random`` is among them.
        own: Other generators.
    """

    def __init__(self, *, shared: bool, own: Sequence[Any]) -> None:
        numpy = sys.modules.get("numpy")
        self._generators = [*own]
        if shared:
            self._generators.append(random)
            self._generators += [] if numpy is None else [numpy.random]
        self._states = [*map(_state_of, self._generators)]

    @classmethod
    def where(cls, *, shared: bool, own: Sequence[Any]) -> RandomOfPython | None:
        """The same; None if there are none."""
        return cls(shared=shared, own=own) if shared or own else None

    def again(self) -> RandomOfPython:
        """The same as they are by now."""
        return RandomOfPython(shared=False, own=self._generators)

    @property
    def has_moved(self) -> bool:
        """Whether some were drawn since, or a seed was set."""
        return not _are_same([*map(_state_of, self._generators)], self._states)

    def put_back(self) -> None:
        """Let them be drawn again."""
        for generator, state in zip(self._generators, self._states, strict=True):
            if hasattr(generator, "setstate"):
                generator.setstate(state)
            elif hasattr(generator, "set_state"):
                generator.set_state(state)
            else:
                getattr(generator, "bit_generator", generator).state = state


_QUEUES = (queue.Queue, queue.SimpleQueue)
_OF_QUEUES = frozenset({"get", "get_nowait"})
_OF_ITERATORS = frozenset({"next", "__next__", "send"})


def _is_numpys(value: Any) -> bool:
    kind = type(value)
    is_of_numpy = kind.__module__.partition(".")[0] == "numpy"
    return is_of_numpy and (hasattr(kind, "bit_generator") or hasattr(kind, "set_state"))


def _state_of(generator: Any) -> Any:
    if hasattr(generator, "getstate"):
        return generator.getstate()
    if hasattr(generator, "get_state"):
        return generator.get_state(legacy=False)
    return getattr(generator, "bit_generator", generator).state


def _are_same(one: Any, other: Any) -> bool:
    """Whether two states are, which may have arrays of NumPy's inside."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and _are_same([*one.values()], [*other.values()])
    if isinstance(one, list | tuple):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(_are_same(*pair) for pair in pairs)
    if hasattr(one, "tobytes"):
        return bool(one.tobytes() == other.tobytes())
    return bool(one == other)
