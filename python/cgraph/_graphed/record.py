"""Captures of calls without a backward pass to come: one graph, or segments between breaks."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from cgraph import _torch
from cgraph._breaks.sessions import Session
from cgraph._captures.collector import collections_held_off
from cgraph._captures.spelled_out import SpelledOut
from cgraph._driver import Driver, Handle
from cgraph._graphed.call import Call, dense_like
from cgraph._graphed.device_turn import wait_for_device
from cgraph._graphed.leaf_gradients import LeafGradients, detached
from cgraph._graphed.observation import Observation, Reads
from cgraph._graphed.options import Options
from cgraph._graphed.reasons import reason_against_result
from cgraph._graphed.recorded import Recorded
from cgraph._graphed.results import Result
from cgraph._graphed.static_memory import PoolUse
from cgraph._graphed.writeback import change_given, handed_over
from cgraph._operators.launches import Suspects
from cgraph._operators.observer import ObservedBreaks, Observer
from cgraph._operators.snapshots import RandomSnapshot, bytes_of
from cgraph._operators.trace import Trace
from cgraph._python.assignments import Assigning, Assignments, assignable_in
from cgraph._python.names import names_in
from cgraph._reason import Reason
from cgraph._torch import tree_iter, tree_map
from cgraph.breaks import breakable, on_one_thread
from cgraph.causes import Cause
from cgraph.segments import SegmentedGraph

if TYPE_CHECKING:
    from cgraph._graphed.train import Trained

__all__ = [
    "BrokenError",
    "Capture",
    "CapturePlan",
    "capturing",
    "frozen_in",
    "observer_of",
    "record",
]


@dataclass(frozen=True)
class CapturePlan:
    """The plan for one capture.

    Attributes:
        function: The function to capture.
        name: Its name in errors.
        reads: What it reads of Python.
        options: Its options.
        driver: The driver in force.
        pool: The pool of the capture.
        use: The use of the pool of captures without gradients.
        stream: The stream of the capture: captures on one stream of a pool share memory.
        call: The call.
        before: The observation of the previous call.
        lines: True if the lines of operators are noted.
    """

    function: Callable[..., Any]
    name: str
    reads: Reads
    options: Options
    driver: Driver
    pool: Any
    use: PoolUse
    stream: Any
    call: Call
    before: Observation
    lines: bool


@dataclass
class Capture:
    """The outcome of the capture of a call, whose work has been done.

    Attributes:
        recorded: The graph; None if the capture ended before the function did.
        finish: Changes the caller's arguments and returns the result of the function, if that ran
            to its end eagerly.
        shown: The observation of the call; None if the capture ended before.
        difference: A difference from the previous call, which forbids replays.
        refusal: The operator at which the capture ended.
        put_back: Puts back what the function has assigned in Python.
        drop_beside: Drops the graphs that share memory with it, if somebody keeps some of it.
    """

    recorded: Recorded | Trained | None
    finish: Callable[[], Any] | None
    shown: Observation | None
    difference: Reason | None
    refusal: Reason | None
    put_back: Callable[[], None]
    drop_beside: Callable[[], None] = lambda: None

    def discard(self) -> None:
        """Drop the graph, and those beside it if somebody keeps what this one has computed.

        Autograd keeps graphs with gradients as long as it may need them.
        """
        if isinstance(self.recorded, Recorded):
            self.recorded.reset()
        self.drop_beside()


class BrokenError(Exception):
    """A capture has broken, and Python is as before it: the call can be made again.

    Attributes:
        cause: The error that broke it.
    """

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


def observer_of(
    device_type: str, inputs: Sequence[torch.Tensor], given: Sequence[torch.Tensor], *, lines: bool
) -> Observer:
    """Make the observer of a call.

    Args:
        device_type: The device type of the tensors that a capture works on.
        inputs: The tensors that the function gets in place of those that are copied.
        given: The tensors of the call in their places.
        lines: Note the line of each operator.
    """
    are_dense = [
        one.layout is torch.strided
        and (one.is_contiguous() or one.stride() == dense_like(one).stride())
        for one in given
    ]
    return Observer(device_type, inputs, given, are_dense, lines=lines)


def record(plan: CapturePlan, statics: list[torch.Tensor]) -> Capture:
    """Capture a call, do its work, and compare it with the previous call.

    Args:
        plan: The plan.
        statics: The tensors that the graph reads instead of the call's, with the same contents.

    Raises:
        BrokenError: The capture failed; nothing has run.
        CaptureError: It failed after a break that has run.
    """
    call, driver, began = plan.call, plan.driver, time.perf_counter()
    args, kwargs = call.arguments(statics)
    containers = call.containers_beside(args, kwargs)
    observer = observer_of(driver.device_type, statics, call.tensors, lines=plan.lines)
    observer.is_capture, observer.by_recorder = True, driver.device_type == "cpu"
    pairs = enumerate(call.names)
    written = frozenset(place for place, name in pairs if name in plan.before.written)
    observer.suspects = Suspects(statics, written)
    gradients = LeafGradients(plan.before.guards.leaves if plan.before.uses_gradients else ())
    names = names_in(plan.before.codes)
    given = call.objects, (args, kwargs), call.places
    state = Assignments(plan.before.guards, names, *given, plan.reads.is_left)
    stopped: list[Reason] = []

    def at_break(fn: Callable[..., Any]) -> Callable[..., Any]:
        return state.at_break(gradients.at_break(fn))

    def can_return(tensor: torch.Tensor) -> bool:
        if tensor.requires_grad or reason_against_result(tensor, driver.device_type, is_new):
            return False
        own = _torch.memory_of(tensor)
        return is_new(tensor) or any(
            own is not None and own.data_ptr() == one.untyped_storage().data_ptr()
            for one in statics
        )

    is_new = functools.partial(observer.is_new, name_of_place=plan.before.guards.name_beside)
    spelled = SpelledOut(observer.literal)
    with capturing(plan, observer.watching(), at_break, spelled) as session:
        try:
            session.begin(statics)

            def stop(refusal: Reason) -> None:
                stopped.append(refusal)
                session.stop()

            observer.stop = stop
            try:
                breaks = ObservedBreaks(observer, session, state.aside)
                state.place(call.placed, statics[len(statics) - len(call.placed) :])
                with observer.noting(), breakable(breaks), on_one_thread():
                    returned = plan.function(*args, **kwargs)
            finally:
                observer.stop = None
            if observer.is_backward and call.mode.grad:
                returned = detached(returned)
            if stopped:
                session.leave_modes()
                session.close()
                state.unplace()
                own = containers, statics, call.tensors
                finish = functools.partial(handed_over, returned, *own)
                return Capture(None, finish, None, None, stopped[0], state.put_back)
            of_call = assignable_in((args, kwargs), call.places)
            returns = next((path for path, _, one in of_call if one is returned), None)
            # Containers in the result may be among what is put back.
            returned = tree_map(lambda leaf: leaf, returned)
            assigned, others = state.taken_out(can_return)
            values = [one.value for one in assigned]
            result = Result.of(returned, statics, is_new, driver.device_type, values)
            del returned
            gradients.end()
            graph = SegmentedGraph(session.finish(result.fresh(plan.options.outputs)))
        except BaseException as error:
            has_broken, was_stopped = session.has_broken, bool(stopped)
            session.fail(error)
            state.unplace()
            if was_stopped or has_broken or not isinstance(error, Exception):
                raise
            gradients.put_back()
            state.put_back()
            raise BrokenError(error) from error
        left = observer.left([*result.storages, *_storages_in(session, gradients)])
        session.close()
    recorded = Recorded(graph, statics, result, time.perf_counter() - began, plan.stream)
    recorded.gradients = gradients
    recorded.generators = plan.before.generators
    recorded.mutated = [place for place, one in enumerate(statics) if observer.has_written(one)]
    recorded.writes = observer.writes_outside()
    recorded.takes = observer.taken_outside()
    shown = Observation.of(
        observer,
        plan.reads,
        call,
        statics,
        result.leaves,
        has_breaks=bool(recorded.breaks),
        before=plan.before,
        assigned=assigned,
        gradients=gradients.at_begin or None,
    )
    recorded.kept, recorded.frozen = frozen_in(observer.trace, plan.driver, recorded.pool)
    recorded.kept += [one.untyped_storage() for one in spelled.kept]
    changes = plan.reads.changes(plan.before.guards, call.objects)
    others = plan.reads.counted(others)
    difference = shown.difference(plan.before, observer, changes, others, assigned)
    if (moving := plan.reads.copy(assigned, observer.trace.outside)) is not None:
        text = f"{moving} is read and assigned: it is copied from now on"
        difference = Reason(Cause.MOVING_TENSOR, text)
    if (changed := change_given(containers, statics, call.tensors)) is not None:
        text = f"the function changes an argument: a {changed}"
        difference = Reason(Cause.CHANGED_ARGUMENT, text)
    if difference is None and left and not recorded.breaks:
        ignored = plan.before.guards.memories_at(plan.options.ignores)
        but = [*result.storages, *_storages_in(None, gradients), *ignored]
        difference = None if plan.options.ignores("") else _left_behind(observer, but)
    # Where the call's other assignments stay, ways may lead elsewhere now.
    ways = [one.target for one in assigned]
    if difference is None:
        ways = [one._replace(holder=None, value=None) for one in ways]
    recorded.assign = Assigning(ways, returns)
    return Capture(recorded, None, shown, difference, None, state.put_back)


@contextmanager
def capturing(
    plan: CapturePlan,
    watching: AbstractContextManager[None],
    at_break: Callable[[Callable[..., Any]], Callable[..., Any]] | None,
    spelled: SpelledOut,
    *,
    runs: bool = True,
) -> Iterator[Session]:
    """Capture on the plan's stream within a ``with`` block; yield the session.

    Args:
        plan: The plan.
        watching: The block in which operators are observed.
        at_break: See :class:`cgraph._breaks.sessions.Session`.
        spelled: Makes tensors that Python spells out, if the previous call had some.
        runs: Do the work that is captured.
    """
    driver, stream, use = plan.driver, plan.stream, plan.use
    before = driver.current_stream()
    # Replays on other streams may still read memory that the capture is about to write.
    wait_for_device(driver)
    # The capture is replayed as soon as it ends.
    use.lent.overwrite()
    torch.clear_autocast_cache()
    random = RandomSnapshot(plan.before.generators)
    spells = any(one.name == "literal" for one in plan.before.trace.operators)
    # On the simulator they are captured as they are.
    spelling = spelled if spells and driver.device_type == "cuda" else nullcontext()
    try:
        with driver.stream(stream), collections_held_off(), watching, spelling:
            session = Session(
                stream,
                plan.pool,
                "thread_local",
                plan.before.generators,
                at_break=at_break,
                may_be_empty=True,
                runs=runs,
                gives_up=plan.before.has_breaks,
            )
            with session.forks.watched():
                yield session
    except BaseException:
        random.put_back()
        raise
    finally:
        torch.clear_autocast_cache()
        with suppress(RuntimeError):  # segments may be under way
            if before != stream:
                before.wait_stream(stream)
            # Replays on other streams come after those of the capture.
            use.last_stream.follow()


def _storages_in(session: Session | None, gradients: LeafGradients) -> list[int]:
    """Return the numbers of the storages that a graph itself keeps."""
    kept = [] if session is None else session.kept
    tensors = [one for one in tree_iter(kept) if isinstance(one, torch.Tensor)]
    tensors += [one for _, one in gradients.given if one is not None]
    memories = _torch.memories_of(tensors)
    return [_torch.storage_id(one) for one in memories]


def _left_behind(observer: Observer, but: Sequence[int]) -> Reason | None:
    """Describe a tensor of the capture that is still referenced; None if all were garbage."""
    gc.collect()
    left = observer.left(but)
    if not left:
        return None
    operator = observer.trace.operators[left[0][1]]
    text = f"somebody keeps a new tensor that {operator.name} made"
    return Reason(Cause.NEW_STATE, text, operator.line)


def frozen_in(
    trace: Trace, driver: Driver, pool: Handle
) -> tuple[list[torch.UntypedStorage], tuple[str, ...]]:
    """Return the unguarded storages that a graph reads, which must stay, and a text for each."""
    kept, words = [], []
    for one in trace.outside.values():
        memory = None if one.is_named else one.storage
        if memory is None:
            continue
        # It may have been created without an operator.
        if one.kept is None and driver.is_in_pool(bytes_of(memory), pool):
            continue
        kept.append(memory)
        operator = trace.operators[one.place]
        where = "" if operator.line is None else f" ({operator.line})"
        dtype = str(one.dtype).removeprefix("torch.")
        words.append(f"{dtype}{list(one.shape)}, taken by {operator.name}{where}")
    return kept, tuple(words)
