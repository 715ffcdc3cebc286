"""Captures in a row of which nothing but the captures runs, and nothing is put back."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from cgraph import _core, _driver, _torch
from cgraph._captures.collector import collections_held_off
from cgraph._recording.calls import Call
from cgraph._recording.capture import capture_once, storages_in_place, wait_after_error
from cgraph._recording.conditions import (
    NotReadyError,
    require_same_numbers,
    require_state,
    require_unmoved,
)
from cgraph._recording.plan import Plan
from cgraph._recording.python_state import PythonState
from cgraph._recording.recorded import Recorded, numbered
from cgraph._recording.refusals import require_known_classes, require_none_recorded
from cgraph._recording.unchanged import Training, Unchanged
from cgraph._state.attributes import Attributes
from cgraph._state.holders import Holder
from cgraph._state.parts import Parts
from cgraph._state.rollback import Rollback
from cgraph._state.search import Found
from cgraph._state.stepping import Steps
from cgraph._state.surroundings import modules_of
from cgraph._torch import tree_flatten
from cgraph.cudagraph import CUDAGraph
from cgraph.errors import CaptureError
from cgraph.segments import SegmentedGraph

__all__ = ["Ended", "recorded_alone"]

_NOTHING = Found.nothing()


@dataclass
class Ended:
    """A capture that has ended, of which a graph is still to be made, unless hooks wanted it.

    Attributes:
        graph: What was captured.
        outputs: The leaves of what the function returned.
        spec: How they are put together.
        call: The call.
        statics: What it got instead of the call's tensors.
        mutated: The places of those that it writes.
        states: Where the states of optimizers are that step in it.
        neighbours: The graphs of the same pool, and the number of this one among them.
        has_added_hooks: Whether a hook was added to something meanwhile.
        seconds: What it took.
    """

    graph: CUDAGraph | SegmentedGraph
    outputs: list[Any]
    spec: Any
    call: Call
    statics: list[torch.Tensor]
    mutated: list[int]
    states: list[Holder]
    neighbours: tuple[_core.Neighbours, int]
    has_added_hooks: bool
    seconds: float

    @property
    def is_whole(self) -> bool:
        """Whether no Python code of breaks has run."""
        return isinstance(self.graph, CUDAGraph)

    @property
    def waits(self) -> bool:
        """Whether the graph is still to be made: nobody else has it."""
        return isinstance(self.graph, CUDAGraph) and self.graph._recording is not None

    def finished(self) -> Recorded:
        """The graph. Where the result is none that replays could return, it is let go."""
        if isinstance(self.graph, CUDAGraph) and self.waits:
            self.graph.capture_end_pre()
        recorded = Recorded(self.graph, self.statics, self.outputs, self.spec, self.neighbours)
        try:
            require_known_classes(self.outputs)
            require_none_recorded(recorded)
        except CaptureError:
            recorded.reset()
            raise
        recorded.mutated, recorded.states = self.mutated, self.states
        recorded.has_added_hooks = self.has_added_hooks
        recorded.in_place = storages_in_place(self.call)
        recorded.seconds = self.seconds
        return recorded


@contextmanager
def recorded_alone(
    plan: Plan, driver: _driver.Driver, reached: Sequence[torch.nn.Module]
) -> Iterator[Callable[[Call, list[torch.Tensor]], Ended]]:
    """A block in which calls are captured, each by a function of the call and its static tensors.

    What :func:`~cgraph._recording.capture.record` does around each capture is done once for all of
    them where it can be, and what it does for calls before a capture is left out. Each capture
    leaves attributes as they were before the first one, or is refused. After one with breaks, whose
    Python has run, there must be no other one. All must be finished in the block.

    Args:
        plan: How, by options that want captures alone. The calls record no gradients.
        driver: The driver in force.
        reached: The modules among the arguments, which are those of all calls.
    """
    with ExitStack() as last:
        last.enter_context(_torch.without_autocast_cache())
        if not plan.compiles:
            last.enter_context(_torch.Uncompiled())
        begun = Attributes(plan.dictionaries)
        state = PythonState(begun, _NOTHING, Parts(()), lambda _: False, Rollback())
        last.push(state.after)
        last.push(functools.partial(wait_after_error, driver))
        last.enter_context(driver.stream(plan.stream))
        roots = (*modules_of(plan.function), *reached)
        flags = [(part, part.training) for root in roots for part in root.modules()]
        training = Training(flags, [leaf for root in roots for leaf in root.parameters()])
        block = last.enter_context(ExitStack())
        yield _Captures(plan, driver, begun, training, block).record


class _Captures:
    """Captures in a row. Between two of them, little of what this needs is in a processor's cache.

    Args:
        plan: How.
        driver: The driver in force.
        begun: Attributes as they are before the first one.
        training: Whether modules train, likewise.
        block: Ends at the end of all what is watched meanwhile.
    """

    def __init__(
        self,
        plan: Plan,
        driver: _driver.Driver,
        begun: Attributes,
        training: Training,
        block: ExitStack,
    ) -> None:
        self._plan = plan
        self._driver = driver
        self._begun = begun
        self._training = training
        self._block = block
        self._steps = self._watched()

    def record(self, call: Call, statics: list[torch.Tensor]) -> Ended:
        """Capture a call.

        Args:
            call: The call.
            statics: What the function gets instead of its tensors.
        """
        try:
            return self._recorded(call, statics)
        except BaseException as error:
            # Now: those before are made yet.
            self._block.__exit__(type(error), error, error.__traceback__)
            raise

    def _recorded(self, call: Call, statics: list[torch.Tensor]) -> Ended:
        plan, began = self._plan, time.perf_counter()
        unchanged = Unchanged(call, statics, self._training)

        def run() -> Any:
            args, kwargs = call.arguments(statics)
            result = plan.function(*args, **kwargs)
            unchanged.require(args, kwargs)
            return result

        versions = [static._version for static in statics]
        hooks = _torch.hook_count()
        with collections_held_off():
            how = plan, call, statics, self._driver, (), _put_nothing_back, None, None, _end
            graph, result = capture_once(run, *how)
        try:
            self._require_same(is_whole=isinstance(graph, CUDAGraph))
        except (CaptureError, NotReadyError):
            if isinstance(graph, CUDAGraph) and graph._recording is not None:
                # Hooks hear of the end of what was captured, and not of what only ended.
                with suppress(Exception):
                    graph.capture_end_pre()
            graph.reset()
            raise
        # Now: the next capture may put others into the same containers.
        outputs, spec = tree_flatten(result)
        pairs = enumerate(zip(statics, versions, strict=True))
        return Ended(
            graph,
            outputs,
            spec,
            call,
            statics,
            mutated=[place for place, (static, version) in pairs if static._version != version],
            states=self._stepped(),
            neighbours=numbered(tuple(graph.pool())),
            has_added_hooks=_torch.hook_count() != hooks,
            seconds=time.perf_counter() - began,
        )

    def _require_same(self, *, is_whole: bool) -> None:
        """Refuse a capture that has changed what its replays do not.

        Args:
            is_whole: Whether it has no breaks, whose Python code runs in replays as well.
        """
        begun, is_other = self._begun, self._begun.are_others
        if is_other:
            begun.require_no_new_tensor()
        # Without preserve_state nobody notes where others lie.
        require_unmoved(self._plan, None)
        require_state(self._steps)
        if not is_whole:
            # The capture has run them, and the segments before them.
            self._driver.synchronize()
        elif is_other:
            require_same_numbers(begun, _NOTHING)

    def _stepped(self) -> list[Holder]:
        """Where the states of optimizers are that have stepped, which are as they were then."""
        if not self._steps.may_have_changed:
            return []
        states = self._steps.states()
        # What one capture changes is no matter of the next one.
        self._block.close()
        self._steps = self._watched()
        return states

    def _watched(self) -> Steps:
        steps = Steps(self._plan.function)
        self._block.push(self._training.after)
        self._block.enter_context(steps.watched())
        return steps


def _end(graph: CUDAGraph) -> None:
    """End a capture. A graph is made of it later, unless hooks are to find it."""
    if graph._has_hooks("capture_end") or graph._has_hooks("capture_start"):
        graph.capture_end_pre()
        graph._run_hooks("capture_end")
    else:
        graph._capture_ends()


def _put_nothing_back() -> None:
    """Let all be as after a capture that is thrown away."""
