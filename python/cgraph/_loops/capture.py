"""The capture of a step, and the loop that is made of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from cgraph import _core, _driver, _torch
from cgraph._captures.busy import busy
from cgraph._driver import Captured
from cgraph._explanation.findings import failed_by
from cgraph._graphed.recorded import Recorded
from cgraph._graphed.static_memory import PoolUse
from cgraph._loops.stages import StagesSession, is_condition
from cgraph._loops.tensors import Emitted, Flags
from cgraph._reason import Reason
from cgraph.causes import Cause
from cgraph.cudagraph import CUDAGraph
from cgraph.errors import (
    ArgumentError,
    CaptureError,
    CgraphError,
    DriverError,
    InstantiateError,
)
from cgraph.segments import SegmentedGraph

__all__ = ["CapturedLoop", "capture_loop", "is_refusal", "reason_against", "reason_of"]

# CUDA_ERROR_INVALID_VALUE and CUDA_ERROR_NOT_SUPPORTED, of what the driver repeats in no loop; and
# those of what a stream does not do while it captures.
_REFUSALS = (1, 801, *range(900, 909))
_FIX = (
    "keep it in a tensor that is written in place, of the state or of an object; emit= publishes"
    " one in each step, until= and cgraph.when decide by one"
)


@dataclass(eq=False)
class CapturedLoop:
    """A loop that can be launched.

    Attributes:
        graph: The graph of the loop.
        use: The use of its pool.
        emitted: What it publishes.
        draws: The generators that steps draw from, and how far a run moves their offsets at most.
        event: Recorded behind each run; None on the simulator.
        runs: The number of runs that have begun.
    """

    graph: CUDAGraph
    use: PoolUse
    emitted: Emitted
    draws: Sequence[tuple[torch.Generator, int]]
    event: torch.cuda.Event | None
    runs: int = 0
    _kept: _core.HookHandle | None = None

    def keep(self, what: object) -> None:
        """Keep something besides the graph's own memory, in place of what was kept until now.

        If the graph goes, its run under way keeps it.
        """
        if self._kept is not None:
            self._kept.remove()
        self._kept = None if what is None else self.graph.retain_object(what)

    def end_dropped(self) -> None:
        """End the last run, which nobody has any more, and keep nothing for it."""
        if self._kept is not None:
            self.emitted.header.stop = 1
            self.wait()
            self.keep(None)

    def has_passed(self) -> bool:
        """Return whether the last run has ended."""
        if self.event is not None:
            return bool(self.event.query())
        _driver.current().synchronize()
        return True

    def wait(self) -> None:
        """Return when the last run has ended."""
        if self.event is None:
            _driver.current().synchronize()
        else:
            self.event.synchronize()


def reason_against(recorded: Recorded) -> Reason | None:
    """Return why a captured step cannot be the body of a loop; None if it can."""
    breaks = [one for one in recorded.breaks if not is_condition(one)]
    if breaks:
        return _of_step(f"it breaks at {breaks[0]}")
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
    recorded: Recorded,
    emitted: Emitted,
    until: Flags | None,
    *,
    most_steps: int,
    unroll: int,
) -> CapturedLoop | Reason:
    """Capture a step that has been captured before, as the body of a loop; gradients are disabled.

    Args:
        step: Makes a step.
        state: The tensors that it changes; nothing of it is kept.
        recorded: The graph of one step.
        emitted: What it publishes.
        until: What ends a run.
        most_steps: The most steps of a run.
        unroll: Steps of an iteration.

    Returns:
        The loop; or the reason why the driver does not take the step as a body.
    """
    use = PoolUse.of(_driver.current(), recorded.pool)
    # On the stream of the pool's other captures, whose free blocks it gets.
    stream = use.stream if recorded.stream is None else recorded.stream
    session = StagesSession(stream, recorded.pool, recorded.generators, state)
    try:
        with busy():
            stages, _ = SegmentedGraph._made(session, step, ())
    except CaptureError as error:
        return _of_refusal(error)
    # Only the last one may be empty.
    segments = [one for one in stages.segments if one._nodes]
    captured = [one._captured for one in segments]
    if not captured:
        return _of_step("it has no work on the device")
    if any(one is not None and one.random_step is not None for one in captured):
        return _of_step(f"this torch, {torch.__version__}, does not tell where its random state is")
    draws: dict[tuple[int, int], tuple[torch.Generator, int]] = {}
    given = []
    for place, (segment, one) in enumerate(zip(segments, captured, strict=True)):
        assert one is not None
        moved = []
        for words, (generator, offset) in zip(one.random_words, one.generators, strict=True):
            moved.append((words[1], offset))
            known = draws.get(words, (generator, 0))
            draws[words] = known[0], known[1] + offset
        only_if = session.conditions.get(place)
        given.append((segment._template, None if only_if is None else only_if.address, moved))
    host = *emitted.addresses, emitted.memory
    flags = None if until is None else until.address
    try:
        template = _core.Template.looped(given, (most_steps, unroll), flags, emitted.pieces, host)
        made = _graph_of(template, segments, draws, session.kept_outside)
        made.instantiate()
    except (ArgumentError, DriverError, InstantiateError) as error:
        return _of_refusal(error)
    most = [(generator, offset * most_steps) for generator, offset in draws.values()]
    is_gpu = _driver.current().device_type == "cuda"
    # Blocking, as a run may take seconds.
    event = torch.cuda.Event(blocking=True) if is_gpu else None
    return CapturedLoop(made, use, emitted, most, event)


def _graph_of(
    template: _core.Template,
    stages: Sequence[CUDAGraph],
    draws: Mapping[tuple[int, int], tuple[torch.Generator, int]],
    kept_outside: Sequence[torch.UntypedStorage],
) -> CUDAGraph:
    """Return the graph of a loop, whose replays fill the words of random states."""
    last = stages[-1]._captured
    assert last is not None
    inputs = None
    if draws:
        flat = [word for words in draws for word in words]
        inputs = _core.Inputs(template, _torch.tensor_reader(), [], flat)
    made = CUDAGraph()
    captured = Captured(
        template,
        pools=[*dict.fromkeys(pool for stage in stages for pool in stage.pools())],
        current=last.current,
        ordinal=last.ordinal,
        inputs=inputs,
        # A run tells only when it has ended how far it has moved them.
        generators=[(generator, 0) for generator, _ in draws.values()],
        random_words=[*draws],
        retained=(*stages, kept_outside),
        footprint=last.footprint,
    )
    made._hold(captured, _driver.current())
    return made


def reason_of(error: CaptureError) -> Reason:
    """Return the reason why the step cannot be captured, with a fix for loops."""
    reason = failed_by(error)
    is_special = reason.cause is not Cause.CAPTURE_FAILED
    cause = reason.cause if is_special else Cause.LOOP_STEP
    return replace(reason, cause=cause, special_fix=_FIX)


def is_refusal(error: CgraphError) -> bool:
    """Return whether an error says what can never be, rather than what has failed once."""
    return error.code is None or error.code in _REFUSALS


def _of_refusal(error: CgraphError) -> Reason:
    if not is_refusal(error):
        raise error
    if isinstance(error, CaptureError) and error.code is not None:
        return reason_of(error)
    return _of_step(str(error))


def _of_step(text: str) -> Reason:
    return Reason(Cause.LOOP_STEP, f"the step cannot be the body of a loop: {text}")
