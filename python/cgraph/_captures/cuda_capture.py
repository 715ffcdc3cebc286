"""Captures of torch's CUDA work.

torch's allocator and random state follow a capture only if torch's own graph object opened it. So
such an object hosts each capture: it begins and ends it and owns the graph, which the core uses.
Where a capture is broken, the core ends it, and the host gets a graph of one empty node to end, and
does its bookkeeping with that.

A replay with random numbers advances the random state as far as the capture did. Where
``random_state.py`` finds the words of that state, a node of the graph sets them. Elsewhere the core
takes a copy of the graph, and the emptied host is replayed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from typing import TYPE_CHECKING

import torch

from cgraph import _core, _torch
from cgraph._captures import cuda_pools, eager_blocks, liveness, random_state
from cgraph._captures.capture_options import CaptureOptions
from cgraph._captures.cuda_pools import PoolHandle
from cgraph._captures.footprint import Footprint, Meter, PoolSizes, in_blocks, is_recording
from cgraph._captures.fresh_results import Results
from cgraph._captures.turns import Turn
from cgraph._driver import Captured, Handle
from cgraph._reason import Reason
from cgraph._text import first_line
from cgraph.causes import Cause
from cgraph.errors import CaptureError, CgraphError, CgraphWarning, add_note
from cgraph.mempool import MemPool

if TYPE_CHECKING:
    from cgraph.timeline import Event

__all__ = ["OpenCapture"]


class OpenCapture:
    """An open capture, hosted by torch.

    Args:
        device: The device.
        ordinal: Its number.
        stream: The stream that captures.
        side: A stream that does not capture.
        handle: The token of the pool.
        options: The options of the capture.
        own: The right to capture.

    Attributes:
        results: The tensors that replays copy to new memory; set before the end.
        goes_on: True if another capture resumes this one; set before the end.
        may_be_empty: True if a capture without a node is no mistake; set before the end.
    """

    results: Sequence[torch.Tensor] = ()
    goes_on: bool = False
    may_be_empty: bool = False
    _meter: Meter
    _history: _torch.AllocatorHistory | None = None
    _routes: Callable[[], object] | None = None
    _watchers: ExitStack | None = None

    def __init__(
        self,
        device: _core.Device,
        ordinal: int,
        stream: torch.cuda.Stream,
        side: torch.cuda.Stream,
        handle: PoolHandle,
        options: CaptureOptions,
        own: Turn,
    ) -> None:
        # cgraph does not wait for the device from here on: that would end the capture.
        self._mark: _core.CaptureMark | None = device.mark_capture()
        self._turn = own
        # Without what it resumes, which has its own, and so on.
        self._options = options._replace(resumes=None)
        self._device = device
        self._ordinal = ordinal
        self._stream = stream
        self._side = side
        self._generators = [torch.cuda.default_generators[ordinal], *options.generators]
        self._handle = handle
        self._leases: list[_torch.PoolLease] = []
        self._others: list[PoolHandle] = []
        self._watch = liveness.LivenessMode() if options.checks_liveness else None
        self._capturing = _core.Stream(device, handle=stream.cuda_stream)
        self._streams = {stream.cuda_stream: self._capturing}
        self._host = _torch.HostGraph()
        # True if torch's bookkeeping of the capture is done.
        self._is_over = True
        try:
            self._begin(options)
        except BaseException:
            try:
                self._leave()
            finally:
                self._close()
                own.end()
            raise

    @property
    def pool(self) -> Handle:
        """The token of the capture's pool."""
        return self._handle

    def finish(self) -> Captured:
        """End the capture on the stream it began on; an error leaves nothing."""
        try:
            self._require_stream()
            if self._options.labels is not None:
                self._options.labels.look()
        except BaseException:
            self.abandon()
            raise
        try:
            ended = self._end()
            if isinstance(ended, Exception):
                raise self._failure(ended) from ended
            footprint = self._meter.finish(
                _torch.clear_workspaces, self._events, goes_on=self.goes_on
            )
            return self._captured(ended, footprint)
        except BaseException:
            self._close()
            raise
        finally:
            # Not before the draws were read: the next capture begins to count anew.
            self._turn.end()

    def abandon(self) -> str | None:
        """End the capture and discard its work; return the driver's error, if there is one."""
        try:
            with _torch.on_stream(self._stream):
                ended = self._end()
        finally:
            self._close()
            self._turn.end()
        return first_line(ended) if isinstance(ended, Exception) else None

    def leave_modes(self) -> None:
        """Do nothing: these captures have no modes."""

    def _begin(self, options: CaptureOptions) -> None:
        for generator in options.generators:
            self._host.register_generator_state(generator)
        tells = _torch.CapturedDraws.are_told()
        self._draws = _torch.CapturedDraws(self._generators) if tells else None
        # Memory left by graphs that are gone must not count as freed by this capture.
        self._device.collect()
        # The workspaces of the capture must be in its own pool, and exist as long as its graph:
        # another capture's could go with that one, and be in use by it at the same time.
        _torch.clear_workspaces()
        if self._watch is not None:
            self._watch.begins(cuda_pools.state(self._handle))
        eager_blocks.capture_begins(self._handle)
        if is_recording():
            self._history = _torch.AllocatorHistory(self._ordinal)
        self._is_over = False
        with _torch.beginning:
            self._host.capture_begin(tuple(self._handle), options.mode)
        # After the memory that torch takes for the random state of a device's first capture.
        self._meter = self._new_meter(options)
        self._routes = _torch.tell_routed_pools(self._ordinal, self._pool_seen)
        if self._watch is not None or options.labels is not None:
            self._watchers = ExitStack()
            self._enter_watchers(self._watchers)

    def _new_meter(self, options: CaptureOptions) -> Meter:
        resumes = options.resumes
        if isinstance(resumes, OpenCapture) and resumes.goes_on and not is_recording():
            resumes._meter.restart()
            return resumes._meter
        weigh = functools.partial(_weigh, self._ordinal, self._handle.mem_pool)
        state = functools.partial(cuda_pools.state, self._handle)
        return Meter(self._handle.mem_pool, weigh, state, is_on=options.is_weighed)

    def _enter_watchers(self, watchers: ExitStack) -> None:
        if (watch := self._watch) is not None:
            _torch.enter_mode(watch)
            watchers.callback(_torch.leave_mode, watch)
        if (labels := self._options.labels) is not None:
            watchers.callback(labels.stop)
            labels.start(self._current_stream)

    def _require_stream(self) -> None:
        """Raise unless the capturing stream is the current one."""
        here = _torch.current_ordinal(), _torch.current_raw_stream(self._ordinal)
        if here != (self._ordinal, self._stream.cuda_stream):
            raise CaptureError(
                f"capture_end() on another stream: the current stream is"
                f" {torch.cuda.current_stream()}, and the capture began on {self._stream}. Capture"
                " must end on the same stream it began on; the capture was abandoned"
            )

    def _leave(self) -> None:
        """End the host and the watchers, and do the work that had to wait for the end."""
        try:
            self._end_rest()
        finally:
            try:
                if self._watchers is not None:
                    self._watchers.close()
            finally:
                if self._routes is not None:
                    self._routes()
                self._mark = None
                _torch.release_outliving()
                _core.settle_pools()

    def _events(self) -> list[Event] | None:
        """Return the events of the pool since the begin, if they were recorded."""
        if self._history is None:
            return None
        from cgraph.timeline import Action, Event

        try:
            entries = self._history.entries()
        finally:
            self._close_history()
        if entries is None:
            text = "the record of torch's allocator is too short for this capture"
            reason = Reason(Cause.SHORT_HISTORY, text)
            reason.warn("Its memory is not recorded", CgraphWarning)
            return None
        actions: dict[str, Action] = {"alloc": "alloc", "free_completed": "free"}
        return [
            Event(
                actions[one["action"]],
                one["addr"],
                in_blocks(one["size"]),
                one["stream"],
                frames=_torch.recorded_frames(one),
            )
            for one in entries
            if one["action"] in actions
        ]

    def _current_stream(self) -> _core.Stream:
        handle = _torch.current_raw_stream(self._ordinal)
        if handle not in self._streams:
            self._streams[handle] = _core.Stream(self._device, handle=handle)
        return self._streams[handle]

    def _end(self) -> _core.Template | Exception:
        """End the capture and its watchers, whatever fails; return the graph or the error."""
        try:
            if self._options.labels is not None:
                # Any thread may look for labels, and must not find a dying graph.
                self._options.labels.over = True
            nodes = self._capturing.captured_nodes()
            return self._end_broken() if nodes is None else self._end_by_host(nodes)
        finally:
            self._leave()

    def _end_broken(self) -> Exception:
        """End a capture that is unusable; return its error."""
        try:
            _core.Capture.take_over(self._capturing).finish()
            ended: Exception = CaptureError("the capture was unusable")
        except Exception as error:
            ended = error
        self._end_host()
        return ended

    def _end_by_host(self, nodes: int) -> _core.Template | Exception:
        """End the capture by the host, which has work to do before and after; return its graph."""
        try:
            with nullcontext() if nodes else _torch.quiet():
                self._host.capture_end()
        except Exception as error:  # torch's error texts may even fail to decode
            self._end_host()
            return error
        self._is_over = True
        # The token, whose keeper would reset the host, if the host is that keeper's.
        owner = self._handle, self._host
        return _core.Template.from_raw(self._device, self._host.raw_cuda_graph(), owner)

    def _taken_from_host(self, template: _core.Template) -> _core.Template:
        """Copy the host's graph, with its labels, and leave the host an empty one to replay."""
        labels = self._options.labels
        try:
            if labels is None or not labels.found:
                copy = template.copy()
            else:
                copy, nodes = template.copy_mapped()
                labels.found = {nodes[node]: label for node, label in labels.found.items()}
        except CgraphError as error:
            text = "CUDA cannot copy graphs with nodes for memory or conditions, and this torch"
            add_note(error, f"cgraph: {text} needs a copy, for random numbers")
            raise
        template.clear()
        return copy

    def _end_host(self) -> Exception | None:
        """Let the host end another capture in place of the one it began; return an error of that.

        torch ends its bookkeeping (routing of both allocators, random state) only after a capture
        that ended well.
        """
        try:
            with suppress(RuntimeError):
                _core.end_broken(self._capturing)
            _core.begin_and_hand_over(self._capturing)
            self._host.capture_end()
        except BaseException as error:
            # The capture never began, or only another thread can end it, or there was an interrupt:
            # each part that can be undone is undone.
            with suppress(RuntimeError):
                _core.end_broken(self._capturing)
            with suppress(RuntimeError):
                _torch.end_routing(self._ordinal, (self._handle[0], self._handle[1]))
            with suppress(RuntimeError), _torch.on_stream(self._side):
                _torch.end_draws(self._generators)
            if not isinstance(error, Exception):
                raise
            return error
        finally:
            self._is_over = True
        return None

    def _end_rest(self) -> None:
        """End the host if an interrupt came first, or if the capture never began completely."""
        if self._is_over:
            return
        if self._options.labels is not None:
            self._options.labels.over = True
        with _torch.on_stream(self._stream):
            self._end_host()

    def _captured(self, template: _core.Template, footprint: Footprint) -> Captured:
        if self._draws is None:
            # Only a trial of the emptied host tells what was drawn.
            template = self._taken_from_host(template)
        drawn, draws = self._drawn(), None
        # If their words are the capture's own, only its host can fill them.
        if drawn and self._draws is not None:
            # This is not the user's work, whose modes must not see it.
            with _torch.without_modes():
                draws = random_state.draws(self._device, drawn, self._side)
        if drawn and draws is None:
            if self._draws is not None:
                template = self._taken_from_host(template)
                # Newer torch's replay does not instantiate.
                self._host.instantiate()
        is_copy = self._draws is None or (drawn and draws is None)
        self._retain_pools(template)
        inputs = None
        statics = self._options.statics
        # A stage leaves it to its loop to fill the words.
        filled = () if self._options.is_stage else draws or ()
        if statics or filled:
            words = [word for draw in filled for word in draw.words]
            inputs = _core.Inputs(template, _torch.tensor_reader(), list(statics), words)
        results = outputs = None
        if self.results:
            results, self.results = Results(self.results), ()
            outputs = _core.Outputs(template, results.storages)
        if inputs is not None or outputs is not None:
            # An exec's inputs and outputs are set through its template, which must therefore stay.
            # The pool last: its memory goes back when it goes as its last user.
            template.retain((self._handle, self._host))
        if (watch := self._watch) is not None:
            watch.ends(cuda_pools.state(self._handle))
        pools: list[Handle] = [self._handle, *self._others]
        eager_blocks.capture_ended(self._handle)
        labels = self._options.labels
        return Captured(
            template,
            pools=pools,
            current=_torch.current_stream_source(),
            ordinal=self._ordinal,
            check=None if watch is None else liveness.Check(self._device, template, watch, pools),
            random_step=self._host.replay if drawn and draws is None else None,
            inputs=inputs,
            results=results,
            outputs=outputs,
            generators=[(draw.generator, draw.step) for draw in draws or ()],
            random_words=[draw.words for draw in draws or ()],
            retained=(self._handle, self._others, self._leases, self._host if drawn else None),
            outlives=self._keeps_pool() and not is_copy,
            footprint=footprint,
            labels={} if labels is None else labels.found,
        )

    def _keeps_pool(self) -> bool:
        """Let the host keep a pool that has no other keeper; return whether it does."""
        handle = self._handle
        if handle.keeper is None:
            token = handle[0], handle[1]
            handle.keeper = _torch.PoolKeeper(token, self._side, handle.mem_pool, self._host)
        return handle.keeper.graph is self._host

    def _retain_pools(self, template: _core.Template) -> None:
        """Keep the memory of the pools that the graph names, and refuse replays in paused ones."""
        named = [cuda_pools.known(one) for one in (self._handle, *self._others)]
        retained = [one for one in named if one is not None]
        for mem_pool in retained:
            template.retain_pool(mem_pool._core)
        if len(retained) < cuda_pools.count():
            every = cuda_pools.all_known()
            others = [one._core for one in every if all(one is not own for own in retained)]
            # As that of weights: the graph reads what lies there.
            template.require_named(others)

    def _drawn(self) -> list[tuple[torch.Generator, int]]:
        """Return the generators that the capture drew from, and the steps of their offsets.

        Where this torch does not tell, the emptied host is replayed to find out, and the offsets
        are put back.
        """
        if self._draws is not None:
            drawn = self._draws.drawn()
            # The fills of torch's begin of any capture must not come after those of a replay on
            # another stream.
            self._capturing.synchronize()
            return drawn
        before = [generator.get_offset() for generator in self._generators]
        self._host.instantiate()
        with _torch.without_modes():
            self._host.replay()
        # Nor must those of this trial.
        self._stream.synchronize()
        drawn = []
        for generator, offset in zip(self._generators, before, strict=True):
            if step := generator.get_offset() - offset:
                generator.set_offset(offset)
                drawn.append((generator, step))
        return drawn

    def _pool_seen(self, handle: Handle) -> None:
        known = [self._handle, *(lease.handle for lease in self._leases)]
        if tuple(handle) not in known:
            self._leases.append(_torch.PoolLease(self._ordinal, handle))
            self._others.append(cuda_pools.handle_of(handle))

    def _failure(self, error: Exception) -> CaptureError:
        failure = CaptureError(
            f"capture on {self._stream} failed: {first_line(error)}. A forked stream that is"
            " not joined back (wait_stream) before the capture ends breaks it, and so does an"
            " operation that failed inside"
        )
        failure.code = getattr(error, "code", None) or getattr(error, "error_code", None)
        return failure

    def _close_history(self) -> None:
        history, self._history = self._history, None
        if history is not None:
            history.close()

    def _close(self) -> None:
        self._close_history()
        _torch.clear_workspaces()
        self._host.reset()
        for lease in self._leases:
            lease.release()


def _weigh(ordinal: int, mem_pool: MemPool | None) -> PoolSizes:
    reserved, in_use = _torch.allocated(ordinal)
    return PoolSizes(reserved if mem_pool is None else mem_pool._core.reserved, in_use)
