"""The capture of one function in segments, and the breaks between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import torch

from cgraph import _driver, _torch
from cgraph._breaks.bridge import Bridge
from cgraph._breaks.flows import Flow
from cgraph._breaks.forks import Forks
from cgraph._breaks.inner_flows import InnerFlow
from cgraph._breaks.modes import Modes
from cgraph._captures.capture_options import CaptureOptions
from cgraph._captures.label_recorder import LabelRecorder
from cgraph._captures.pool_blocks import PoolBlocks
from cgraph._captures.sim_pools import SimMemPool
from cgraph._driver import OpenCapture, Pool
from cgraph._source import user_line
from cgraph._torch import tree_iter, tree_map
from cgraph.breaks import Work
from cgraph.cudagraph import CUDAGraph
from cgraph.errors import CaptureError
from cgraph.labels import Config

__all__ = ["Break", "Session"]


class Session:
    """The capture of one function, segment by segment.

    Args:
        stream: The stream of the captures.
        pool: Their pool.
        mode: Their error mode.
        generators: Generators that random numbers are drawn from besides the default one.
        flow: Makes the flow of gradients through a break; None if there are no gradients.
        at_break: Lets the work of a break find the gradients of the present replay.
        in_break: Returns the contexts in which breaks run.
        may_be_empty: True if a capture of nothing is not a mistake.
        runs: True if segments and breaks run as soon as they are captured. Otherwise breaks have
            stand-ins.
        gives_up: True if breaks own no block of the pool: neither those of their arguments nor
            those of the results for later segments, except where gradients get through.

    Attributes:
        driver: The driver in force.
        stream: The stream of the captures.
        generators: Generators that random numbers are drawn from besides the default one.
        forks: The side streams.
        flows: The flows of gradients through the breaks, one for each.
        keeps: True if the segments keep their templates.
        annotates: True if the origin of each node is recorded.
        are_stages: True if the segments become stages of a loop.
    """

    keeps = False
    annotates = False
    are_stages = False

    def __init__(
        self,
        stream: Any,
        pool: Pool,
        mode: str,
        generators: Sequence[torch.Generator],
        flow: type[Flow] | None = InnerFlow,
        at_break: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
        in_break: Callable[[], AbstractContextManager[None]] | None = None,
        *,
        may_be_empty: bool = False,
        runs: bool = True,
        gives_up: bool = False,
    ) -> None:
        self.driver = _driver.current()
        self.stream = stream
        self.generators = generators
        self.forks = Forks(stream)
        self._pool = pool
        self._mode = mode
        self._steps: list[CUDAGraph | Break] = []
        self._open: CUDAGraph | None = None
        self._in_break = False
        self._failure: BaseException | None = None
        self._last: OpenCapture | None = None
        self.flows: list[Flow] = []
        self._flow = flow
        self._at_break = at_break
        self._around = in_break or nullcontext
        self._may_be_empty = may_be_empty
        self._runs = runs
        self._blocks = PoolBlocks(self.driver, pool) if gives_up else None
        self._modes_outside = self._modes_inside = _torch.mode_count()

    def begin(self, statics: Sequence[torch.Tensor] = ()) -> None:
        """Begin a segment on the capturing stream, which is current."""
        segment = CUDAGraph(self.keeps)
        segment._options = CaptureOptions(
            labels=LabelRecorder(Config()) if self.annotates else None,
            statics=statics,
            # In a backward pass torch runs each node in the modes in which the pass began.
            resumes=self._last,
            is_weighed=True,
            is_stage=self.are_stages,
        )
        for generator in self.generators:
            segment.register_generator_state(generator)
        segment.capture_begin(pool=self._pool, capture_error_mode=self._mode)
        segment._options = CaptureOptions()
        self._open, self._last = segment, segment._capture
        if self._blocks is not None and self._last is not None:
            self._blocks.token = self._last.pool
        # Where nothing runs, the results of earlier work are not read yet.
        self._keep_contents(not self._runs or bool(self._steps))
        self._modes_inside = _torch.mode_count()
        self.forks.begin()

    def run(self, work: Work, args: Any, kwargs: Any) -> Any:
        """Run a break between two segments."""
        if self._in_break or self._failure is not None:
            return work.fn(*args, **kwargs)
        self._in_break = True
        try:
            with self.driver.stream(self.stream):
                with _torch.modes_aside(self._modes_inside):
                    self._end(is_last=False)
                is_own = work.is_pause or work.is_backward
                if not is_own and self._at_break is not None:
                    work = replace(work, fn=self._at_break(work.fn))
                found = self._new_break(work, args, kwargs)
                with self._around():
                    result = found.first() if self._runs else found.stand_in()
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

    def stop(self) -> None:
        """End the capture here: the captured work is launched, and the following work runs eagerly.

        This is a break that does not end. It may come inside an operator.
        """
        self._in_break = self._runs = True
        with self.driver.stream(self.stream):
            self._end(is_last=True)

    def leave_modes(self) -> None:
        """Leave the dispatch modes of a capture that was ended inside an operator."""
        if self._last is not None:
            self._last.leave_modes()

    @property
    def has_broken(self) -> bool:
        """True if a break has run, and with it the earlier work."""
        return any(isinstance(step, Break) for step in self._steps)

    @property
    def kept(self) -> Sequence[Any]:
        """The objects that breaks keep for their replays."""
        return [step.arguments for step in self._steps if isinstance(step, Break)]

    def _new_break(self, work: Work, args: Any, kwargs: Any) -> Break:
        given, streams = (args, kwargs), tuple(self.forks.streams)
        if work.is_pause or work.is_backward:
            return Break(self.driver, work, given, streams)
        if self._flow is None:
            return Break(self.driver, work, given, streams, None, self._blocks)
        # Whether or not gradients are recorded here, the break may record its own.
        flow = self._flow(work, user_line() or "", given, self)
        self.flows.append(flow)
        return Break(self.driver, work, given, streams, flow, self._blocks)

    def finish(self, results: Sequence[torch.Tensor] = ()) -> list[CUDAGraph | Break]:
        """End the last segment, which copies these results; return the steps of a replay."""
        if self._failure is not None:
            raise CaptureError(
                "the function went on after a break or its backward pass had raised, and what"
                " followed was not captured: let the exception out, or catch it inside the break"
            ) from self._failure
        if self._open is not None and self._open._capture is not None:
            self._open._capture.results = results
        self._end(is_last=True)
        for step in self._steps:
            if isinstance(step, Break):
                step.settle()
        self._keep_breaks()
        return self._steps

    def close(self) -> None:
        """Drop everything, after the end or a failure."""
        for flow in self.flows:
            flow.divides = None
        self._steps, self._last = [], None

    def fail(self, error: BaseException) -> None:
        """Discard everything."""
        self._abandon(error)
        if self._last is not None:
            # In a break the modes were left, and after a node of autograd's they are back.
            self._last.leave_modes()
        self._keep_contents(False)
        self._keep_breaks()
        with ExitStack() as resets:
            for step in self._steps:
                if isinstance(step, CUDAGraph):
                    resets.callback(step.reset)
        # The exception's frames refer to this.
        self._failure = None
        self.close()

    def _keep_breaks(self) -> None:
        """Let the replays in flight of all segments keep the objects of the breaks.

        Of all segments: where a replay stopped half way, the later ones were last replayed
            elsewhere.
        """
        breaks = [step for step in self._steps if isinstance(step, Break)]
        for step in self._steps:
            if isinstance(step, CUDAGraph) and breaks:
                step.retain_object(breaks)

    def _end(self, is_last: bool) -> None:
        """End the open segment, and replay it: a capture computes nothing."""
        segment = self._open
        assert segment is not None
        self.forks.end(is_last)
        is_first = not self._steps
        if segment._capture is not None:
            segment._capture.may_be_empty = self._may_be_empty or not (is_first and is_last)
            segment._capture.goes_on = not is_last
        segment.capture_end()
        self._open = None
        if segment._nodes == 0 and not is_last and not (is_first and segment._statics):
            segment.reset()
            return
        self._steps.append(segment)
        if self._runs:
            segment.replay()
        self._keep_contents(not is_last)

    def _keep_contents(self, keeps: bool) -> None:
        """Keep a simulated pool unpoisoned while later segments may read its contents."""
        pool = None if self._last is None else self.driver.mem_pool(self._last.pool)
        if isinstance(pool, SimMemPool):
            pool.keeps_contents = keeps

    def _abandon(self, error: BaseException) -> None:
        self._failure = self._failure or error
        segment, self._open = self._open, None
        if segment is not None:
            segment._abandon(error)
            segment.reset()


class Break:
    """A call that each replay repeats.

    Args:
        driver: The driver in force.
        work: The work to call.
        arguments: Its positional and keyword arguments.
        streams: The side streams of the capture until now.
        flow: The flow of gradients through it; None if they do not get back.
        blocks: The pool's blocks, of which it owns none; None if it owns what it has.

    Attributes:
        title: Its name, and the line that called it.
    """

    def __init__(
        self,
        driver: _driver.Driver,
        work: Work,
        arguments: tuple[Any, Any],
        streams: tuple[Any, ...],
        flow: Flow | None = None,
        blocks: PoolBlocks | None = None,
    ) -> None:
        self.title = f"{work.name} ({user_line()})"
        self._driver = driver
        self._work = work
        self._fn: Callable[..., Any] = work.fn if flow is None else flow
        self._arguments = arguments
        self._streams = streams
        self._modes = Modes.now(driver.device_type)
        self._flow = flow
        self._blocks = blocks
        self._bridge = Bridge(f"the break {self.title}", driver.device_type, blocks)

    @property
    def arguments(self) -> tuple[Any, Any]:
        """The arguments of each replay."""
        return self._arguments

    @property
    def bridge_bytes(self) -> int:
        """Bytes of memory that its results are copied into."""
        return self._bridge.bytes

    def first(self) -> Any:
        """Run it in the capture; return the result for the code after it."""
        if self._work.is_pause:
            # Autocast may be casting, and its cache is locked.
            return self._bridge.first(self._call)
        # A segment's autocast casts belong to it, and the break's own are gone later.
        torch.clear_autocast_cache()
        result = self._bridge.first(self._call)
        if self._flow is not None:
            result = self._flow.connected(result)
        elif self._bridge.has_history and not self._work.is_backward:
            raise CaptureError(
                f"the break {self.title} has returned a tensor that requires a gradient, in a"
                " capture without gradients: detach it, or capture with gradients enabled"
            )
        torch.clear_autocast_cache()
        # Replays neither need the capture's history nor may extend it.
        if any(_has_history(leaf) for leaf in tree_iter(self._arguments)):
            self._arguments = tree_map(_without_history, self._arguments)
        elif self._blocks is not None and not (self._flow is not None and self._flow.is_connected):
            # Each replay comes here before work that takes the memory of the arguments.
            args, kwargs = self._arguments
            args, values = self._blocks.without_blocks((args, tuple(kwargs.values())))
            self._arguments = args, dict(zip(kwargs, values, strict=True))
        self._blocks = None
        return result

    def stand_in(self) -> Any:
        """Return a stand-in for its result, for the code after it where the capture runs nothing.

        Raises:
            CaptureError: The form of the result is known only when it runs.
        """
        stand_in = self._work.stand_in
        if stand_in is None:
            raise CaptureError(
                f"the break {self.title} was called in a capture that runs nothing, as those of"
                " the backward pass of a function's result and of GraphLadder.capture(run=False):"
                " run the backward pass inside the function, call the break in its forward pass,"
                " or let the capture run"
            )
        args, kwargs = self._arguments
        return self._bridge.first(lambda: stand_in(*args, **kwargs))

    def __call__(self) -> None:
        """Run it in a replay."""
        if Modes.now(self._driver.device_type) == self._modes:
            self._bridge.later(self._call())
            return
        with self._modes.restored():
            self._bridge.later(self._call())

    def native(self) -> Any:
        """Return the step for native code: the bare function, if nothing is needed around it."""
        modes, (args, kwargs) = self._modes, self._arguments
        if self._streams or any(enabled for _, enabled, _ in modes.autocast):
            return self
        later, is_none = self._bridge.later, self._bridge.is_none
        return self, self._fn, args, kwargs, (modes.grad, modes.inference), later, is_none

    def settle(self) -> None:
        """End the capture.

        Raises:
            CaptureError: The code after it used the result in a way that a replay cannot repeat.
        """
        self._bridge.check()
        if self._flow is not None and not self._flow.settle():
            self._flow, self._fn = None, self._work.fn

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


def _has_history(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.grad_fn is not None


def _without_history(value: Any) -> Any:
    return value.detach() if _has_history(value) else value
