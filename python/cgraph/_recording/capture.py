"""The capture of one key of a graphed function."""

from __future__ import annotations

import functools
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any, TypeVar

import torch

from cgraph import _driver, _torch
from cgraph._breaks.sessions import Session
from cgraph._captures.collector import collections_held_off
from cgraph._captures.timing import replay_seconds, seconds_of
from cgraph._recording.breakables import BreakFoundError, Calls, InBreak, Whole
from cgraph._recording.calls import Call
from cgraph._recording.conditions import (
    NotReadyError,
    WarmupError,
    copied_leaves,
    require_none_drained,
    require_none_grown,
    require_none_kept,
    require_state,
    require_unmoved,
    state_is_made,
)
from cgraph._recording.plan import Plan
from cgraph._recording.python_state import PythonState
from cgraph._recording.recorded import Recorded
from cgraph._recording.refusals import require_known_classes
from cgraph._recording.unchanged import Training, Unchanged
from cgraph._source import levels_to_user
from cgraph._state.attributes import Attributes, registered_in
from cgraph._state.drawing import draws_on
from cgraph._state.gradients import AtBreak, Gradients, detached
from cgraph._state.holders import put_back_tensors, require_none_replaced, used_of
from cgraph._state.parts import Parts
from cgraph._state.reads import still_there
from cgraph._state.rollback import Rollback
from cgraph._state.search import Found
from cgraph._state.stepping import Steps
from cgraph._text import first_line
from cgraph._torch import tree_flatten
from cgraph.breaks import GradientBreakError, breakable, on_one_thread
from cgraph.cudagraph import CUDAGraph
from cgraph.errors import CaptureError
from cgraph.segments import SegmentedGraph

__all__ = [
    "again_compiled",
    "capture_once",
    "record",
    "storages_in_place",
    "wait_after_error",
    "warn_uncompiled",
    "watched",
]

Result = TypeVar("Result")
Captured = tuple[CUDAGraph | SegmentedGraph, Any]
"""A graph, and what the function returned in its capture."""


def record(plan: Plan, call: Call, statics: list[torch.Tensor], driver: _driver.Driver) -> Recorded:
    """Warm up, capture, instantiate and measure.

    Args:
        plan: How.
        call: A call of the key.
        statics: What the graph reads instead of the call's tensors, with the same contents unless
            nothing runs but the capture.
        driver: The driver in force.
    """
    if plan.warmup or not plan.preserve:
        return _record(plan, call, statics, driver)
    parts = plan.parts(call.modules, Found.nothing())
    attributes = Attributes([*plan.dictionaries, *registered_in(parts)])
    try:
        return _record(plan, call, statics, driver)
    except _UnseenWritesError:
        attributes.put_back()
        if plan.only_captures:
            _fill(statics, call, driver)
        plan = replace(plan, warmup=1, only_captures=False)
        return _record(plan, call, statics, driver)


def _record(
    plan: Plan, call: Call, statics: list[torch.Tensor], driver: _driver.Driver
) -> Recorded:
    args, kwargs = call.arguments(statics)

    def run() -> Any:
        args, kwargs = call.arguments(statics)
        result = plan.function(*args, **kwargs)
        unchanged.require(args, kwargs)
        return detached(result) if call.mode.grad else result

    begin = plan.found()
    require_none_drained(begin)
    parts = Parts(plan.parts(call.modules, begin))
    has_leaves = plan.preserve or call.mode.grad
    leaves = plan.leaves(args, kwargs, begin) if has_leaves else []
    training = Training(parts.flags, leaves)
    unchanged = Unchanged(call, statics, training)
    rollback = Rollback(leaves=leaves, is_capturing=driver.is_capturing)
    began = time.perf_counter()
    with ExitStack() as last:
        steps = last.enter_context(watched(plan, rollback, begin))
        # The rollback has given gradients that graphs own memory of theirs.
        gradients = Gradients(leaves)
        begun = Attributes([*plan.dictionaries, *begin.attributes], begin.dictionaries)
        is_made = rollback.makes_or_is_of(statics)
        state = PythonState(begun, begin, parts, is_made, rollback)
        training.is_of_a_break = state.is_of_a_break
        last.push(state.after)
        last.push(training.after)
        # Work reads memory that an error is about to let go.
        last.push(functools.partial(wait_after_error, driver))
        if not plan.only_captures:
            # The calls before read the static tensors on another stream than the one that filled
            # them, and replays may write them on yet another.
            driver.synchronize()
        with driver.stream(plan.stream):
            breaks = Calls(state.in_break)

            def ends() -> None:
                """Look at what calls have changed, also what only the first one does."""
                if breaks.are_met:
                    # What Python does in breaks is done again.
                    state.put_back_what_breaks_change()
                state.require_same()
                require_state(steps)

            def begins() -> None:
                ends()
                gradients.calls_now()

            try:
                with breakable(breaks):
                    warm_up = run, plan, rollback, driver, begins, breaks, state
                    eager_seconds = _warm_up(*warm_up)
            except (CaptureError, NotReadyError, torch.OutOfMemoryError):
                raise  # what is kept to be put back may have been too much
            except Exception as error:
                raise WarmupError(error) from error
            ends()
            written = unchanged.written(rollback.is_written) if plan.warmup else set()
            versions = [static._version for static in statics]
            hooks = _torch.hook_count()
            rollback.notice((*gradients.captures_now(), *leaves))
            # Where nothing was called, all is as it began. A call may have made what was not there.
            held, values = begin, begun
            if plan.warmup:
                held = plan.found()
                values = Attributes([*plan.dictionaries, *held.all_dictionaries])
            kept = Attributes(() if plan.warmup else held.attributes)
            # What the first call makes, as a table, is there from then on.
            of_capture = values if plan.warmup else Attributes(plan.dictionaries)
            rollback.notice(tensor for holder in held.all_holders for tensor in holder.tensors)
            rollback.captures_now()
            training.captures_now()
            state.captures_now(has_called=bool(plan.warmup))
            if plan.warmup:
                steps.captures_now()
                require_unmoved(plan, rollback)
            with collections_held_off():
                drawn = rollback.generators_of(driver.device_type)

                def again() -> None:
                    """Let all be as before a capture that is thrown away."""
                    gradients.captures_again()
                    put_back_tensors(held.all_holders)
                    rollback.rewind()

                at_break = functools.partial(gradients.at_break, rollback.notice)
                capture = functools.partial(
                    capture_once, run, plan, call, statics, driver, drawn, again, at_break
                )
                capture = functools.partial(capture, state.in_break)
                try:
                    graph, result = _compiled(capture, plan, rollback, again)
                except BaseException:
                    # Nothing has computed those of the capture.
                    gradients.captures_again()
                    raise
            outputs, spec = tree_flatten(result)
            rollback.leave_alone(outputs, statics)
            try:
                of_capture.require_no_new_tensor(state.of_breaks)
                require_none_replaced(held.all_holders, rollback.captures_name)
                require_known_classes(outputs)
                require_unmoved(plan, rollback)
                rollback.require_one_device()
                gradients.note(
                    statics,
                    call.names,
                    rollback.captures_use,
                    rollback.captures_gradient,
                    asks=begin.asks_for_gradients or steps.have_stepped,
                    stepping=held.stepping,
                )
                writes = rollback.captured_writes(statics)
                if (reason := call.reason_beside(writes)) is not None:
                    raise NotReadyError(reason)
                require_state(steps)
                # Python code of breaks runs in replays as well, and calls have shown what it does.
                if isinstance(graph, CUDAGraph):
                    state.require_same_now(values, held)
                if isinstance(graph, CUDAGraph) or plan.warmup:
                    state.require_same(captured=True)
                if rollback.is_state_made or kept.has_new_tensor:
                    raise state_is_made()
                require_none_kept(held, is_made, state.of_breaks, statics, begin)
                require_none_grown(values, state.of_breaks)
            except (CaptureError, NotReadyError):
                gradients.captures_again()
                graph.reset()
                raise
            gradients.forget_before()
            recorded = Recorded(graph, statics, outputs, spec)
            recorded.gradients, recorded.writes = gradients, writes
            recorded.used = used_of(held.followed, rollback.captures_name)
            recorded.reads = still_there(held.reads, state.of_breaks)
            recorded.states = steps.states()
            recorded.has_added_hooks = _torch.hook_count() != hooks
            recorded.mutated = [
                place
                for place, (static, version) in enumerate(zip(statics, versions, strict=True))
                if static._version != version or rollback.captures_write(static) or place in written
            ]
            recorded.in_place = storages_in_place(call)
            recorded.outside = rollback.read_from_outside(recorded.in_place, statics)
            recorded.seconds = time.perf_counter() - began
            # Replays would run the breaks as well, whose Python may do anything.
            if plan.measure and not recorded.breaks and not rollback.has_unseen:
                recorded.eager_seconds = eager_seconds
                with rollback.aside():
                    recorded.graph_seconds = replay_seconds(graph.replay, driver, rollback.rewind)
            if recorded.breaks:
                # The capture has run them, and the segments before them, and the call runs them.
                driver.synchronize()
                state.put_back_what_breaks_change()
    return recorded


def _warm_up(
    run: Callable[[], Any],
    plan: Plan,
    rollback: Rollback,
    driver: _driver.Driver,
    begins: Callable[[], None],
    breaks: Calls,
    state: PythonState,
) -> float | None:
    """Call the function; the seconds of the last call, if they are asked for.

    ``begins`` is called when each call begins, ``breaks`` knows whether one had a break, and
    ``state`` what Python had before.

    The first call loads what is loaded only once, and shows what is to be put back. So one that is
    timed comes after another one.
    """
    if not plan.warmup:
        return None

    def call() -> Any:
        # Each begins as the call does: a counter must not run over its end.
        rollback.rewind()
        begins()
        # The first one has shown what it writes.
        is_compiled = plan.compiles and rollback.has_uncompiled
        generators = [*driver.generators()]
        if generators:
            generators += rollback.generators_of(driver.device_type)
        aside = rollback.aside() if is_compiled else nullcontext()
        # What a thread sets up is there before the capture, which has one.
        alone = on_one_thread() if breaks.are_met else nullcontext()
        with draws_on(generators), aside, alone:
            return run()

    calls = max(1, plan.warmup - plan.measure)
    first: list[Any] | None = None
    for place in range(calls):
        result = call()
        if place == 0 and calls > 1 and state.has_set_up:
            first = copied_leaves(result)
        elif first is not None:
            state.note_results(first, copied_leaves(result))
            first = None
        del result
    if calls == 1 and plan.compiles and rollback.has_uncompiled:
        # It is compiled here, and not in the capture.
        call()
    seconds = None
    if plan.measure:
        rollback.rewind()
        begins()
        driver.synchronize()
        with rollback.aside():
            seconds = seconds_of(run, driver)
    driver.synchronize()
    return seconds


def _compiled(
    capture: Callable[[Callable[[CUDAGraph], None]], Captured],
    plan: Plan,
    rollback: Rollback,
    again: Callable[[], None],
) -> Captured:
    """Capture as it was written, which shows what it writes and uses; then compiled, if it can be.

    Args:
        capture: Captures; what it is given ends the capture.
        plan: How.
        rollback: What sees the operators.
        again: Lets all be as before a capture.
    """

    def is_draft() -> bool:
        return bool(plan.warmup) and plan.compiles and rollback.has_uncompiled

    def ends(graph: CUDAGraph) -> None:
        """A draft is not instantiated, and hooks do not learn of it."""
        if is_draft():
            graph.capture_end_pre()
        else:
            _end(plan, graph)

    graph, result = capture(ends)
    if not is_draft():
        if plan.compiles and rollback.has_uncompiled:
            # A first call may keep what it makes, and nobody would compute that of a draft.
            warn_uncompiled(plan.name, "with warmup=0 no call before has shown what it writes")
        return graph, result
    del result
    graph.reset()
    compiled = functools.partial(capture, functools.partial(_end, plan))
    return again_compiled(compiled, rollback, again, plan.name)


def again_compiled(
    capture: Callable[[], Result], rollback: Rollback, again: Callable[[], None], name: str
) -> Result:
    """Capture compiled what was captured as it was written; or that again, if it cannot be.

    What it writes was seen, and does not depend on the compiler.

    Args:
        capture: Captures.
        rollback: What has seen the operators.
        again: Lets all be as before a capture.
        name: What is captured.
    """
    again()
    try:
        with rollback.aside():
            return capture()
    except Exception as error:
        warn_uncompiled(name, first_line(error))
        traceback.clear_frames(error.__traceback__)
    again()
    return capture()


@contextmanager
def watched(plan: Plan, rollback: Rollback, begin: Found) -> Iterator[Steps]:
    """A block in which a function is called and captured, and what is put back afterwards noted.

    Args:
        plan: How.
        rollback: What notes it of tensors.
        begin: What the function finds before.
    """
    # A capture alone computes nothing: what it makes of an optimizer's state is no state.
    steps = Steps(plan.function, begin.stepping, puts_back=plan.preserve or not plan.warmup)
    with ExitStack() as last:
        last.enter_context(_torch.without_autocast_cache())
        if not plan.compiles:
            last.enter_context(_torch.Uncompiled())
        if plan.preserve:
            last.callback(rollback.undo)
        last.enter_context(steps.watched())
        if plan.preserve:
            last.enter_context(rollback).keep(begin.named_tensors)
        yield steps


def warn_uncompiled(name: str, reason: str) -> None:
    """Tell that compiled code was not captured, and why."""
    warnings.warn(
        f"what torch compiles in {name} is captured as it was written: {reason}",
        stacklevel=levels_to_user(),
    )


def capture_once(
    run: Callable[[], Any],
    plan: Plan,
    call: Call,
    statics: list[torch.Tensor],
    driver: _driver.Driver,
    generators: Sequence[torch.Generator],
    again: Callable[[], None],
    at_break: Callable[[], AtBreak] | None,
    in_break: InBreak | None,
    ends: Callable[[CUDAGraph], None],
) -> Captured:
    """Capture on the current stream; in segments, if there is a break.

    Args:
        run: What is captured.
        plan: How.
        call: The call whose arguments it gets.
        statics: The tensors that it gets for those of the call.
        driver: The driver in force.
        generators: Those that it may draw from besides the default one.
        again: Lets all be as before a capture that is thrown away.
        at_break: Gives the gradients that a break finds; None if there are none.
        in_break: The blocks in which breaks run; None if nobody looks at what they change.
        ends: Ends a capture that is whole.
    """
    graph = CUDAGraph(keep_graph=plan.keep_template)
    for generator in generators:
        graph.register_generator_state(generator)
    graph._statics = tuple(statics)
    # Some functions do nothing on the device, as dropout that does not train.
    graph._may_be_empty = True
    graph.capture_begin(pool=plan.pool, capture_error_mode=plan.mode)
    try:
        with breakable(Whole()):
            result = run()
    except (BreakFoundError, GradientBreakError) as error:
        graph._abandon(error)
    except BaseException as error:
        graph._abandon(error)
        raise
    else:
        ends(graph)
        return graph, result
    if plan.preserve and not plan.warmup:
        raise _UnseenWritesError
    if plan.only_captures:
        _fill(statics, call, driver)
    # Nothing has computed the gradients that it has made.
    again()
    # Only a function with a break is captured in segments, which costs more.
    session = Session(
        plan.stream, plan.pool, plan.mode, generators, at_break=at_break, in_break=in_break
    )
    return SegmentedGraph._made(session, run, statics)


def storages_in_place(call: Call) -> set[int]:
    """The numbers of the storages of arguments that are read where they lie."""
    tensors = [leaf.value for leaf in call.leaves if leaf.kind == "fixed"]
    memories = [_torch.memory_of(tensor) for tensor in tensors]
    return {_torch.storage_id(one) for one in memories if one is not None}


def _fill(statics: list[torch.Tensor], call: Call, driver: _driver.Driver) -> None:
    """Give static tensors the contents of a call's: breaks run in a capture, and read them."""
    # Replays on any stream may still read what is about to be written.
    driver.synchronize()
    for static, tensor in zip(statics, call.tensors, strict=True):
        # What the function writes is told by the versions, without this.
        static.data.copy_(tensor)


def _end(plan: Plan, graph: CUDAGraph) -> None:
    """End a capture, up to the instantiation where somebody else does that."""
    if not plan.instantiates:
        graph.capture_end_pre()
        graph._run_hooks("capture_end")
        return
    graph.capture_end()
    if plan.keep_template:
        try:
            graph.instantiate()
        except BaseException:
            graph.reset()
            raise


class _UnseenWritesError(Exception):
    """A capture would run segments between breaks, and no call has shown what they write."""


def wait_after_error(driver: _driver.Driver, error: object, *_: object) -> None:
    """Wait for the work of a block that raises: it reads memory that the error lets go."""
    if error is not None:
        with suppress(Exception):  # what comes out is the first one
            driver.synchronize()
