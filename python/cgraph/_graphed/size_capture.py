"""The capture of a call that differs only in numbers of rows from an observed one."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from cgraph import _torch
from cgraph._captures.pool_blocks import PoolBlocks
from cgraph._captures.spelled_out import SpelledOut
from cgraph._graphed.call import Call
from cgraph._graphed.observation import Observation, Reads
from cgraph._graphed.record import BrokenError, Capture, CapturePlan, capturing, frozen_in
from cgraph._graphed.recorded import Recorded
from cgraph._graphed.results import Result
from cgraph._operators.codes import Codes
from cgraph._operators.observer import version_of
from cgraph._python.assignments import Assignments
from cgraph._python.guards import Guards
from cgraph._python.names import names_in
from cgraph.breaks import Work, breakable, on_one_thread
from cgraph.errors import CaptureError
from cgraph.segments import SegmentedGraph

__all__ = ["UnlikeError", "can_be_like", "for_sizes", "record_sized"]


class UnlikeError(Exception):
    """The call differs from the observed one in more than numbers of rows: observe it, too."""


def can_be_like(shown: Observation) -> bool:
    """Return whether calls of other numbers of rows can be captured without seeing operators.

    With gradients, breaks or assignments a capture has to know more.
    """
    return not (shown.is_backward or shown.needs_grad or shown.has_breaks or shown.assigned)


def for_sizes(shown: Observation, reads: Reads, call: Call) -> Observation:
    """Return the observation with guards on all named tensors: other sizes may take others."""
    guards = Guards(reads.walk(call, shown.codes, {}).settle(lambda *_: True))
    # One for all sizes, unless it has to tell what a call assigns.
    restore = None if shown.assigned is None else _state(guards, shown, call)
    return replace(shown, guards=guards, restore=restore)


def record_sized(
    plan: CapturePlan, statics: list[torch.Tensor], blocks: PoolBlocks | None
) -> Capture:
    """Capture a call without doing its work; operators are not noted.

    Args:
        plan: The plan; the previous call differs only in numbers of rows.
        statics: The tensors that the graph reads instead of the call's, with the same contents.
        blocks: The blocks of the pool before; None if it has no other graph.

    Raises:
        BrokenError: The capture failed.
        CaptureError: The function changed a guarded value.
        UnlikeError: The function ran other code, met a break, found other values, or left a tensor;
            or replays copy tensors at guarded places.
    """
    call, driver, before, began = plan.call, plan.driver, plan.before, time.perf_counter()
    if call.placed or not before.guards.fit(call.objects):
        # Who puts copies at the places of tensors has to see what the function assigns there.
        raise UnlikeError
    args, kwargs = call.arguments(statics)
    given = {_torch.storage_id(one.untyped_storage()) for one in statics}

    def is_new(tensor: torch.Tensor) -> bool:
        memory = _torch.memory_of(tensor)
        is_inside = memory is not None and _torch.storage_id(memory) not in given
        return is_inside and before.guards.name_beside(tensor) is None

    restore = before.restore or _state(before.guards, before, call, (args, kwargs))
    codes, versions = Codes(), [version_of(one) for one in statics]
    codes.reads = _differs if driver.device_type == "cpu" else None
    spelled = SpelledOut()
    with capturing(plan, nullcontext(), None, spelled, runs=False) as session:
        try:
            session.begin(statics)
            try:
                with codes.noted(), breakable(_NoBreaks()), on_one_thread():
                    returned = plan.function(*args, **kwargs)
                if before.assigned is None and restore.changed():
                    raise UnlikeError
            except UnlikeError:
                # Values that the function has cached so far must have contents.
                session.stop()
                raise
            result = Result.of(returned, statics, is_new, driver.device_type)
            del returned
            graph = SegmentedGraph(session.finish(result.fresh(plan.options.outputs)))
        except BaseException as error:
            session.fail(error)
            restore.put_back()
            if isinstance(error, UnlikeError) or not isinstance(error, Exception):
                raise
            raise BrokenError(error) from error
        session.close()
    recorded = Recorded(graph, statics, result, time.perf_counter() - began, plan.stream)
    fits = before.guards.fit(call.objects)
    changed = [] if fits else plan.reads.changes(before.guards, call.objects)
    del result
    recorded.give_up_results()
    is_like = before.codes.keys() >= codes.globals.keys()
    if changed or not is_like or (blocks is not None and blocks.are_left()):
        # What somebody keeps must have contents.
        graph.replay()
        recorded.reset()
        restore.put_back()
        if not changed:
            raise UnlikeError
        raise CaptureError(
            f"{plan.name} changes {changed[0].name}, which {changed[0].verb}. Fix: make that state"
            f" first: call {plan.name} once with as many rows"
        )
    recorded.mutated = [
        place
        for place, (name, one) in enumerate(zip(call.names, statics, strict=True))
        if name in before.written or version_of(one) != versions[place]
    ]
    recorded.writes, recorded.takes = [*before.writes], [*before.takes]
    recorded.kept, recorded.frozen = frozen_in(before.trace, driver, recorded.pool)
    recorded.kept += [one.untyped_storage() for one in spelled.kept]
    return Capture(recorded, None, before, None, None, restore.put_back)


def _state(
    guards: Guards, shown: Observation, call: Call, arguments: Any = ((), {})
) -> Assignments:
    return Assignments(guards, names_in(shown.codes), call.objects, arguments, call.places)


class _NoBreaks:
    """The breaks of a call if the previous one met none."""

    def run(self, work: Work, args: Any, kwargs: Any) -> Any:
        """Give up."""
        raise UnlikeError


def _differs(_: str) -> None:
    raise UnlikeError
