"""Random numbers in a function that is explained: those of Python, and states that it sets."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from cgraph._explanation.findings import Log
from cgraph._source import Place, user_place

__all__ = ["draws_noted"]

_SEEDS = frozenset({"manual_seed", "seed", "set_state", "set_offset"})
_DRAWS = frozenset({"random", "getrandbits", "randbytes"})


@contextmanager
def draws_noted(log: Log, here: Callable[[], Place]) -> Iterator[None]:
    """Note in the ``with`` block which lines draw or seed, of this thread.

    By a profiler, as nothing of torch's sees that. One that is there hears of all as well, but
    beside one that is written in C nothing is noted; NumPy's calls no profiler hears of.

    Args:
        log: Takes what is found.
        here: The line of the user's that runs.
    """
    before = sys.getprofile()

    def heard(frame: FrameType, event: Any, function: Any) -> None:
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


def _is_of_function(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__")).partition(".")[0]
    is_known = name == "torch" or (name in sys.stdlib_module_names and name != "__main__")
    return not is_known and frame.f_code.co_name != "<module>"


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
