"""The comparison of one replay in so many with an eager call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["PeriodicCheck"]


class PeriodicCheck:
    """A callable that checks one call in so many, and replays all others.

    Args:
        count: The number of calls of which one is checked.
        checked: Called for the checked call.
        replay: Called for the others.
        reset: Frees the resources of checks.
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
