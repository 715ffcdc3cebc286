"""Captures of calls whose results have a backward pass to come: a graph for each pass."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from cgraph import _driver, _torch
from cgraph._graphed.function_module import FunctionModule, require_in_place, stand_ins
from cgraph._graphed.leaf_gradients import LeafGradients
from cgraph._graphed.observation import Observation
from cgraph._graphed.record import BrokenError, Capture, CapturePlan, frozen_in, observer_of
from cgraph._operators.observer import ObservedBreaks
from cgraph._operators.snapshots import RandomSnapshot
from cgraph._python.assignments import Assignments
from cgraph._python.names import names_in
from cgraph._python.steps import put_at
from cgraph._reason import Reason
from cgraph.breaks import GradientBreakError, Work, breakable, innermost, on_one_thread
from cgraph.callables import callables_on, graphed_of
from cgraph.errors import CallableError

if TYPE_CHECKING:
    from cgraph._debug.periodic_check import PeriodicCheck
    from cgraph._debug.training import DebuggedCall

__all__ = ["Trained", "train"]


class Trained:
    """The captured passes of a key, in place of a :class:`cgraph._graphed.recorded.Recorded`.

    Attributes:
        modules: The modules that the function reaches.
        replay: The callable that replays them.
        statics: The tensors that calls are copied to.
        seconds: The time of captures and instantiations together.
        writes, takes: As for :class:`cgraph._graphed.recorded.Recorded`.
        frozen: Likewise.
        debugged: The callable for debugging, called instead; None without debugging.
        breaks: Likewise.
    """

    mutated: tuple[int, ...] = ()

    def __init__(self, module: FunctionModule, statics: list[torch.Tensor], seconds: float) -> None:
        self.modules = [*module.reached]
        self.replay = graphed = graphed_of(module)
        self.debugged: DebuggedCall | PeriodicCheck | None = None
        self.writes: list[tuple[int, int]] = []
        self.takes: list[tuple[int, int]] = []
        self.kept: list[Any] = []
        self.frozen: tuple[str, ...] = ()
        self.statics = statics
        self.seconds = seconds
        self._graphs, self.breaks = graphed.graphs, graphed.breaks

    def finish(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer the call that was captured; with breaks its forward pass has already run."""
        if self.breaks:
            return self.replay.as_run(args, kwargs)
        return self.replay(*args, **kwargs)

    @property
    def is_running(self) -> bool:
        """True if a replay in segments is under way, of which the caller may be part."""
        return any(one._is_running for one in self._graphs)

    def is_open(self) -> bool:
        """True if the last call's backward pass may still run, which another call would spoil."""
        return self.replay.is_open

    @property
    def pool(self) -> _driver.Handle:
        """The pool of their memory."""
        return self._graphs[0].pool()

    @property
    def nodes(self) -> int:
        """Number of nodes of the graphs."""
        return sum(graph.memory().nodes for graph in self._graphs)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the device that the graphs hold in their pool and for their execs."""
        memories = [graph.memory() for graph in self._graphs]
        return sum((memory.held or 0) + (memory.exec or 0) for memory in memories)

    def reset(self) -> None:
        """Drop the graphs once the last call that needs them has."""
        self._graphs = ()
        if self.debugged is not None:
            self.debugged.reset()
            self.debugged = None


def train(plan: CapturePlan, statics: list[torch.Tensor]) -> Capture:
    """Capture the forward and the backward pass of a call; a replay then does its work.

    With breaks the forward pass has already run, and that replay does not run it again.

    Args:
        plan: The plan.
        statics: The tensors that the graphs read instead of the call's.

    Raises:
        BrokenError: The captures failed; nothing has run, and Python's state is as before.
        CaptureError: They failed after a break that has run.
    """
    call, driver, began = plan.call, plan.driver, time.perf_counter()
    modules = plan.before.guards.modules
    static_leaves = [one.value for one in call.statics]
    own = torch.nn.ParameterList(
        [one for one in static_leaves if isinstance(one, torch.nn.Parameter)]
    )
    modules = [*modules, own] if len(own) else [*modules]
    observer = observer_of(driver.device_type, statics, call.tensors, lines=plan.lines)
    observer.is_capture = True

    def refuse(refusal: Reason) -> None:
        raise refusal.error()

    observer.stop = refuse
    gradients = LeafGradients(plan.before.guards.leaves)
    state = Assignments(plan.before.guards, names_in(plan.before.codes), call.objects)
    is_divided = plan.before.has_breaks

    @contextmanager
    def watched() -> Iterator[None]:
        breaks = ObservedBreaks(observer, innermost())
        with observer.watching(), observer.noting(), breakable(breaks):
            yield

    module = FunctionModule(plan.function, modules, watched)
    stream = driver.new_stream()
    random = RandomSnapshot(plan.before.generators)
    torch.clear_autocast_cache()
    try:
        with stand_ins(modules) as parameters, breakable(_Breaks()), on_one_thread():
            made = (one for module in modules for one in module.parameters())
            standing = {id(parameters[id(one)]): one for one in made if id(one) in parameters}
            given = [standing.get(id(one), one) for one in static_leaves]
            args, kwargs = call.arguments(statics, given)
            with _torch.without_autocast_cache():
                callables_on(
                    stream,
                    module,
                    args,
                    0,
                    allow_unused_input=True,
                    pool=plan.pool,
                    capture_error_mode="thread_local",
                    sample_kwargs=kwargs,
                    preserve_state=False,
                    clone_outputs=plan.options.outputs == "fresh",
                    clone_gradients=False,
                    is_divided=is_divided,
                    # Guards compare weights and hooks, and the values that hooks read.
                    is_public=False,
                )
            require_in_place(modules, parameters)
        if observer.refusals:
            # The function has caught the error.
            refuse(observer.refusals[0])
        graphed_of(module).stand_for(parameters)
        # Guards have compared constants.
        graphed_of(module).take_any_constants()
        module.let_go()
        for place, one in enumerate(statics):
            if observer.has_written(one):
                raise CallableError(
                    f"{call.names[place]} is written while gradients are recorded, but writes of a"
                    " graphed backward pass do not reach the caller's tensor: return the"
                    " new value instead"
                )
        driver.synchronize()
    except Exception as error:
        random.put_back()
        if is_divided:
            raise
        gradients.put_back()
        state.put_back()
        raise BrokenError(error) from error
    finally:
        torch.clear_autocast_cache()
    trained = Trained(module, statics, time.perf_counter() - began)
    trained.writes = observer.writes_outside()
    trained.takes = observer.taken_outside()
    changes = plan.reads.changes(plan.before.guards, call.objects)
    # Stand-ins are other objects than the parameters.
    changes = [one for one in changes if not (isinstance(one.now, str) and one.now == one.before)]
    left = [one for one in state.changed() if not plan.reads.is_left(one.target.name)]
    state.undo(left)
    left = plan.reads.counted(left, parameters)
    shown = Observation.of(
        observer,
        plan.reads,
        call,
        statics,
        (),
        has_breaks=is_divided,
        before=plan.before,
    )
    trained.kept, trained.frozen = frozen_in(observer.trace, driver, trained.pool)
    # A backward pass may come after the key has dropped the graphs.
    trained.replay.kept = trained.kept
    difference = shown.difference(plan.before, observer, changes, left)
    if difference is not None:
        for way, value in left:
            put_at(way.holder, way.path[-1], value)
    return Capture(trained, None, shown, difference, None, state.put_back)


class _Breaks:
    """The breaks in captures of passes, which divide them only if the previous call had breaks."""

    def run(self, work: Work, args: Any, kwargs: Any) -> Any:
        """Refuse a break for which no session divides the capture."""
        raise GradientBreakError(
            f"the break {work.name} was met in a capture, but not in the previous call"
        )
