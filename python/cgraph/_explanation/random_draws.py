"""Random numbers in a function that is explained: those of Python, and states that it sets."""

from __future__ import annotations

import functools
import gc
import importlib
import os
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from cgraph._explanation.findings import Log
from cgraph._source import Place, is_omitted, user_place

__all__ = ["draws_noted"]

_SEEDS = frozenset({"manual_seed", "seed", "set_state", "set_offset"})
_PYTHON = os.path.dirname(os.__file__)
_DRAWS = frozenset({"random", "getrandbits", "randbytes"})
# So many generators of NumPy's are looked at in each call of a function of the user's, the last
# ones that were made: one in the way of NumPy's first ones takes 30 µs.
_MOST_GENERATORS = 32


@contextmanager
def draws_noted(log: Log, here: Callable[[], Place]) -> Iterator[None]:
    """Note in the ``with`` block which lines draw or seed, of this thread.

    By a profiler, as nothing of torch's sees that. One that is there hears of all as well, but
    beside one that is written in C nothing is noted. No profiler hears of NumPy's calls: there the
    line is that at which the function begins in which a state has changed, also by another thread.
    Generators that are made in the block are new in each call, and draw no other numbers then.

    Args:
        log: Takes what is found.
        here: The line of the user's that runs.
    """
    before = sys.getprofile()
    states = _states_of_numpy()
    known = [(name, state, state()) for name, state in states]

    def look(frame: FrameType | None) -> None:
        while frame is not None and _is_of_library(frame.f_code.co_filename):
            # Torch has called what runs, and the user has called that.
            frame = frame.f_back
        if frame is None:
            return
        for number, (name, state, before) in enumerate(known):
            if (now := state()) != before:
                known[number] = name, state, now
                place = frame.f_code.co_filename, frame.f_code.co_firstlineno
                log.add("host random", name, place)

    def heard(frame: FrameType, event: Any, function: Any) -> None:
        is_at_end = event in ("call", "return")
        # A first import calls thousands of functions of libraries.
        if is_at_end and known and not _is_of_library(frame.f_code.co_filename):
            look(frame.f_back if event == "call" else frame)
        if event == "c_call":
            owner, name = getattr(function, "__self__", None), function.__name__
            if isinstance(owner, torch.Generator):
                if name in _SEEDS and not _is_told_of(frame, owner):
                    log.add("seed", f"Generator.{name}", here())
            elif isinstance(owner, random.Random) and name in _DRAWS:
                drawing: FrameType | None = frame
                while drawing is not None and drawing.f_globals.get("__name__") == "random":
                    drawing = drawing.f_back
                # What Python and torch draw, or who is imported, is no value of the function's.
                if drawing is not None and _is_of_function(drawing):
                    log.add("host random", f"random.{name}", user_place(drawing) or here())
        if before is not None:
            before(frame, event, function)

    if before is not None and not callable(before):
        # One that is written in C, which nobody could put back.
        yield
        return
    sys.setprofile(heard)
    try:
        yield
    finally:
        sys.setprofile(before)


def _states_of_numpy() -> list[tuple[str, Callable[[], object]]]:
    """What tells where random numbers of NumPy are: those that all share, and of generators."""
    if "numpy" not in sys.modules:
        return []  # who has not imported it yet draws nothing
    numpy: Any = None
    with suppress(ImportError):
        # NumPy does so only when it is asked for by somebody, as by the function.
        numpy = importlib.import_module("numpy.random")
    if numpy is None:
        return []
    states: list[tuple[str, Callable[[], object]]] = [
        ("numpy.random", lambda: pickle.dumps(numpy.get_state(legacy=False)))
    ]
    if not hasattr(numpy, "get_bit_generator"):  # before NumPy 1.24
        return states
    # Whatever way a function finds one: nobody else draws from it meanwhile.
    shared, kind = numpy.get_bit_generator(), numpy.BitGenerator
    own = [one for one in gc.get_objects() if issubclass(type(one), kind) and one is not shared]

    def state_of(generator: Any) -> Callable[[], object]:
        return lambda: pickle.dumps(generator.state)

    states += [("numpy.random.Generator", state_of(one)) for one in own[-_MOST_GENERATORS:]]
    return states


@functools.lru_cache(maxsize=4096)
def _is_of_library(file: str) -> bool:
    """Whether a file is of torch, Python or an installed library: whoever calls it is looked at."""
    installed = {"site-packages", "dist-packages"}.intersection(Path(file).parts)
    return bool(installed) or file.startswith(("<frozen", _PYTHON)) or is_omitted(file)


def _is_of_function(frame: FrameType | None) -> bool:
    """Whether a function of the user's draws there, and no import that it is the first to make."""
    assert frame is not None
    name = str(frame.f_globals.get("__name__")).partition(".")[0]
    if name == "torch" or (name in sys.stdlib_module_names and name != "__main__"):
        return False
    while frame is not None and frame.f_globals.get("__name__") != __name__.rpartition(".")[0]:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return False
        frame = frame.f_back
    return True


def _is_told_of(frame: FrameType | None, generator: torch.Generator) -> bool:
    """Whether what is seeded is to be put back by checkpointing, or one of many seeded at once."""
    while frame is not None:
        name = frame.f_globals.get("__name__")
        # Who seeds all seeds that of the host.
        if name == "torch.utils.checkpoint" or (
            name == "torch.random" and generator is not torch.default_generator
        ):
            return True
        frame = frame.f_back
    return False
