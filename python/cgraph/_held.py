"""What happens to results that a caller still has when they are about to be overwritten."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from cgraph import _core
from cgraph._busy import is_busy
from cgraph._options import OnHeld
from cgraph._source import levels_to_user, user_line
from cgraph._text import short_place
from cgraph.errors import StateError

__all__ = ["Holding"]


class Holding:
    """Warns, raises or makes copies for one function.

    Args:
        name: The function's.
        policy: What to do.

    Attributes:
        stride: In one of how many calls views of results are looked for.
    """

    def __init__(self, name: str, policy: OnHeld) -> None:
        self._name = name
        self._policy = policy
        self.stride = 16 if policy == "warn" else 1
        self._warned: set[tuple[str | None, str | None]] = set()

    def __call__(
        self,
        storages: Mapping[int, _core.Storage],
        place: int,
        lent: torch.Tensor | None,
        site: Any,
    ) -> None:
        """Act on output ``place`` of the call at ``site``.

        Args:
            storages: What each output lies in.
            place: The number of the output.
            lent: What was returned; None if only views of it are left.
            site: Code and instruction of the call that returned it.
        """
        if is_busy():
            # In a warm-up, whose values nobody sees.
            return
        if self._policy == "clone" and lent is not None:
            # One reference for the other, so that only those of views are left to be counted.
            instead = lent.detach()
            # Not `set_`: autograd may have saved it, and would take that for a change of values.
            lent.data = instead.clone()
            if not storages[place].is_held:
                return
            lent = None
        here, there = user_line(), _line(site)
        what = "a view of output" if lent is None else "output"
        text = (
            f"{what} {place} of {self._name}, returned at {there or 'another line'}, is still"
            f" referenced, and the call at {_short(here) or 'another line'} overwrites it: results"
            " of a graph lie in its memory. Clone what you keep, or graph the function with"
            ' outputs="clone"'
        )
        if self._policy == "raise":
            raise StateError(text)
        if (here, there) not in self._warned:
            self._warned.add((here, there))
            warnings.warn(text, stacklevel=levels_to_user())


def _line(site: Any) -> str | None:
    if site is None:
        return None
    code, instruction = site
    lines = [line for start, end, line in code.co_lines() if start <= instruction < end]
    return _short(f"{code.co_filename}:{lines[0]}") if lines and lines[0] else None


def _short(place: str | None) -> str | None:
    return None if place is None else short_place(place)
