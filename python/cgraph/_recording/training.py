"""Keys whose calls need gradients: a forward and a backward pass."""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.amp.grad_scaler import GradScaler

from cgraph import _driver, _torch
from cgraph._captures.timing import seconds_of
from cgraph._recording.breakables import Passes
from cgraph._recording.calls import Call
from cgraph._recording.capture import (
    again_compiled,
    record,
    warn_uncompiled,
    watched,
)
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
from cgraph._recording.held import Holding
from cgraph._recording.lent import Lent
from cgraph._recording.plan import Plan
from cgraph._recording.python_state import PythonState
from cgraph._recording.recorded import Recorded
from cgraph._recording.refusals import require_no_gradient
from cgraph._recording.surface import (
    NoGradientError,
    Surface,
    require_in_place,
    stand_ins,
)
from cgraph._recording.unchanged import Training, Unchanged
from cgraph._state.attributes import Attributes
from cgraph._state.drawing import draws_on
from cgraph._state.gradients import gradients_there, noted, require_left_alone
from cgraph._state.holders import Holder, require_none_replaced, used_of
from cgraph._state.parts import Parts
from cgraph._state.reads import still_there
from cgraph._state.rollback import Rollback
from cgraph._state.search import Found
from cgraph._state.surroundings import objects_of
from cgraph.breaks import GradientBreakError, breakable, on_one_thread
from cgraph.callables import callables_on, graphed_of
from cgraph.errors import CallableError
from cgraph.segments import SegmentedGraph

if TYPE_CHECKING:
    from cgraph._functions.debug.training import DebuggedCall

__all__ = ["Trained", "train", "train_or_record"]


class Trained:
    """The captured passes of a key, in the place of :class:`cgraph._recording.recorded.Recorded`.

    Attributes:
        replay: What replays them.
        statics: The tensors that calls are copied to.
        seconds: What warm-up, captures and instantiation took together.
        eager_seconds: Both passes without graphs; None if that was not measured.
        graph_seconds: One replay of both, likewise.
        writes: As for :class:`cgraph._recording.recorded.Recorded`.
        lent: What was returned last; None if nobody is told of results that are still held.
        has_added_hooks: Whether a hook was added to something during the captures.
        debugged: What is called instead, to find a mistake; None if nobody looks for one.
        breaks: As for :class:`cgraph._recording.recorded.Recorded`.
        used: As for :class:`cgraph._recording.recorded.Recorded`.
        reads: Likewise.
        outside: Likewise.
    """

    mutated: tuple[int, ...] = ()

    def __init__(
        self,
        surface: Surface,
        statics: list[torch.Tensor],
        seconds: float,
        eager_seconds: float | None,
        graph_seconds: float | None,
        lent: Lent | None,
    ) -> None:
        # The graphed forward of a module works only as long as the module lives.
        self._surface = surface
        self.replay: Callable[..., Any] = surface.forward
        self.debugged: DebuggedCall | None = None
        self.used: list[Holder] = []
        self.reads: list[Holder] = []
        self.writes: list[tuple[int, int]] = []
        self.outside: list[torch.UntypedStorage] = []
        self.has_added_hooks = surface.hook_count != _torch.hook_count()
        self.lent = lent
        # Who notes the last call is not to keep the graphs.
        self._is_open = weakref.WeakMethod(self.is_open)
        self.statics = statics
        self.seconds = seconds
        self.eager_seconds = eager_seconds
        self.graph_seconds = graph_seconds
        graphed = graphed_of(surface)
        self._graphs, self.breaks = graphed.graphs, graphed.breaks

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Replay, for a caller who gets the result."""
        replay = self.debugged or self.replay
        if self.lent is None:
            return replay(*args, **kwargs)
        self.lent.release((args, kwargs))
        self.lent.holding.called(self._is_open)
        return self.lent.remember(replay(*args, **kwargs))

    @property
    def is_running(self) -> bool:
        """As for :class:`cgraph._recording.recorded.Recorded`."""
        return any(isinstance(one, SegmentedGraph) and one._is_running for one in self._graphs)

    def is_open(self) -> bool:
        """Whether the backward pass of the last call may still run, which another would spoil."""
        return graphed_of(self._surface).is_open

    @property
    def modules(self) -> Sequence[torch.nn.Module]:
        """Those that the function reaches."""
        return list(self._surface.reached)

    @property
    def parameters(self) -> tuple[torch.Tensor, ...]:
        """The parameters that get gradients, in the order of the autograd node."""
        return graphed_of(self._surface).parameters

    def gradients_of_all(self, found: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Those of all inputs and parameters, of what the autograd node has passed on."""
        return graphed_of(self._surface).of_all(found)

    @property
    def pool(self) -> _driver.Handle:
        """The pool of their memory."""
        return self._graphs[0].pool()

    @property
    def nodes(self) -> int:
        """How many nodes the graphs have."""
        return sum(graph.memory().nodes for graph in self._graphs)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the device that the graphs hold in their pool and for their execs."""
        memories = [graph.memory() for graph in self._graphs]
        return sum(memory.held + memory.exec for memory in memories)

    def reset(self) -> None:
        """Let the graphs go with the last call that needs them."""
        self._graphs = ()
        if self.debugged is not None:
            self.debugged.reset()
            self.debugged = None


def train_or_record(
    plan: Plan,
    call: Call,
    statics: list[torch.Tensor],
    driver: _driver.Driver,
    modules: Sequence[torch.nn.Module],
    copies: bool,
    holding: Holding | None,
) -> Recorded | Trained:
    """Capture forward and backward pass, or one graph where the result requires no gradient.

    Args:
        plan: How.
        call: A call of the key.
        statics: What the graph reads instead of the call's tensors.
        driver: The driver in force.
        modules: Those whose parameters get gradients.
        copies: Whether results are copies.
        holding: Who is told of results that a caller still has.
    """
    given = call, statics, modules, copies, holding
    try:
        try:
            return train(plan, *given, is_divided=False)
        except GradientBreakError:
            if plan.debugs:
                raise
        # Captures in segments run them: what they write is put back if a call has shown it.
        again = replace(plan, warmup=1 if plan.preserve else 0, measure=False)
        return train(again, *given, is_divided=True)
    except NoGradientError:
        if not plan.preserve:
            # It has made a call, whose traces stay.
            plan = replace(plan, warmup=max(0, plan.warmup - 1))
    recorded = record(plan, call, statics, driver)
    require_no_gradient(recorded)
    return recorded


def train(
    plan: Plan,
    call: Call,
    statics: list[torch.Tensor],
    modules: Sequence[torch.nn.Module],
    copies: bool,
    holding: Holding | None,
    is_divided: bool,
) -> Trained:
    """Capture forward and backward pass.

    Args:
        plan: How.
        call: A call of the key.
        statics: What the graph reads instead of the call's tensors.
        modules: Those whose parameters get gradients.
        copies: Whether results are copies.
        holding: Who is told of results that a caller still has.
        is_divided: Whether breaks divide the captures.

    Raises:
        GradientBreakError: They do not, and there is one.
        NoGradientError: There is no backward pass. All is as it was.
        CallableError: The function cannot be graphed with gradients.
    """
    args, kwargs = call.arguments(statics)
    versions = [static._version for static in statics]
    driver = _driver.current()
    begin = plan.found()
    require_none_drained(begin)
    parts = Parts(plan.parts(call.modules, begin))
    leaves = plan.leaves(args, kwargs, begin)
    training = Training(parts.flags, leaves)
    unchanged = Unchanged(call, statics, training)
    rollback = Rollback(leaves=leaves, is_capturing=driver.is_capturing)
    began = time.perf_counter()
    with ExitStack() as last:
        steps = last.enter_context(watched(plan, rollback, begin))
        begun = Attributes([*plan.dictionaries, *begin.attributes], begin.dictionaries)
        is_made = rollback.makes_or_is_of(statics)
        state = PythonState(begun, begin, parts, is_made, rollback)
        training.is_of_a_break = state.is_of_a_break
        last.push(state.after)
        last.push(training.after)
        gradients = [(one, one.grad) for one in leaves]
        last.push(functools.partial(_put_back_after_error, gradients))
        held: list[Found] = []
        # What calls before have made and left.
        kept: list[torch.Tensor] = []
        # The graph keeps what notes this, and is not to keep the call.
        given = call.modules
        uncomputed: list[Attributes] = []
        # The parameters whose stand-ins the capture uses.
        taken: list[torch.nn.Parameter] = []
        before: list[Attributes] = []
        values: list[Attributes] = []

        def begins() -> None:
            """Note what there is when a capture begins: calls may have made some of it."""
            # What Python does in breaks is done again.
            state.put_back_what_breaks_change()
            found = plan.found()
            held[:] = [found]
            steps.captures_now()
            training.captures_now()
            state.captures_now(has_called=bool(plan.warmup))
            # What a first call puts into a dictionary may be a table, which stays.
            tables = found.all_dictionaries if plan.warmup else ()
            before[:] = [Attributes([*plan.dictionaries, *tables])]
            values[:] = [Attributes([*plan.dictionaries, *found.all_dictionaries])]
            tensors = [tensor for holder in found.all_holders for tensor in holder.tensors]
            rollback.notice(tensors)
            owners = (part._buffers for part in plan.parts(given, found))
            buffers = (one for owner in owners for one in owner.values() if one is not None)
            kept[:] = filter(is_made, (*tensors, *buffers))
            # What is put into other dictionaries may be a table, which each replay computes.
            uncomputed[:] = [] if plan.warmup else [Attributes(found.attributes)]

        passes = Passes(state.in_break)
        has_history = any(tensor.grad_fn is not None for tensor in call.tensors)
        warmup, written = plan.warmup, set[int]()
        if warmup:
            # What the function makes in its first call, as an optimizer, is to have the real ones.
            # All is as it was: what the first call changes is told from this.
            state.require_same()
            with gradients_there(leaves), breakable(passes), draws_on(driver.generators()):
                alone = noted(leaves)
                surface = Surface(plan.function, modules, has_history, begins)
                result = surface.forward(*args, **kwargs)
                if state.has_set_up:
                    first = copied_leaves(result)
                    rollback.rewind()
                    state.note_results(first, copied_leaves(surface.forward(*args, **kwargs)))
                del result
                require_left_alone(alone)
            unchanged.require(args, kwargs)
            if not is_divided:
                passes.require_none()
            state.put_back_what_breaks_change()
            state.require_same()
            # Of the backward pass there was none yet.
            warmup = max(1, warmup - 1)
            driver.synchronize()
            written = unchanged.written(rollback.is_written)

        def captured() -> Surface:
            surface = Surface(plan.function, modules, has_history, begins)
            require_unmoved(plan, rollback)
            threads = on_one_thread() if is_divided else nullcontext()
            with stand_ins(modules) as parameters, breakable(passes), threads:
                made = [one for module in modules for one in module.parameters()]
                alone = noted([*leaves, *made])
                callables_on(
                    stream,
                    surface,
                    args,
                    warmup,
                    allow_unused_input=True,
                    pool=plan.pool,
                    capture_error_mode=plan.mode,
                    sample_kwargs=kwargs,
                    preserve_state=plan.preserve,
                    clone_outputs=copies,
                    is_divided=is_divided,
                )
                require_left_alone(alone)
                require_in_place(modules, parameters)
                for found in held:
                    require_none_replaced(found.all_holders, rollback.captures_name)
                used = (one for one in made if rollback.captures_name(one))
                taken[:] = [parameters[id(one)] for one in used if id(one) in parameters]
            if not is_divided:
                passes.require_none()
            require_state(steps)
            rollback.require_one_device()
            require_unmoved(plan, rollback)
            # Others that the passes write may be of what is around them, as gradients.
            is_written = any(map(rollback.captures_write, kept))
            if is_written or any(one.has_new_tensor for one in uncomputed):
                raise state_is_made()
            for attributes in before:
                attributes.require_no_new_tensor(state.of_breaks)
            for attributes, found in zip(values, held, strict=True):
                # Python code of breaks runs in replays as well.
                if not is_divided:
                    state.require_same_now(attributes, found)
                require_none_kept(found, is_made, state.of_breaks, statics, begin)
                require_none_grown(attributes, state.of_breaks)
                if not is_divided or plan.warmup:
                    state.require_same(captured=True)
            graphed_of(surface).stand_for(parameters)
            return surface

        stream = driver.new_stream()
        scaling = (*objects_of(plan.function, (GradScaler,)), *begin.stepping)
        try:
            surface = captured()
        except WarmupError:
            if plan.warmup or not any(isinstance(one, GradScaler) for one in scaling):
                raise
            # They look for the gradients of the real parameters, not of the stand-ins.
            raise NoGradientError from None
        if plan.compiles and rollback.has_uncompiled and not plan.warmup:
            # A first call may keep what it makes, and nobody would compute that of a draft.
            warn_uncompiled(plan.name, "with warmup=0 no call before has shown what it writes")
        elif plan.compiles and rollback.has_uncompiled:
            del surface
            surface = again_compiled(captured, rollback, rollback.rewind, plan.name)
        surface.let_go()
        graphed = graphed_of(surface)
        driver.synchronize()
        state.put_back_what_breaks_change()
        seconds = time.perf_counter() - began
        eager_seconds: float | None = None
        graph_seconds: float | None = None
        # The first call loads what is loaded only once.
        if plan.measure and plan.warmup and not rollback.has_unseen:
            with rollback.aside():
                graph_seconds = graphed.timed(driver)
                both = functools.partial(_run_both, plan.function, surface, args, kwargs)
                eager_seconds = seconds_of(both, driver)
    unchanged.require(args, kwargs)
    for place, (name, static) in enumerate(zip(call.names, statics, strict=True)):
        # Also through an alias, as `.data` gives one.
        is_written = static._version != versions[place] or (
            not plan.warmup and rollback.captures_write(static)
        )
        if is_written or place in written:
            raise CallableError(
                f"{name} is written while gradients are recorded, and what a graphed backward pass"
                " leaves in it does not reach the caller's: return the new value instead"
            )
    writes = rollback.captured_writes(statics)
    if (reason := call.reason_beside(writes)) is not None:
        raise NotReadyError(reason)
    lent = None if copies or holding is None else Lent(holding)
    trained = Trained(surface, statics, seconds, eager_seconds, graph_seconds, lent)
    numbers = set(map(id, taken))

    def uses(tensor: torch.Tensor) -> bool:
        return rollback.captures_name(tensor) or id(tensor) in numbers

    trained.used = used_of(held[0].followed, uses)
    trained.reads = still_there(held[0].reads, state.of_breaks)
    trained.writes = writes
    trained.outside = rollback.read_from_outside((), statics)
    return trained


def _put_back_after_error(
    gradients: Sequence[tuple[torch.Tensor, torch.Tensor | None]], error: object, *_: object
) -> None:
    """Let leaves have the gradients that they had, at the end of a block that raises."""
    if error is not None:
        for leaf, gradient in gradients:
            leaf.grad = gradient


def _run_both(function: Callable[..., Any], surface: Surface, args: Any, kwargs: Any) -> None:
    """Both passes without graphs."""
    outputs = _with_gradients(_torch.tree_iter(function(*args, **kwargs)))
    inputs = _with_gradients((*_torch.tree_iter((args, kwargs)), *surface.parameters()))
    gradients = [torch.empty_like(output) for output in outputs]
    torch.autograd.grad(outputs, inputs, gradients, allow_unused=True)


def _with_gradients(leaves: Iterable[Any]) -> list[torch.Tensor]:
    return [one for one in leaves if isinstance(one, torch.Tensor) and one.requires_grad]
