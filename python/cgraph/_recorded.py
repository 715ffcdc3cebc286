"""The capture of one key of a graphed function, and the native entry that replays it."""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from cgraph import _core, _driver, _torch
from cgraph._attributes import Attributes
from cgraph._calls import Call, hides_tensors
from cgraph._collector import collections_held_off
from cgraph._constants import is_array
from cgraph._gradients import Gradients
from cgraph._rollback import Rollback
from cgraph._surroundings import Holder, optimizers_put_back, tensors_of
from cgraph._timing import replay_seconds, seconds_of
from cgraph._torch import tree_flatten
from cgraph._unchanged import Unchanged
from cgraph.breaks import breakable
from cgraph.cudagraph import CUDAGraph
from cgraph.errors import CaptureError
from cgraph.segments import SegmentedGraph

if TYPE_CHECKING:
    from cgraph._debug import Debugged
    from cgraph._footprint import Footprint

__all__ = ["NotReadyError", "Plan", "Recorded", "WarmupError", "record"]


@dataclass(frozen=True)
class Plan:
    """How a key is to be captured.

    Attributes:
        function: What is captured.
        pool: The pool of the capture.
        stream: The stream that all captures are made on.
        mode: The capture error mode.
        warmup: How often the function is called before.
        preserve: Put back what the calls before, the capture and the timed replays change.
        measure: Take the times of eager calls and of replays.
        keep_template: Keep what the graph can be instantiated from again.
        instantiates: Make the exec as well; otherwise the template waits for it.
        only_captures: Nothing runs but the capture, so that static tensors may have any contents.
        dictionaries: What holds the attributes that the function may set.
        held: Tensors that the function may find elsewhere than in modules, and what has them.
    """

    function: Callable[..., Any]
    pool: Any
    stream: Any
    mode: str
    warmup: int
    preserve: bool
    measure: bool
    keep_template: bool
    instantiates: bool
    only_captures: bool
    dictionaries: Sequence[dict[str, Any]]
    held: Sequence[Holder]


class Recorded:
    """A captured graph of a function.

    Attributes:
        graph: The graph.
        statics: The tensors that calls are copied to.
        outputs: The leaves of what the function returned.
        spec: How they are put together.
        mutated: The places of the static tensors that the function writes.
        in_place: The numbers of the storages of arguments that are read where they lie.
        seconds: What warm-up, capture and instantiation took together.
        eager_seconds: One call without a graph; None if it was not measured.
        graph_seconds: One replay, likewise.
        has_added_hooks: Whether a hook was added to something during the capture.
        gradients: What becomes of the ``.grad`` of leaves.
        used: Those of the tensors that the function may find which the graph uses.
        neighbours: The graphs of the same pool, and the number of this one among them.
        debugged: What replays it instead, with tensors for the static ones; None without debugging.
    """

    debugged: Debugged | None = None

    def __init__(
        self,
        graph: CUDAGraph | SegmentedGraph,
        statics: list[torch.Tensor],
        outputs: list[Any],
        spec: Any,
    ) -> None:
        self.graph = graph
        self.statics = statics
        self.outputs, self.spec = outputs, spec
        self.mutated: list[int] = []
        self.in_place: set[int] = set()
        self.gradients = Gradients([])
        self.used: list[Holder] = []
        self.neighbours = _numbered(tuple(graph.pool()))
        self.has_added_hooks = False
        self.seconds = 0.0
        self.eager_seconds: float | None = None
        self.graph_seconds: float | None = None
        self._storages: dict[int, _core.Storage] = {}

    @property
    def device(self) -> torch.device | None:
        """The device of the tensors; None if there are none."""
        tensors = [one for one in (*self.statics, *self.outputs) if isinstance(one, torch.Tensor)]
        return next((one.device for one in tensors if one.device.type != "cpu"), None) or next(
            (one.device for one in tensors), None
        )

    @property
    def is_flat_tuple(self) -> bool:
        """Whether the result is a tuple of leaves."""
        return self.spec.type is tuple and all(one.is_leaf() for one in _children(self.spec))

    def feed(self) -> Callable[[tuple[Any, ...]], None]:
        """What replays with tensors for the static ones."""
        if self.statics:
            return self.graph._feeder()
        return lambda _: self.graph.replay()

    def storage(self, tensor: torch.Tensor) -> _core.Storage:
        """The storage of an output, the same object for all outputs that lie in it."""
        number = _torch.storage_id(tensor.untyped_storage())
        if number not in self._storages:
            self._storages[number] = _torch.storage_of(tensor)
        return self._storages[number]

    @property
    def breaks(self) -> tuple[str, ...]:
        """Where the graph is broken up for eager work."""
        return self.graph.breaks if isinstance(self.graph, SegmentedGraph) else ()

    @property
    def whole(self) -> CUDAGraph:
        """The graph of a function without breaks."""
        assert isinstance(self.graph, CUDAGraph)
        return self.graph

    @property
    def footprint(self) -> Footprint | None:
        """What the capture did to its pool; None with breaks."""
        captured = self.graph._captured if isinstance(self.graph, CUDAGraph) else None
        return None if captured is None else captured.footprint

    @property
    def is_waiting(self) -> bool:
        """Whether the graph is whole and has no exec."""
        return isinstance(self.graph, CUDAGraph) and not self.graph._has_exec

    @property
    def is_kept(self) -> bool:
        """Whether the graph can do without its exec, as it has a template to make it from."""
        return isinstance(self.graph, CUDAGraph) and self.graph._has_template

    def drop_exec(self) -> None:
        """Let the exec of a graph go that is kept."""
        self.whole._drop_exec()

    def instantiate(self) -> float:
        """Make it again; the seconds that it took."""
        began = time.perf_counter()
        self.whole.instantiate()
        return time.perf_counter() - began

    def was_instantiated(self) -> None:
        """Go on after somebody has instantiated the graph, which was waiting for it."""
        self.whole._run_hooks("instantiate")
        self.whole.capture_end_post()

    @property
    def nodes(self) -> int:
        """How many nodes the graph has."""
        return self.graph.memory().nodes

    @property
    def memory_bytes(self) -> int:
        """Bytes of the device that the graph holds in its pool and for its exec."""
        memory = self.graph.memory()
        return memory.held + memory.exec

    def reset(self) -> None:
        """Let the graph go, and the memory that only its outputs use."""
        self.graph.reset()
        if self.debugged is not None:
            self.debugged.reset()
            self.debugged = None
        self._storages.clear()
        self.outputs = []
        self.gradients = Gradients([])

    @property
    def leaves_more(self) -> bool:
        """Whether a replay is followed by what its graph cannot do."""
        return bool(self.mutated or self.gradients)

    def argument(self, output: object) -> int | None:
        """The place of the argument that an output is itself."""
        places = (place for place, static in enumerate(self.statics) if static is output)
        return next(places, None)


def record(plan: Plan, call: Call, statics: list[torch.Tensor], driver: _driver.Driver) -> Recorded:
    """Warm up, capture, instantiate and measure.

    Args:
        plan: How.
        call: A call of the key.
        statics: What the graph reads instead of the call's tensors, with the same contents unless
            nothing runs but the capture.
        driver: The driver in force.
    """
    args, kwargs = call.arguments(statics)
    unchanged = Unchanged(call, statics)

    def run() -> Any:
        args, kwargs = call.arguments(statics)
        result = plan.function(*args, **kwargs)
        unchanged.require(args, kwargs)
        return result

    leaves: list[torch.Tensor] = []
    if plan.preserve or call.mode.grad:
        leaves = [one for one in tensors_of((plan.function, args, kwargs)) if one.is_leaf]
    rollback = Rollback(leaves=leaves, is_capturing=driver.is_capturing)
    attributes = Attributes(plan.dictionaries)
    began = time.perf_counter()
    has_made_state: Callable[[], bool] = bool
    with ExitStack() as last:
        last.enter_context(_torch.without_autocast_cache())
        if plan.preserve:
            last.callback(rollback.undo)
            has_made_state = last.enter_context(optimizers_put_back())
            last.enter_context(rollback)
        # The rollback has given gradients that graphs own memory of theirs.
        gradients = Gradients(leaves)
        last.push(attributes.put_back_after_error)
        # Work reads memory that an error is about to let go.
        last.push(functools.partial(_wait_after_error, driver))
        if not plan.only_captures:
            # The calls before read the static tensors on another stream than the one that filled
            # them, and replays may write them on yet another.
            driver.synchronize()
        with driver.stream(plan.stream):
            try:
                eager_seconds = _warm_up(run, plan, rollback, driver)
            except (CaptureError, torch.OutOfMemoryError):
                raise  # what is kept to be put back may have been too much
            except Exception as error:
                raise WarmupError(error) from error
            _require_state(has_made_state)
            versions = [static._version for static in statics]
            # What the first call makes, as a table, is there from then on.
            of_capture = Attributes(plan.dictionaries) if plan.warmup else attributes
            hooks = _torch.hook_count()
            rollback.notice(gradients.captures_now())
            rollback.notice(tensor for *_, tensor in plan.held)
            rollback.captures_now()
            with collections_held_off():
                drawn = rollback.generators_of(driver.device_type)
                graph, result = _captured(run, plan, call, statics, driver, drawn)
            outputs, spec = tree_flatten(result)
            rollback.leave_alone(outputs, statics)
            try:
                _require_no_new_attributes(of_capture)
                _require_known_classes(outputs)
                gradients.note(statics, call.names, rollback.captures_use)
                if gradients.has_made and not plan.warmup:
                    # Calls to come may add to it, or set it anew: the first one does the same.
                    raise NotReadyError("the function makes a gradient that was not there")
                _require_no_state_given(call, rollback)
                _require_state(has_made_state)
                if rollback.is_state_made:
                    raise NotReadyError(
                        "the function writes to a tensor that a call makes and keeps"
                    )
            except (CaptureError, NotReadyError):
                graph.reset()
                raise
            recorded = Recorded(graph, statics, outputs, spec)
            recorded.gradients = gradients
            recorded.used = [one for one in plan.held if rollback.captures_name(one[2])]
            recorded.has_added_hooks = _torch.hook_count() != hooks
            recorded.mutated = [
                place
                for place, (static, version) in enumerate(zip(statics, versions, strict=True))
                if static._version != version or rollback.captures_write(static)
            ]
            in_place = [leaf.value for leaf in call.leaves if leaf.kind == "fixed"]
            memories = [_torch.memory_of(tensor) for tensor in in_place]
            recorded.in_place = {_torch.storage_id(one) for one in memories if one is not None}
            recorded.seconds = time.perf_counter() - began
            # Replays would run the breaks as well, whose Python may do anything.
            if plan.measure and not recorded.breaks and not rollback.has_unseen:
                recorded.eager_seconds = eager_seconds
                with rollback.aside():
                    recorded.graph_seconds = replay_seconds(graph.replay, driver, rollback.rewind)
            if recorded.breaks:
                # The capture has run them, and the segments before them.
                driver.synchronize()
    return recorded


def _warm_up(
    run: Callable[[], Any], plan: Plan, rollback: Rollback, driver: _driver.Driver
) -> float | None:
    """Call the function; the seconds of the last call, if they are asked for.

    The first call loads what is loaded only once, and shows what is to be put back. So one that is
    timed comes after another one.
    """
    if not plan.warmup:
        return None
    for _ in range(max(1, plan.warmup - plan.measure)):
        # Each begins as the call does: a counter must not run over its end.
        rollback.rewind()
        run()
    seconds = None
    if plan.measure:
        rollback.rewind()
        driver.synchronize()
        with rollback.aside():
            seconds = seconds_of(run, driver)
    driver.synchronize()
    return seconds


def _captured(
    run: Callable[[], Any],
    plan: Plan,
    call: Call,
    statics: list[torch.Tensor],
    driver: _driver.Driver,
    generators: Sequence[torch.Generator],
) -> tuple[CUDAGraph | SegmentedGraph, Any]:
    """Capture on the current stream."""
    graph = CUDAGraph(keep_graph=plan.keep_template)
    for generator in generators:
        graph.register_generator_state(generator)
    graph._statics = tuple(statics)
    graph.capture_begin(pool=plan.pool, capture_error_mode=plan.mode)
    try:
        with breakable(_Whole()):
            result = run()
    except _BreakFoundError as error:
        graph._abandon(error)
    except BaseException as error:
        graph._abandon(error)
        raise
    else:
        _end(graph, plan)
        return graph, result
    if plan.only_captures:
        # Breaks run, and read them. What the function writes is told by the versions, without this.
        # Replays on any stream may still read what is about to be written.
        driver.synchronize()
        for static, tensor in zip(statics, call.tensors, strict=True):
            static.data.copy_(tensor)
    # Only a function with a break is captured in segments, which costs more.
    return SegmentedGraph.capture(
        run,
        pool=plan.pool,
        stream=plan.stream,
        capture_error_mode=plan.mode,
        statics=statics,
        generators=generators,
    )


def _end(graph: CUDAGraph, plan: Plan) -> None:
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


class NotReadyError(Exception):
    """What the graph would use is made by the first call, and was put back."""


class WarmupError(Exception):
    """What the function raised before its capture.

    Attributes:
        cause: The exception.
    """

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


def _require_state(has_made_some: Callable[[], bool]) -> None:
    """Refuse a step that begins with the optimizer's state, which is made once."""
    if has_made_some():
        raise NotReadyError("an optimizer makes its state at its first step")


def _require_no_new_attributes(before: Attributes) -> None:
    """Refuse a function that keeps a tensor where no replay puts one."""
    if (name := before.new_tensor()) is not None:
        raise CaptureError(
            f"the function sets the attribute {name} to a tensor, and replays do not: write to it"
            " in place, or make it an argument and a result"
        )


def _require_known_classes(outputs: list[Any]) -> None:
    """Refuse a result with what would be the same object in each call, and may change.

    Also one with an object that has tensors and is no container that pytree knows.
    """
    for leaf in outputs:
        if isinstance(leaf, set | bytearray | Iterator) or is_array(leaf):
            raise CaptureError(
                f"the result has a {type(leaf).__qualname__}, and replays would return that of the"
                " capture again: return tensors, numbers, strings and tuples of them"
            )
        if hides_tensors(leaf):
            raise CaptureError(
                f"the result has a {type(leaf).__qualname__}, whose tensors cannot be told apart"
                " from it: return tuples, lists, dictionaries or classes that pytree knows"
            )


def _require_no_state_given(call: Call, rollback: Rollback) -> None:
    """Refuse an argument that shares memory with what the function writes without being given it.

    The graph reads a copy of it, which is not written.
    """
    for name, tensor in zip(call.names, call.tensors, strict=True):
        if rollback.captures_write(tensor):
            raise CaptureError(
                f"{name} shares memory with a tensor that the function writes: give it a copy, or"
                " let it find both in the same way"
            )


class _BreakFoundError(BaseException):
    """A break was called in a capture that is not divided. No code of users catches this."""


class _Whole:
    """A capture that is not divided."""

    def run(self, *_: object) -> Any:
        """Tell that there is a break."""
        raise _BreakFoundError


def _wait_after_error(driver: _driver.Driver, error: object, *_: object) -> None:
    if error is not None:
        with suppress(Exception):  # what comes out is the first one
            driver.synchronize()


_neighbours: weakref.WeakValueDictionary[tuple[int, ...], _core.Neighbours] = (
    weakref.WeakValueDictionary()
)


def _numbered(pool: tuple[int, ...]) -> tuple[_core.Neighbours, int]:
    """The graphs of a pool, and the number of one that was captured just now."""
    neighbours = _neighbours.get(pool)
    if neighbours is None:
        # Another thread may have made them meanwhile.
        neighbours = _neighbours.setdefault(pool, _core.Neighbours())
    return neighbours, neighbours.number()


def _children(spec: Any) -> list[Any]:
    """What a specification of torch's consists of; newer torch has another name for it."""
    specs: list[Any] = (
        spec.children() if callable(getattr(spec, "children", None)) else spec.children_specs
    )
    return specs
