"""One native call in place of an engine's loop over its graphs and the calls between them."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any

from cgraph import _core, _torch
from cgraph.cudagraph import CUDAGraph

__all__ = ["NativeReplay", "log"]

log = logging.getLogger("cgraph.integrations")


class NativeReplay:
    """A replacement of an engine's method that replays graphs and calls in turn.

    Args:
        engine: The engine and its version, for the log.
        steps: Returns the steps of a capture of the engine's, in order: graphs and callables.
            A graph's bound ``replay`` is as good as the graph.
        join: Lets a capture have a single step.

    Called with the engine's own method and a capture, it calls that method on a copy of the
    capture whose only step is a native replay of all. So whatever else the method does, it does.
    """

    def __init__(
        self,
        engine: str,
        steps: Callable[[Any], Sequence[Any]],
        join: Callable[[Any, _core.Segments], None],
    ) -> None:
        self._engine, self._steps, self._join = engine, steps, join
        self._fits = True

    def __call__(self, replay: Callable[[Any], Any], capture: Any) -> Any:
        """Replay a capture; without native code if it is not made as expected."""
        if not self._fits:
            return replay(capture)
        try:
            joined = self._joined(capture)
        except (AttributeError, TypeError) as error:
            self._fits = False
            log.warning(
                "%s.replay stays the engine's own: its captures are not those of %s (%s)",
                type(capture).__qualname__,
                self._engine,
                error,
            )
            return replay(capture)
        return replay(joined)

    def _joined(self, capture: Any) -> Any:
        steps = self._steps(capture)
        made = vars(capture).get(_JOINED)
        if made is None or made[0] != steps:
            joined = copy.copy(capture)
            self._join(joined, _core.Segments(list(map(_native, steps)), _torch.mode_functions()))
            made = vars(capture)[_JOINED] = steps, joined
        return made[1]


_JOINED = "_joined_by_cgraph"


def _native(step: Any) -> Any:
    """Return a step as native code takes it: a graph of cgraph's, or a callable."""
    if isinstance(step, CUDAGraph):
        return step
    if not callable(step):
        return step.replay
    graph = getattr(step, "__self__", None)
    return graph if isinstance(graph, CUDAGraph) and step == graph.replay else step
