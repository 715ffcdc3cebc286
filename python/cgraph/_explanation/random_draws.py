"""Random numbers in an explained function: Python's own, and states that it sets."""

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
from cgraph.causes import Cause

__all__ = ["draws_noted"]

_SEEDS = frozenset({"manual_seed", "seed", "set_state", "set_offset"})
_PYTHON = os.path.dirname(os.__file__)
_DRAWS = frozenset({"random", "getrandbits", "randbytes"})
# The most NumPy generators, the latest ones, that are looked at in each call of a user's function:
# one like NumPy's first ones takes 30 µs.
_MOST_GENERATORS = 32


@contextmanager
def draws_noted(log: Log, here: Callable[[], Place]) -> Iterator[None]:
    """Note lines that draw, seed or print in the ``with`` block, on this thread.

    A profiler does that, as nothing in torch sees it. An existing profiler is called as well, but
    beside one that is written in C nothing is noted. No profiler sees NumPy's calls: their line is
    the first line of the function in which a state has changed, also by another thread. Generators
    that are made in the block are new in each call, and draw the same numbers then.

    Args:
        log: Receives the findings.
        here: Returns the user's line that runs.
    """
    before = sys.getprofile()
    states = _states_of_numpy()
    known = [(name, state, state()) for name, state in states]

    def look(frame: FrameType | None) -> None:
        while frame is not None and _is_of_library(frame.f_code.co_filename):
            # A library runs, and the user has called it.
            frame = frame.f_back
        if frame is None:
            return
        for number, (name, state, before) in enumerate(known):
            if (now := state()) != before:
                known[number] = name, state, now
                place = frame.f_code.co_filename, frame.f_code.co_firstlineno
                log.add(Cause.HOST_RANDOM, name, place)

    def heard(frame: FrameType, event: Any, function: Any) -> None:
        is_at_end = event in ("call", "return")
        # A first import calls thousands of library functions.
        if is_at_end and known and not _is_of_library(frame.f_code.co_filename):
            look(frame.f_back if event == "call" else frame)
        if event == "c_call" and function is print and _is_of_function(frame):
            log.add(Cause.PRINT, "print", here())
        if event == "c_call":
            owner, name = getattr(function, "__self__", None), function.__name__
            if isinstance(owner, torch.Generator):
                if name in _SEEDS and not _is_told_of(frame, owner):
                    log.add(Cause.SEED, f"Generator.{name}", here())
            elif isinstance(owner, random.Random) and name in _DRAWS:
                drawing: FrameType | None = frame
                while drawing is not None and drawing.f_globals.get("__name__") == "random":
                    drawing = drawing.f_back
                # Draws of Python, of torch or of an import are not values of the function.
                if drawing is not None and _is_of_function(drawing):
                    log.add(Cause.HOST_RANDOM, f"random.{name}", user_place(drawing) or here())
        if before is not None:
            before(frame, event, function)

    if before is not None and not callable(before):
        # A profiler that is written in C, which nobody could restore.
        yield
        return
    sys.setprofile(heard)
    try:
        yield
    finally:
        sys.setprofile(before)


def _states_of_numpy() -> list[tuple[str, Callable[[], object]]]:
    """Return readers of NumPy's random states: the shared one, and those of generators."""
    if "numpy" not in sys.modules:
        return []  # without an import nothing draws
    numpy: Any = None
    with suppress(ImportError):
        # NumPy imports it only on demand, as by the function.
        numpy = importlib.import_module("numpy.random")
    if numpy is None:
        return []
    states: list[tuple[str, Callable[[], object]]] = [
        ("numpy.random", lambda: pickle.dumps(numpy.get_state(legacy=False)))
    ]
    if not hasattr(numpy, "get_bit_generator"):  # before NumPy 1.24
        return states
    # However a function finds one, nobody else draws from it meanwhile.
    shared, kind = numpy.get_bit_generator(), numpy.BitGenerator
    own = [one for one in gc.get_objects() if issubclass(type(one), kind) and one is not shared]

    def state_of(generator: Any) -> Callable[[], object]:
        return lambda: pickle.dumps(generator.state)

    states += [("numpy.random.Generator", state_of(one)) for one in own[-_MOST_GENERATORS:]]
    return states


@functools.lru_cache(maxsize=4096)
def _is_of_library(file: str) -> bool:
    """Return whether a file is torch's, Python's or an installed library's: its caller counts."""
    installed = {"site-packages", "dist-packages"}.intersection(Path(file).parts)
    return bool(installed) or file.startswith(("<frozen", _PYTHON)) or is_omitted(file)


def _is_of_function(frame: FrameType | None) -> bool:
    """Return whether a function of the user's draws there, and not its first import of a module."""
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
    """Return whether checkpointing restores the seeded state, or it is one of many set at once."""
    while frame is not None:
        name = frame.f_globals.get("__name__")
        # Code that seeds all generators seeds the host's as well.
        if name == "torch.utils.checkpoint" or (
            name == "torch.random" and generator is not torch.default_generator
        ):
            return True
        frame = frame.f_back
    return False
