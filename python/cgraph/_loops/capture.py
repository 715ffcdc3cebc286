"""The capture of a step, and the loop that is made of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cgraph import _core
from cgraph._captures.busy import busy
from cgraph._driver import Pool
from cgraph._graphed.recorded import Recorded
from cgraph._loops.tensors import Emitted, Until
from cgraph._reason import Reason
from cgraph.causes import Cause
from cgraph.cudagraph import CUDAGraph
from cgraph.errors import ArgumentError, CgraphError, InstantiateError
from cgraph.graphs import graph

__all__ = ["CapturedLoop", "capture_loop", "reason_against"]


@dataclass(eq=False)
class CapturedLoop:
    """A loop that can be launched.

    Attributes:
        graph: The graph of the loop.
        emitted: What it publishes.
        most_steps: The most steps of a run.
        draws: The generators that a step draws from, and how far it moves their offsets.
    """

    graph: CUDAGraph
    emitted: Emitted
    most_steps: int
    draws: Sequence[tuple[torch.Generator, int]]


def reason_against(recorded: Recorded) -> Reason | None:
    """Return why a captured step cannot be the body of a loop; None if it can."""
    if recorded.breaks:
        return _of_step(f"it breaks at {recorded.breaks[0]}")
    if recorded.assign.targets:
        return _of_step(f"it assigns {recorded.assign.targets[0].name}")
    if recorded.leaves_more:
        return _of_step("it gives tensors other gradients")
    if recorded.statics:
        return _of_step("it reads a tensor that lies elsewhere in each call")
    return None


def capture_loop(
    step: Callable[[], object],
    state: Sequence[torch.Tensor],
    emitted: Emitted,
    until: Until | None,
    *,
    most_steps: int,
    unroll: int,
    pool: Pool | None,
) -> CapturedLoop | Reason:
    """Capture a step that has been captured before, as the body of a loop.

    Args:
        step: Makes a step.
        state: The tensors that it changes.
        emitted: What it publishes.
        until: What ends a run.
        most_steps: The most steps of a run.
        unroll: Steps of an iteration.
        pool: The pool of the capture.

    Returns:
        The loop; or the reason why the driver does not take the step as a body.
    """
    made = CUDAGraph()
    draws: list[tuple[torch.Generator, int]] = []
    failed: list[CgraphError] = []

    def make(one: _core.Template, found: Sequence[Any]) -> _core.Template:
        draws.extend((draw.generator, draw.step) for draw in found)
        host = emitted.header.data_ptr(), emitted.ring.data_ptr()
        offsets = [(draw.words[1], draw.step) for draw in found]
        flags = None if until is None else until.address
        owner = (one, emitted, until, *state)
        try:
            return one.looped((most_steps, unroll), flags, emitted.pieces(), offsets, host, owner)
        except CgraphError as error:
            failed.append(error)
            # The capture ends well, and its graph goes.
            return one

    try:
        with torch.no_grad(), busy(), graph(made, pool=pool):
            assert made._capture is not None
            made._capture.becomes = make
            step()
    except InstantiateError as error:
        return _of_step(str(error))
    for one in failed:
        made.reset()
        if isinstance(one, ArgumentError):
            return _of_step(str(one))
        raise one
    return CapturedLoop(made, emitted, most_steps, draws)


def _of_step(text: str) -> Reason:
    return Reason(Cause.LOOP_STEP, f"the step cannot be the body of a loop: {text}")
