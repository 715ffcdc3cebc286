"""One native call in place of an engine's loop over its graphs and the calls between them."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

from cgraph import _core, _torch
from cgraph.cudagraph import CUDAGraph

__all__ = ["NativeReplay", "log"]

log = logging.getLogger("cgraph.integrations")


class NativeReplay:
    """A replacement of an engine's method that replays graphs and calls in turn.

    Args:
        engine: The engine and its version, for the log.
        lists: The attributes of a capture of the engine's that list its steps, each list's items in
            turn: graphs, their bound ``replay``, and other callables.
        joined: Returns the item of the first list that stands for all steps.

    Called with the engine's own method and a capture, it calls that method on a copy of the
    capture whose only step is a native replay of all. So whatever else the method does, it does.
    """

    def __init__(
        self, engine: str, lists: Sequence[str], joined: Callable[[_core.Segments], Any]
    ) -> None:
        self._engine, self._lists, self._single = engine, lists, joined
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
        """Return a copy of a capture with a single step, made anew if its steps have changed."""
        lists = [getattr(capture, name) for name in self._lists]
        made = vars(capture).get(_JOINED)
        if made is None or made[0] != lists:
            turns = zip_longest(*lists)
            steps = [_native(step) for turn in turns for step in turn if step is not None]
            joined = copy.copy(capture)
            vars(joined).pop(_JOINED, None)
            native = _core.Segments(steps, _torch.mode_functions()) if steps else None
            first, *others = self._lists
            setattr(joined, first, [] if native is None else [self._single(native)])
            for name in others:
                setattr(joined, name, [])
            made = vars(capture)[_JOINED] = [list(one) for one in lists], joined
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
