"""The capture of a step, and the loop that is made of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cgraph import _core, _driver
from cgraph._captures.busy import busy
from cgraph._driver import Pool
from cgraph._loops.tensors import Emitted, until_of
from cgraph._operators.rollback import Rollback
from cgraph.cudagraph import CUDAGraph
from cgraph.errors import ArgumentError
from cgraph.graphs import graph

__all__ = ["CapturedLoop", "capture_loop"]


@dataclass
class CapturedLoop:
    """A loop that can be launched.

    Attributes:
        graph: The graph of the loop.
        emitted: What it publishes.
        draws: The generators that a step draws from, and how far it moves their offsets.
    """

    graph: CUDAGraph
    emitted: Emitted
    draws: Sequence[tuple[torch.Generator, int]]


def capture_loop(
    step: Callable[..., Any],
    state: Sequence[torch.Tensor],
    emitted: Emitted,
    until: torch.Tensor | None,
    most_steps: int,
    unroll: int,
    pool: Pool | None,
) -> CapturedLoop:
    """Call a step once, put back what it wrote, and capture it.

    Raises:
        ArgumentError: It returns something else than the next state.
        CaptureError: It cannot be captured.
    """
    flags, driver = until_of(until), _driver.current()
    made = CUDAGraph()
    draws: list[tuple[torch.Generator, int]] = []

    def make(one: _core.Template, found: Sequence[Any]) -> _core.Template:
        draws.extend((draw.generator, draw.step) for draw in found)
        host = emitted.header.data_ptr(), emitted.ring.data_ptr()
        offsets = [(draw.words[1], draw.step) for draw in found]
        owner = (one, emitted, until, *state)
        return one.looped((most_steps, unroll), flags, emitted.pieces(), offsets, host, owner)

    with torch.no_grad():
        driver.synchronize()
        with Rollback(is_capturing=driver.is_capturing) as rollback, busy():
            try:
                _stepped(step, state)
            finally:
                rollback.undo()
        with busy(), graph(made, pool=pool):
            assert made._capture is not None
            made._capture.becomes = make
            _stepped(step, state)
    return CapturedLoop(made, emitted, draws)


def _stepped(step: Callable[..., Any], state: Sequence[torch.Tensor]) -> None:
    """Make one step; what it returns becomes the state."""
    found = step(*state)
    if found is None:
        return
    new = [found] if isinstance(found, torch.Tensor) else list(found)
    if len(new) != len(state):
        raise ArgumentError(
            f"the step returned {len(new)} tensors, expected None or the next {len(state)}"
        )
    for one, other in zip(state, new, strict=True):
        if one is not other:
            one.copy_(other)
