"""What a function reaches besides its arguments, as far as it was looked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cgraph import _core
from cgraph._native import Surroundings
from cgraph._surroundings import modules_of

__all__ = ["Reach"]

# For so many modules among the arguments it is remembered what they have.
_REMEMBERED = 16


class Reach:
    """What one function reaches.

    Args:
        function: The function.
        turn: What lets one thread at a time replay it.
    """

    def __init__(self, function: Callable[..., Any], turn: _core.Turn) -> None:
        self._function = function
        self._turn = turn
        # By the modules among the arguments, which they keep alive.
        self._known: dict[tuple[int, ...], Surroundings] = {}

    def known(self, given: Sequence[torch.nn.Module] = ()) -> Surroundings:
        """What was there when somebody looked, or what is there now if something has moved.

        Args:
            given: The modules among the arguments.
        """
        known = self._known.get(tuple(map(id, given)))
        return self.now(given) if known is None or known.moved is not None else known

    def now(
        self, given: Sequence[torch.nn.Module], known: Surroundings | None = None
    ) -> Surroundings:
        """What is there now, which takes time to find.

        Args:
            given: The modules among the arguments.
            known: What is returned if there are no other modules; nothing of it has moved.
        """
        modules = [*modules_of(self._function), *given]
        if known is None or not known.is_of(modules):
            known = Surroundings(self._function, modules, self._turn)
            self._known[tuple(map(id, given))] = known
            if len(self._known) > _REMEMBERED:
                del self._known[next(iter(self._known))]
        return known

    def after_call(self, given: Sequence[torch.nn.Module], known: Surroundings) -> Surroundings:
        """What is there after a first call: it may have made modules, and some libraries add hooks.

        Args:
            given: The modules among the arguments.
            known: What was there before. It stays if anything else of it has moved.
        """
        if known.moved is None:
            return self.now(given, known)
        return self.now(given) if known.has_other_hooks else known

    def clear(self) -> None:
        """Forget all."""
        self._known.clear()
