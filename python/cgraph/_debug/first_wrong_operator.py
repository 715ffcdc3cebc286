"""The search for the first operator of a graph that computes other values than eager."""

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
from cgraph._graphed.leaf_gradients import LeafGradients
from cgraph._graphed.record import CapturePlan
from cgraph._graphed.recorded import Recorded
from cgraph._graphed.results import Result
from cgraph._operators.rollback import Rollback
from cgraph._operators.snapshots import RandomSnapshot, storage_snapshot
from cgraph.errors import CompareError
from cgraph.graphs import graph_pool_handle
from cgraph.segments import SegmentedGraph

__all__ = ["RandomSnapshot", "Search", "differs", "in_steps", "run_in_steps", "written_by"]

_PYTHON = (
    "Python ran only at the capture: pass changing values that it reads as arguments, or keep them"
    " in a tensor that is written in place; reset() captures anew"
)
_UNWRITTEN = (
    "The graph reads memory that nothing has written in this replay: write all of it, as with"
    " torch.zeros instead of torch.empty, and do not read freed tensors of earlier calls"
)
_UNKNOWN = (
    "No operator differs when they run one by one. Possible causes: the graph reads memory that"
    " other work overwrites, streams do not wait for each other, Python computes a number, or a"
    " backward pass inside the function differs, whose operators are not compared"
)


def in_steps(
    plan: CapturePlan, name: str, call: Call, statics: list[torch.Tensor], *, keep: bool
) -> Steps:
    """Capture a key once more, in steps of one operator.

    Args:
        plan: The plan by which the key was captured.
        name: The name of the function in errors.
        call: A call of the key.
        statics: The tensors that the graph reads.
        keep: Keep the results of operators, to be compared.
    """
    steps = Steps(plan.function, name, keep=keep)
    args, kwargs = call.arguments(statics)
    # The segments of a capture run, and the memory that they write is restored.
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
    """Find what a call writes and which generators it draws from; make it, and restore all.

    Args:
        function: The function to call.
        arguments: The arguments, by place and by name.
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
    """Check that each operator of a call succeeds, and restore all that it writes.

    Args:
        steps: The operators.
        written: The memory that they write.
        tensors: The tensors that they are fed with.

    Raises:
        Exception: An operator raised it; a note names the operator.
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
    """A search that runs a call eagerly and in steps, to find where they differ.

    Args:
        function: The captured function.
        steps: The function in steps.
        wrong: Compares two tensors.
        poisons: Fill memory that no operator writes with NaN first.
        has_breaks: The function has breaks of the user.
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
        """Find the operator, None if there is none, and what to do, as text; restore all state.

        Args:
            arguments: The arguments of the call, with tensors of its own.
            tensors: The tensors that the graph is fed with.
            rollback: The memory that the call writes.
            random: The random states before the call.
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
    """Make the error of a replay that differs from eager.

    Args:
        title: The function and its key.
        found: The difference.
        operator: The first operator that differs; None if it is not known.
        why: The remedy.
    """
    error = CompareError(f"a replay of {title} differs from eager: {found.text}. {why}")
    error.output, error.operator = found.name, operator
    return error
