"""Compares one replay in so many with an eager call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["PeriodicCheck"]


class PeriodicCheck:
    """Calls one function in so many calls, and another one in all others.

    Args:
        count: The number of calls of which one is checked.
        checked: Called for that one.
        replay: Called for the others.
        reset: Lets go of what checks need.
    """

    def __init__(
        self,
        count: int,
        checked: Callable[..., Any],
        replay: Callable[..., Any],
        reset: Callable[[], None],
    ) -> None:
        self._count = count
        self._checked = checked
        self._replay = replay
        self._calls = 0
        self.reset = reset

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Count the call, and make it."""
        self._calls += 1
        if self._calls % self._count:
            return self._replay(*args, **kwargs)
        return self._checked(*args, **kwargs)
