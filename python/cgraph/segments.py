"""``SegmentedGraph``: a function with breaks as several graphs, replayed by one native call.

See :func:`cgraph.eager_break` for an example.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from cgraph import _core, _driver, _torch
from cgraph._bridge import Bridge
from cgraph._collector import collections_held_off
from cgraph._driver import Handle, Pool
from cgraph._forks import Forks
from cgraph._modes import Modes
from cgraph._sim_pools import SimMemPool
from cgraph._source import user_line
from cgraph._torch import tree_iter, tree_map
from cgraph.breaks import Pause, breakable, in_backward_pass
from cgraph.cudagraph import CUDAGraph, require_mode
from cgraph.errors import CaptureError, StateError
from cgraph.graphs import graph

if TYPE_CHECKING:
    from typing_extensions import Self

    from cgraph.ledger import GraphMemory

__all__ = ["SegmentedGraph"]

R = TypeVar("R")


class SegmentedGraph(_core.Segments):
    """Graphs of one pool, and the breaks between them; made by :meth:`capture`.

    Attributes:
        segments: The graphs in order. One that a break left empty is not there.
        breaks: The breaks in order, each as its name and the line that called it.

    Replays are in the order of the calls, and never two at the same time.
    """

    segments: tuple[CUDAGraph, ...]
    breaks: tuple[str, ...]

    def __new__(cls, steps: Sequence[Any]) -> Self:
        """Graphs and breaks in order; :meth:`capture` makes them."""
        native = [step.native() if isinstance(step, _Break) else step for step in steps]
        self = super().__new__(cls, native, _torch.mode_functions())
        self.segments = tuple(step for step in steps if isinstance(step, CUDAGraph))
        self.breaks = tuple(step.title for step in steps if isinstance(step, _Break))
        return self

    @classmethod
    def capture(
        cls,
        body: Callable[[], R],
        *,
        pool: Pool | None = None,
        stream: Any = None,
        capture_error_mode: str = "thread_local",
        statics: Sequence[torch.Tensor] = (),
        generators: Sequence[torch.Generator] = (),
    ) -> tuple[SegmentedGraph, R]:
        """Run a function once, and capture all of it but its breaks.

        Each segment is replayed as soon as it ends, so that a break finds real values, and the
        result is valid at the return. What :meth:`replay` computes later is in the same tensors.

        Args:
            body: Called without arguments. As for any capture, call it before if its first call
                sets something up.
            pool: As for :class:`cgraph.graph`, for all segments.
            stream: As for :class:`cgraph.graph`.
            capture_error_mode: As for :class:`cgraph.graph`.
            statics: Tensors that :meth:`replay_with` copies to before the first segment.
            generators: What random numbers are drawn from besides the default generator.

        Returns:
            The segments, and what the function has returned.

        Raises:
            CaptureError: A capture is open, the function cannot be captured, or it went on after a
                break had failed.

        Side streams that a break finds in the capture are joined there, and go on in the next
        segment. If the function or a break raises, that comes out, and stream, allocator and random
        state are as before; what the segments until then have written stays written.
        """
        require_mode(capture_error_mode)
        driver = _driver.current()
        if driver.is_capturing():
            raise CaptureError(
                "SegmentedGraph.capture() inside a capture: captures cannot be nested; end the"
                " first one before"
            )
        before = driver.current_stream()
        stream = graph(CUDAGraph()).capture_stream if stream is None else stream
        context = driver.stream(stream)
        pool = driver.pool_handle() if pool is None else pool
        driver.synchronize()
        if _torch.wants_gc():
            gc.collect()
        driver.empty_cache()
        session = _Session(driver, stream, pool, capture_error_mode, generators)
        random = _RandomState(stream if driver.device_type == "cuda" else None, generators)
        try:
            with context, collections_held_off(), session.forks.watched(), breakable(session):
                session.begin(statics)
                result = body()
                made = cls(session.finish())
            _wait(before, stream)
        except BaseException as error:
            try:
                session.fail(error)
            finally:
                random.restore()
                with suppress(RuntimeError):  # segments may be under way
                    _wait(before, stream)
            raise
        return made, result

    def pool(self) -> Handle:
        """The token of the memory pool of all segments."""
        return self._require("pool()")[0].pool()

    def memory(self) -> GraphMemory:
        """What the segments take together; the workspaces, which they share, once."""
        found = [one.memory() for one in self._require("memory()")]
        names = {one.name for one in found}
        return replace(
            found[0],
            name=found[0].name if len(found) == 1 else f"{found[0].name} to {found[-1].name}",
            reserved=sum(one.reserved for one in found),
            peak=max((one.peak for one in found if one.peak is not None), default=None),
            held=sum(one.held for one in found),
            workspace=max(one.workspace for one in found),
            exec=sum(one.exec for one in found),
            host=sum(one.host for one in found),
            nodes=sum(one.nodes for one in found),
            seconds=sum(one.seconds for one in found),
            shares_with=tuple(name for name in found[0].shares_with if name not in names),
            timeline=found[0].timeline if len(found) == 1 else None,
        )

    def reset(self) -> None:
        """Drop all segments and breaks; a replay is refused from then on."""
        segments, self.segments, self.breaks = self.segments, (), ()
        self._clear()
        with ExitStack() as resets:
            for one in segments:
                resets.callback(one.reset)

    def _feeder(self) -> Callable[[tuple[Any, ...]], None]:
        """What replays with tensors in the places of the static inputs."""
        captured = self._require("a replay with tensors")[0]._captured
        assert captured is not None
        feed = captured.feed
        if feed is None:
            return self.replay_with

        def replay(tensors: tuple[Any, ...]) -> None:
            feed(tensors)
            self.replay()

        return replay

    def _require(self, what: str) -> tuple[CUDAGraph, ...]:
        if not self.segments:
            raise StateError(f"{what} after reset(): capture again")
        return self.segments


class _Session:
    """The capture of one function, segment by segment."""

    def __init__(
        self,
        driver: _driver.Driver,
        stream: Any,
        pool: Pool,
        mode: str,
        generators: Sequence[torch.Generator],
    ) -> None:
        self.forks = Forks(stream)
        self._generators = generators
        self._driver = driver
        self._stream = stream
        self._pool = pool
        self._mode = mode
        self._steps: list[CUDAGraph | _Break] = []
        self._open: CUDAGraph | None = None
        self._in_break = False
        self._failure: BaseException | None = None
        self._backward_pass = _torch.backward_pass()
        self._modes_outside = self._modes_inside = _torch.mode_count()

    def begin(self, statics: Sequence[torch.Tensor] = ()) -> None:
        """Begin a segment on the capturing stream, which is current."""
        segment = CUDAGraph()
        segment._statics = statics
        for generator in self._generators:
            segment.register_generator_state(generator)
        segment.capture_begin(pool=self._pool, capture_error_mode=self._mode)
        self._open = segment
        self._modes_inside = _torch.mode_count()
        self.forks.begin()

    def run(self, fn: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
        """Run a break between two segments."""
        if self._in_break or self._failure is not None:
            return fn(*args, **kwargs)
        if _torch.backward_pass() != self._backward_pass:
            # Its stack of modes comes back at its end, with those of a segment that is over.
            self._failure = in_backward_pass(name)
            raise self._failure
        self._in_break = True
        try:
            with self._driver.stream(self._stream):
                with _torch.modes_aside(self._modes_inside):
                    self._end(is_last=False)
                found = _Break(self._driver, fn, name, args, kwargs, tuple(self.forks.streams))
                result = found.first()
                self._steps.append(found)
                # The capture's own modes lie below those that the function is in.
                with _torch.modes_aside(self._modes_outside):
                    self.begin()
        except BaseException as error:
            self._abandon(error)
            raise
        finally:
            self._in_break = False
        return result

    def finish(self) -> list[CUDAGraph | _Break]:
        """End the last segment; the steps of a replay."""
        if self._failure is not None:
            raise CaptureError(
                "the function went on after a break had raised, and what followed was not captured:"
                " let the exception out, or catch it inside the break"
            ) from self._failure
        self._end(is_last=True)
        for step in self._steps:
            if isinstance(step, _Break):
                step.check()
        self._keep_breaks()
        return self._steps

    def fail(self, error: BaseException) -> None:
        """Throw everything away."""
        self._abandon(error)
        self._keep_contents(False)
        self._keep_breaks()
        with ExitStack() as resets:
            for step in self._steps:
                if isinstance(step, CUDAGraph):
                    resets.callback(step.reset)
        # The exception's frames refer to this.
        self._steps, self._failure = [], None

    def _keep_breaks(self) -> None:
        """Let the replays in flight of any segment keep what the breaks hold.

        Of any: where a replay stopped half way, the later ones were last replayed elsewhere.
        """
        breaks = [step for step in self._steps if isinstance(step, _Break)]
        for step in self._steps:
            if isinstance(step, CUDAGraph) and breaks:
                step.retain_object(breaks)

    def _end(self, is_last: bool) -> None:
        """End the segment that is open, and replay it: a capture computes nothing."""
        segment = self._open
        assert segment is not None
        self.forks.end(is_last)
        is_first = not self._steps
        segment._may_be_empty = not (is_first and is_last)
        segment.capture_end()
        self._open = None
        if segment._nodes == 0 and not is_last and not (is_first and segment._statics):
            segment.reset()
            return
        self._steps.append(segment)
        segment.replay()
        self._keep_contents(not is_last)

    def _keep_contents(self, keeps: bool) -> None:
        """Let a simulated pool poison nothing while later segments may read what is there."""
        segments = [step for step in self._steps if isinstance(step, CUDAGraph)]
        pool = self._driver.mem_pool(segments[0].pool()) if segments else None
        if isinstance(pool, SimMemPool):
            pool.keeps_contents = keeps

    def _abandon(self, error: BaseException) -> None:
        self._failure = self._failure or error
        segment, self._open = self._open, None
        if segment is not None:
            segment._abandon(error)
            segment.reset()


class _Break:
    """A call that each replay repeats.

    Attributes:
        title: Its name, and the line that called it.
    """

    def __init__(
        self,
        driver: _driver.Driver,
        fn: Callable[..., Any],
        name: str,
        args: Any,
        kwargs: Any,
        streams: tuple[Any, ...],
    ) -> None:
        self.title = f"{name} ({user_line()})"
        self._driver = driver
        self._fn = fn
        self._arguments = (args, kwargs)
        self._streams = streams
        self._modes = Modes.now(driver.device_type)
        self._bridge = Bridge(f"the break {self.title}", self._arguments, driver.device_type)

    def first(self) -> Any:
        """Run it in the capture; what the code behind it gets."""
        if isinstance(self._fn, Pause):
            # Autocast may be casting, and its cache is locked.
            return self._bridge.first(self._call)
        # What autocast has cast in a segment belongs to that, and what it casts here is gone later.
        torch.clear_autocast_cache()
        result = self._bridge.first(self._call)
        torch.clear_autocast_cache()
        # Replays neither need nor may extend the history of the capture.
        if any(_has_history(leaf) for leaf in tree_iter(self._arguments)):
            self._arguments = tree_map(_without_history, self._arguments)
        return result

    def __call__(self) -> None:
        """Run it in a replay."""
        if Modes.now(self._driver.device_type) == self._modes:
            self._bridge.later(self._call())
            return
        with self._modes.restored():
            self._bridge.later(self._call())

    def native(self) -> Any:
        """What native code calls: the function itself, if nothing is needed around it."""
        modes, (args, kwargs) = self._modes, self._arguments
        if self._streams or any(enabled for _, enabled, _ in modes.autocast):
            return self
        later, is_none = self._bridge.later, self._bridge.is_none
        return self, self._fn, args, kwargs, (modes.grad, modes.inference), later, is_none

    def check(self) -> None:
        """Raise if the code behind it did with the result what a replay cannot do."""
        self._bridge.check()

    def _call(self) -> Any:
        args, kwargs = self._arguments
        if not self._streams:
            return self._fn(*args, **kwargs)
        # As if the work of the side streams had not become part of the segment.
        current = self._driver.current_stream()
        for side in self._streams:
            side.wait_stream(current)
        result = self._fn(*args, **kwargs)
        for side in self._streams:
            current.wait_stream(side)
        return result


class _RandomState:
    """The random state of the host, the device of a CUDA stream and others, to be put back."""

    def __init__(
        self, stream: torch.cuda.Stream | None, generators: Sequence[torch.Generator]
    ) -> None:
        self._others = [(generator, generator.get_state()) for generator in generators]
        self._ordinal = None if stream is None else stream.device_index
        self._host = torch.get_rng_state()
        if self._ordinal is not None:
            self._device = torch.cuda.get_rng_state(self._ordinal)

    def restore(self) -> None:
        """Put it back."""
        torch.set_rng_state(self._host)
        for generator, state in self._others:
            generator.set_state(state)
        if self._ordinal is not None:
            torch.cuda.set_rng_state(self._device, self._ordinal)


def _wait(stream: Any, other: Any) -> None:
    """Let a stream wait for another one."""
    if stream != other:
        stream.wait_stream(other)


def _has_history(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.grad_fn is not None


def _without_history(value: Any) -> Any:
    return value.detach() if _has_history(value) else value
