"""Captures of torch's CPU tensors on the simulator.

While a capture is open, a dispatch mode turns each operator into a node: its outputs are allocated
from the capture's pool and hold poison, and nothing is computed. A replay runs the operators into
the same memory. Views are made at once, as they touch no memory.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from cgraph import _core, _torch
from cgraph._captures.capture_options import CaptureOptions
from cgraph._captures.footprint import Meter, is_recording
from cgraph._captures.fresh_results import Results
from cgraph._captures.liveness import OutsideTensor
from cgraph._captures.sim_pools import SimHandle, SimMemPool
from cgraph._captures.turns import Turn
from cgraph._driver import Captured, Handle
from cgraph._operators.operator_mode import OperatorMode, Run
from cgraph._operators.schemas import name_of, tensors_of, touches_memory
from cgraph._source import user_line
from cgraph._torch import (
    CpuFakeMode,
    DataDependentOutput,
    DynamicOutputShape,
    tree_flatten,
    tree_map,
    tree_unflatten,
)
from cgraph.errors import CaptureError, DriverError

if TYPE_CHECKING:
    from cgraph.sim import Simulator

__all__ = ["OpenCapture"]

aten = torch.ops.aten

# Operators whose result is uninitialised: memory, but no work.
_UNINITIALISED = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}


class OpenCapture:
    """An open capture on the simulator.

    Attributes:
        recorder: The dispatch mode that turns operators into nodes.
        results: The tensors that replays copy to new memory; set before the end.
    """

    results: Sequence[torch.Tensor] = ()
    goes_on: bool = False
    may_be_empty: bool = False

    def __init__(
        self,
        simulator: Simulator,
        capture: _core.Capture,
        handle: SimHandle,
        own: Turn,
        options: CaptureOptions,
    ) -> None:
        self._turn = own
        self._statics = list(options.statics)
        self._simulator = simulator
        self._capture = capture
        self._stream = simulator.current_stream()
        self._handle = handle
        self._checks_liveness = options.checks_liveness
        self._thread = threading.get_ident()
        resumed, labels = options.resumes, options.labels
        if isinstance(resumed, OpenCapture):
            recorder = resumed.recorder
        else:
            recorder = Recorder(simulator, handle.mem_pool)
        self.recorder: Recorder = recorder
        recorder.begin(options.generators)
        self._labels = labels
        mem_pool = handle.mem_pool
        mem_pool.is_open = True
        self._meter = Meter(mem_pool, mem_pool.sizes, mem_pool.state, is_on=options.is_weighed)
        if is_recording():
            mem_pool.record()
        self._uncompiled = _torch.Uncompiled()
        if not simulator.captures_compiled:
            recorder.uncompiled = self._uncompiled.__enter__()
        _torch.enter_mode(recorder)
        if labels is not None:
            # Inside the recorder's mode, so that it sees an operator before it becomes a node.
            try:
                labels.start(simulator.current_stream)
            except BaseException:
                self.abandon()
                raise

    @property
    def pool(self) -> Handle:
        """The token of the capture's pool."""
        return self._handle

    def finish(self) -> Captured:
        """End the capture on the stream and thread it began on; an error leaves nothing."""
        current = self._simulator.current_stream()
        if current != self._stream:
            self.abandon()
            raise CaptureError(
                f"capture_end() on another stream: the current stream is {current!r}, and the"
                f" capture began on {self._stream!r}. Capture must end on the same stream it began"
                " on; the capture was abandoned"
            )
        if threading.get_ident() != self._thread:
            self.abandon()
            raise CaptureError(
                "capture_end() on another thread than capture_begin(): operators are recorded on"
                " the thread that began; the capture was abandoned"
            )
        if self._labels is not None:
            try:
                self._labels.look()
            except BaseException:
                self.abandon()
                raise
        self._end_recording()
        template = self._finish_capture()
        footprint = self._meter.finish(_no_workspaces, self._handle.mem_pool.recorded)
        template.retain_pool(self._handle.mem_pool._core)
        for other in self._simulator.pools.known.values():
            is_own = other is self._handle.mem_pool
            if not is_own and any(map(other.covers, self.recorder.read)):
                template.require_pool(other._core)
        inputs = results = outputs = None
        if self._statics:
            inputs = _core.Inputs(template, _torch.tensor_reader(), self._statics)
        if self.results:
            results, self.results = Results(self.results), ()
            outputs = _core.Outputs(template, results.storages)
        return Captured(
            template,
            pools=[self._handle],
            current=self._simulator.core,
            check=self.recorder.check() if self._checks_liveness else None,
            inputs=inputs,
            results=results,
            outputs=outputs,
            retained=self._handle,
            labels={} if self._labels is None else self._labels.found,
            footprint=footprint,
        )

    def abandon(self) -> str | None:
        """End the capture and discard its work; return the driver's error, if there is one."""
        self._end_recording()
        self._handle.mem_pool.recorded()
        try:
            self._finish_capture()
        except CaptureError as error:
            return str(error)
        return None

    def leave_modes(self) -> None:
        """Leave its dispatch modes where autograd has put them back after its end."""
        if self.recorder.over:
            _torch.take_mode_away(self.recorder)

    def _finish_capture(self) -> _core.Template:
        """End the capture, and let other threads begin one."""
        try:
            return self._capture.finish()
        finally:
            self._turn.end()

    def _end_recording(self) -> None:
        if self._labels is not None:
            self._labels.stop()
        self.recorder.over = True
        self._handle.mem_pool.is_open = False
        _torch.leave_mode(self.recorder)
        self._uncompiled.__exit__()


def _no_workspaces() -> None:
    """Release library workspaces: the simulator has none."""


class Recorder(_torch.Bystander):
    """A mode that turns operators into nodes.

    Attributes:
        over: True if the capture has ended; a recorder that could not be left then does nothing.
    """

    def __init__(self, simulator: Simulator, memory: SimMemPool) -> None:
        super().__init__()
        self._simulator = simulator
        self._memory = memory
        self._fake = CpuFakeMode(allow_non_fake_inputs=True)

    def begin(self, generators: Sequence[torch.Generator]) -> None:
        """Begin a capture that may draw from these generators."""
        self.over = False
        self._generators = generators
        self._outside: list[OutsideTensor] = []

    @property
    def read(self) -> list[int]:
        """The addresses of memory from outside that the capture has read."""
        return [one.storage.address for one in self._outside]

    def check(self) -> Callable[[], None]:
        """Return a function that raises if a tensor from outside that the capture read is gone."""
        outside = self._outside

        def check() -> None:
            for tensor in outside:
                tensor.get()

        return check

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record the operator, or run it where it touches no memory."""
        kwargs = kwargs or {}
        stream = self._simulator.current_stream()
        if self.over or not stream.is_capturing():
            return func(*args, **kwargs)
        if not hasattr(func, "_schema"):
            # Of higher order: the work of its parts would not be seen.
            self._refuse(stream, func, None)
        for tensor in (*tensors_of(args), *tensors_of(kwargs)):
            if (kind := _uncommon_kind(tensor)) is not None:
                raise CaptureError(
                    f"the simulator cannot capture {func} of a {kind} tensor: keep it out of the"
                    " capture, or capture on a GPU"
                )
        if func._can_decompose():
            # Inference mode leaves it whole: its parts may be work as well as views.
            with self:
                return func.decompose(*args, **kwargs)
        self._check_generator(func, args, kwargs)
        if "mkldnn_rnn" in str(func):
            # Its backward pass reads memory that is not a tensor's.
            raise CaptureError(
                f"the simulator cannot capture {func}: set torch.backends.mkldnn.enabled to False"
            )
        if func is aten.lift_fresh.default and args[0].numel() > 0:
            made = self._literal(stream, func, args[0])
            for watch in _torch.modes_inside_out(OperatorMode):
                watch.literal(args[0], made)
            return made
        if not touches_memory(func):
            return func(*args, **kwargs)
        run: Run = functools.partial(self._record, stream)
        # These modes are outside of this one, and would not see the operators that it takes.
        for watch in _torch.modes_inside_out(OperatorMode):
            run = functools.partial(watch.seen, run=run)
        return run(func, args, kwargs)

    def _record(self, stream: _core.Stream, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Make a node of the operator; return its result."""
        fresh, result = self._outputs(stream, func, args, kwargs)
        if func not in _UNINITIALISED and not isinstance(result, bool):
            leaves, spec = tree_flatten((args, kwargs))
            kernel = _kernel(func, [self._reader(func, leaf) for leaf in leaves], spec, fresh)
            self._simulator.core.launch(stream, str(func), kernel)
        return result

    def _outputs(
        self, stream: _core.Stream, func: Any, args: Any, kwargs: dict[str, Any]
    ) -> tuple[list[tuple[int, torch.Tensor]], Any]:
        """Return the operator's fresh tensors by place, and its result, without computing it."""
        imagine = functools.partial(_imagine, self._fake)
        # Nothing is drawn here, and some operators are imagined by code that takes no generator.
        others = {**kwargs, "generator": None} if "generator" in kwargs else kwargs
        try:
            with self._fake:
                imagined = func(*tree_map(imagine, args), **tree_map(imagine, others))
                imagined = _torch.as_computed(func, args, imagined)
        except (DataDependentOutput, DynamicOutputShape) as error:
            self._refuse(stream, func, error)
        leaves, spec = tree_flatten(imagined)
        if isinstance(imagined, bool):
            # An answer about tensors without contents needs no value of the device.
            return [], func(*args, **kwargs)
        written = _written_arguments(func, args, kwargs)
        fresh: list[tuple[int, torch.Tensor]] = []
        results: list[Any] = []
        for place, leaf in enumerate(leaves):
            if place in written:
                results.append(written[place])
            elif isinstance(leaf, torch.Tensor):
                if leaf.layout is not torch.strided:
                    raise CaptureError(
                        f"the simulator cannot capture {func}: its result is {leaf.layout}"
                    )
                made = self._memory.tensor(stream, leaf, func)
                over = self._memory.find(made)
                if over is not None:
                    fresh.append((place, over))
                results.append(made)
            elif leaf is None:
                results.append(None)
            else:
                self._refuse(stream, func, None)
        return fresh, tree_unflatten(results, spec)

    def _reader(self, func: Any, leaf: Any) -> Callable[[], Any]:
        """Return a function that gives an argument at replay, without keeping its block alive."""
        if not isinstance(leaf, torch.Tensor) or leaf.numel() == 0:
            return lambda: leaf
        conjugate, negative = leaf.is_conj(), leaf.is_neg()
        over = self._memory.find(leaf)
        if over is not None:
            lazy = _torch.lazy_view(over, conjugate, negative)
            return lambda: lazy
        outside = OutsideTensor(leaf, str(func))
        self._outside.append(outside)
        if conjugate or negative:
            return lambda: _torch.lazy_view(outside.get(), conjugate, negative)
        return outside.get

    def _literal(self, stream: _core.Stream, func: Any, value: torch.Tensor) -> torch.Tensor:
        """Return the tensor of a literal, as ``torch.tensor(2.0)``; replays copy its value in."""
        frozen = value.clone()
        made = self._memory.tensor(stream, value, func)
        over = self._memory.find(made)
        assert over is not None

        def run() -> None:
            with torch.no_grad(), _torch.without_modes():
                over.copy_(frozen)

        self._simulator.core.launch(stream, str(func), run)
        return made

    def _check_generator(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Refuse a generator that was not registered, as torch 2.11 does on a GPU."""
        generator = _torch.generator_among(args, kwargs)
        known = [torch.default_generator, *self._generators]
        if generator is not None and not any(_torch.is_same(generator, one) for one in known):
            raise CaptureError(
                f"{func} draws from a generator that the graph does not know: call"
                " register_generator_state(generator) before the capture"
            )

    def _refuse(self, stream: _core.Stream, func: Any, cause: Exception | None) -> Any:
        """Fail like an operator that waits for a capturing stream."""
        place = user_line()
        where = "" if place is None else f"{place}: "
        said = f"{where}{name_of(func)} needs a value from the device"
        try:
            stream.synchronize()
        except DriverError as error:
            failure = CaptureError(f"{said} while the stream captures: {error}")
            failure.code = error.code
            raise failure from cause
        raise CaptureError(f"{said}, which a capture cannot give")


def _uncommon_kind(tensor: torch.Tensor) -> str | None:
    """Name the kind of a tensor whose elements do not lie in one memory; None for others."""
    if tensor.is_nested:
        return "nested"
    if tensor.is_quantized:
        return "quantized"
    return None if tensor.layout is torch.strided else str(tensor.layout).removeprefix("torch.")


def _kernel(
    func: Any,
    readers: list[Callable[[], Any]],
    spec: Any,
    fresh: list[tuple[int, torch.Tensor]],
) -> Callable[[], None]:
    """Return the function that the node of an operator runs."""

    def run() -> None:
        # The thread that drives the simulator may be inside a capture, or under autocast: these
        # modes must not act here.
        with torch.no_grad(), _torch.without_modes(), _torch.without_autocast("cpu"):
            args, kwargs = tree_unflatten([read() for read in readers], spec)
            result = func(*args, **kwargs)
            leaves = tree_flatten(result)[0]
            for place, tensor in fresh:
                # None is a gradient that was not requested, although its shape was known.
                if leaves[place] is not None:
                    tensor.copy_(leaves[place])

    return run


def _written_arguments(func: Any, args: Any, kwargs: dict[str, Any]) -> dict[int, Any]:
    """Return the results that are arguments written in place, by place."""
    schema = func._schema
    arguments: dict[frozenset[str], Any] = {}
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name, args[place] if place < len(args) else None)
            arguments[frozenset(argument.alias_info.before_set)] = value
    written = {}
    for place, returned in enumerate(schema.returns):
        if returned.alias_info is not None and returned.alias_info.is_write:
            written[place] = arguments[frozenset(returned.alias_info.before_set)]
    return written


def _imagine(mode: CpuFakeMode, leaf: Any) -> Any:
    """Return a tensor of the same layout that holds nothing; other leaves as they are."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype)
