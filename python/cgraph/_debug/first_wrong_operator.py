"""The first operator of a graph that computes something else than eager."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from cgraph import _torch
from cgraph._captures.busy import busy
from cgraph._debug.differences import ValueDifference
from cgraph._debug.steps import Check, FoundError, Steps, ValueTrace
from cgraph._graphed.call import Call
from cgraph._graphed.capture_plan import CapturePlan
from cgraph._graphed.leaf_gradients import LeafGradients
from cgraph._graphed.recorded import Recorded
from cgraph._graphed.results import Result
from cgraph._operators.rollback import Rollback
from cgraph._operators.snapshots import RandomSnapshot, storage_snapshot
from cgraph.errors import CompareError
from cgraph.graphs import graph_pool_handle
from cgraph.segments import SegmentedGraph

__all__ = ["RandomSnapshot", "Search", "differs", "in_steps", "run_in_steps", "written_by"]

_PYTHON = (
    "Python ran only at the capture: pass as an argument what it reads and what changes, or keep it"
    " in a tensor that is written in place; reset() captures anew"
)
_UNWRITTEN = (
    "The graph reads memory that nothing has written in this replay: write all of it, as with"
    " torch.zeros for torch.empty, and let no tensor of an earlier call be read that is gone"
)
_UNKNOWN = (
    "No operator differs when they run one by one: the graph reads memory that other work"
    " overwrites, streams do not wait for each other, it is a number that Python computes, or a"
    " backward pass inside the function, whose operators are not looked at"
)


def in_steps(
    plan: CapturePlan, name: str, call: Call, statics: list[torch.Tensor], *, keep: bool
) -> Steps:
    """Capture a key once more, in steps of one operator.

    Args:
        plan: How the key was captured.
        name: What errors call the function.
        call: A call of the key.
        statics: What the graph reads.
        keep: Keep the results of operators, to be compared.
    """
    steps = Steps(plan.function, name, keep=keep)
    args, kwargs = call.arguments(statics)
    # The segments of a capture run, and what they write is put back.
    written = plan.before.trace.written()
    written += [(one.untyped_storage(), one.dtype) for one in statics]
    before = [storage_snapshot(*one) for one in written]
    random = RandomSnapshot(plan.before.generators)
    gradients = LeafGradients(plan.before.guards.leaves)
    try:
        with busy():
            graph, returned = SegmentedGraph.capture(
                lambda: steps(*args, **kwargs),
                pool=graph_pool_handle(),
                stream=plan.stream,
                statics=statics,
                generators=plan.before.generators,
            )
        made = LeafGradients(())
        made.take(gradients)
    finally:
        plan.driver.synchronize()
        gradients.put_back()
        for one in before:
            one.rewind()
        random.put_back()
    result = Result.of(returned, statics, lambda _: True, plan.driver.device_type)
    steps.recorded = Recorded(graph, statics, result, 0.0)
    steps.recorded.gradients = made
    return steps


def written_by(
    function: Callable[..., Any], arguments: tuple[tuple[Any, ...], dict[str, Any]]
) -> Rollback:
    """What a call writes and draws from, found by one, which is put back.

    Args:
        function: What is called.
        arguments: With what, by place and by name.
    """
    random, written = RandomSnapshot(), Rollback()
    args, kwargs = arguments
    try:
        with written, busy():
            function(*args, **kwargs)
    finally:
        written.rewind()
        random.rewind(written)
    return written


def run_in_steps(steps: Steps, written: Rollback, tensors: tuple[torch.Tensor, ...]) -> None:
    """See that each operator of a call goes well; all that it writes is put back.

    Args:
        steps: The operators.
        written: Knows what they write.
        tensors: What they are fed with.

    Raises:
        Exception: What one has raised, with a note that names it.
    """
    own = [one for kind in ("cpu", "cuda") for one in written.generators_of(kind)]
    random = RandomSnapshot(own)
    written.renew()
    try:
        steps.run(tensors)
    finally:
        written.rewind()
        random.put_back()


class Search:
    """Runs a call eagerly and in steps, to see where they part.

    Args:
        function: What was captured.
        steps: The same in steps.
        wrong: Compares two tensors.
        poisons: Fill what no operator writes with NaN before.
        has_breaks: The function has breaks of the user's.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        steps: Steps,
        wrong: Check,
        *,
        poisons: bool,
        has_breaks: bool,
    ) -> None:
        self._function = function
        self._steps = steps
        self._wrong = wrong
        self._poisons = poisons
        self._has_breaks = has_breaks

    def first(
        self,
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
        tensors: Sequence[torch.Tensor],
        rollback: Rollback,
        random: RandomSnapshot,
        before: Callable[[], None] = lambda: None,
    ) -> tuple[str | None, str]:
        """The operator in words, None if there is none, and what to do. All state is put back.

        Args:
            arguments: Those of the call, with tensors of its own.
            tensors: What the graph is fed with.
            rollback: Knows what the call writes.
            random: The random states before it.
            before: Called before the steps run.
        """
        args, kwargs = arguments
        trace = ValueTrace()
        try:
            rollback.rewind()
            random.rewind(rollback)
            with _torch.without_autocast_cache(), trace.watching(), busy():
                self._function(*args, **kwargs)
            rollback.rewind()
            random.rewind(rollback)
            before()
            look = partial(trace.compare, self._steps, self._wrong)
            self._steps.run(tuple(tensors), look, poison=self._poisons)
            trace.finish(self._steps)
        except FoundError as found:
            operator = self._steps.operators[found.place]
            segment = f" of segment {operator.segment}" if self._has_breaks else ""
            fix = _UNWRITTEN if found.is_nan and self._poisons else _PYTHON
            where = f"number {found.place}{segment}, {operator}"
            where += ", or the backward pass before it" if operator.is_behind_backward else ""
            return str(operator), f"The first operator that differs is {where}: {found.text}. {fix}"
        finally:
            rollback.rewind()
            random.rewind(rollback)
        return None, _UNKNOWN


def differs(title: str, found: ValueDifference, operator: str | None, why: str) -> CompareError:
    """The error of a replay that differs from eager.

    Args:
        title: The function and its key.
        found: What differs.
        operator: The first operator that does; None if it is not known.
        why: What to do.
    """
    error = CompareError(f"a replay of {title} differs from eager: {found.text}. {why}")
    error.output, error.operator = found.name, operator
    return error
