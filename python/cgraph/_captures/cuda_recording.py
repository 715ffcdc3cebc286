"""Captures of torch's CUDA work.

torch's allocator and random state follow a capture only if torch's own graph object opened it. So
such an object hosts each capture. The core ends the capture and takes the graph; the host gets a
graph of one empty node to end, and does its bookkeeping with that: torch would warn about a graph
without nodes. torch newer than 2.11 has work to do at the end: there the host ends the capture, the
core takes a copy of the graph, and the host is emptied.

The replay of such a host launches nothing and advances the random state as far as the capture did.
Where ``random_state.py`` finds the words of that state, a node of the graph sets them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import torch

from cgraph import _core, _torch
from cgraph._captures import cuda_pools, liveness, random_state
from cgraph._captures.cuda_pools import PoolHandle
from cgraph._captures.footprint import Footprint, Meter, PoolSizes, in_blocks, is_recording
from cgraph._captures.fresh_results import Results
from cgraph._captures.label_recorder import LabelRecorder
from cgraph._captures.turns import Turn
from cgraph._driver import Captured, Handle
from cgraph._reason import Reason
from cgraph._text import first_line
from cgraph.causes import Cause
from cgraph.errors import CaptureError, CgraphError, CgraphWarning, add_note
from cgraph.mempool import MemPool

if TYPE_CHECKING:
    from cgraph.timeline import Event

__all__ = ["Recording"]


class Recording:
    """An open capture, hosted by torch.

    Attributes:
        results: The tensors that replays copy to new memory; set before the end.
        goes_on: True if another capture resumes this one; set before the end.
    """

    results: Sequence[torch.Tensor] = ()
    goes_on: bool = False
    _meter: Meter

    def __init__(
        self,
        device: _core.Device,
        ordinal: int,
        stream: torch.cuda.Stream,
        side: torch.cuda.Stream,
        handle: PoolHandle,
        mode: str,
        watch: liveness.LivenessMode | None,
        generators: list[Any],
        labels: LabelRecorder | None,
        statics: Sequence[torch.Tensor],
        mark: _core.CaptureMark,
        own: Turn,
        resumes: Recording | None = None,
    ) -> None:
        self._mark: _core.CaptureMark | None = mark
        self._turn = own
        self._statics = statics
        self._device = device
        self._ordinal = ordinal
        self._stream = stream
        self._side = side
        self._generators = [torch.cuda.default_generators[ordinal], *generators]
        self._handle = handle
        self._leases: list[_torch.PoolLease] = []
        self._others: list[PoolHandle] = []
        self._watch = watch
        self._labels = labels
        # Set from the end of the capture until it is finished.
        self._template: _core.Template | None = None
        self._footprint: Footprint | None = None
        self._history: _torch.AllocatorHistory | None = None
        self._capturing = _core.Stream(device, handle=stream.cuda_stream)
        self._streams = {stream.cuda_stream: self._capturing}
        self._host = _torch.HostGraph()
        # True if torch's bookkeeping of the capture is done.
        self._is_over = True
        self._context = ExitStack()
        for generator in generators:
            self._host.register_generator_state(generator)
        try:
            self._begin(mode, resumes)
        except BaseException:
            try:
                self._leave()
            finally:
                self._close()
            raise

    @property
    def pool(self) -> Handle:
        """The token of the capture's pool."""
        return self._handle

    def end(self) -> None:
        """End the capture; :meth:`finish` returns its result."""
        here = torch.cuda.current_device(), _torch.current_raw_stream(self._ordinal)
        if here != (self._ordinal, self._stream.cuda_stream):
            current = torch.cuda.current_stream()
            reason = f"the current stream is {current}, and the capture began on {self._stream}"
            self.abandon()
            raise CaptureError(
                f"capture_end() on another stream: {reason}. Capture must end on the same stream"
                " it began on; the capture was abandoned"
            )
        if self._labels is not None:
            try:
                self._labels.look()
            except BaseException:
                self.abandon()
                raise
        try:
            ended = self._end()
            if isinstance(ended, Exception):
                raise self._failure(ended) from ended
            self._footprint = self._meter.finish(
                _torch.clear_workspaces, self._events, goes_on=self.goes_on
            )
        except BaseException:
            self._close()
            raise
        self._template = ended

    def finish(self) -> Captured:
        """End the capture unless it has ended, and return its result; an error leaves nothing."""
        if self._template is None:
            self.end()
        template, self._template = self._template, None
        assert template is not None
        try:
            return self._captured(template)
        except BaseException:
            self._close()
            raise

    def abandon(self) -> str | None:
        """End the capture and discard its work; return the driver's error, if there is one."""
        template, self._template = self._template, None
        if template is not None:
            self._close()
            return None
        try:
            with _torch.on_stream(self._stream):
                ended = self._end()
        finally:
            self._close()
        return first_line(ended) if isinstance(ended, Exception) else None

    def leave_modes(self) -> None:
        """Do nothing: these captures have no modes."""

    def _begin(self, mode: str, resumes: Recording | None) -> None:
        # Memory left by graphs that are gone must not count as freed by this capture.
        self._device.collect()
        # The workspaces of the capture must be in its own pool, and exist as long as its graph:
        # another capture's could go with that one, and be in use by it at the same time.
        _torch.clear_workspaces()
        if resumes is not None and resumes.goes_on and not is_recording():
            self._meter = resumes._meter
            self._meter.restart()
        else:
            weigh = functools.partial(_weigh, self._ordinal, self._handle.mem_pool)
            state = functools.partial(cuda_pools.state, self._handle)
            self._meter = Meter(self._handle.mem_pool, weigh, state)
        if self._watch is not None:
            self._watch.begins(cuda_pools.state(self._handle))
        if is_recording():
            self._history = _torch.AllocatorHistory(self._ordinal)
        self._is_over = False
        self._host.capture_begin(tuple(self._handle), mode)
        self._context.enter_context(_torch.routed_pools_told(self._ordinal, self._pool_seen))
        if self._watch is not None:
            _torch.enter_mode(self._watch)
            self._context.callback(_torch.leave_mode, self._watch)
        if self._labels is not None:
            self._context.callback(self._labels.stop)
            self._labels.start(self._current_stream)

    def _leave(self) -> None:
        """End the host and the watchers, and do the work that had to wait for the end."""
        try:
            self._end_rest()
        finally:
            try:
                self._context.close()
            finally:
                self._mark = None
                self._turn.end()
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
            if self._labels is not None:
                # Any thread may look for labels, and must not find a dying graph.
                self._labels.over = True
            if _torch.keeps_state_of_captures():
                return self._end_by_host()
            ended: _core.Template | Exception
            try:
                ended = _core.Capture.take_over(self._capturing).finish()
            except Exception as error:
                ended = error
            also = self._end_host()
            return also if also is not None and not isinstance(ended, Exception) else ended
        finally:
            self._leave()

    def _end_by_host(self) -> _core.Template | Exception:
        """End the capture by the host, which may have work to do before; return a copied graph."""
        try:
            with _torch.quiet():
                self._host.capture_end()
            self._is_over = True
        except Exception as error:  # torch's error texts may even fail to decode
            self._end_host()
            return error
        own = _core.Template.from_raw(self._device, self._host.raw_cuda_graph())
        try:
            copy = self._copied(own)
        except CgraphError as error:
            text = "CUDA cannot copy graphs with nodes for memory or conditions, and with torch"
            add_note(error, f"cgraph: {text} newer than 2.11 the graph is copied")
            raise
        own.clear()
        return copy

    def _copied(self, template: _core.Template) -> _core.Template:
        """Copy a template; the labels move to the nodes of the copy."""
        if self._labels is None or not self._labels.found:
            return template.copy()
        copy, nodes = template.copy_mapped()
        self._labels.found = {nodes[node]: label for node, label in self._labels.found.items()}
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
        if self._labels is not None:
            self._labels.over = True
        with _torch.on_stream(self._stream):
            self._end_host()

    def _captured(self, template: _core.Template) -> Captured:
        for handle in (self._handle, *(lease.handle for lease in self._leases)):
            mem_pool = cuda_pools.known(handle)
            if mem_pool is not None:
                # From here on a replay while it is paused is refused.
                template.retain_pool(mem_pool._core)
        retained = {tuple(self._handle), *(tuple(lease.handle) for lease in self._leases)}
        others = [one._core for one in cuda_pools.all_known() if tuple(one.id) not in retained]
        if others:
            # As that of weights: the graph reads what lies there.
            template.require_named(others)
        # The trials here are not the user's work, whose modes must not see them.
        with _torch.without_modes():
            drawn = self._drawn()
            # If such words are the capture's own, only its host can fill them.
            is_shared = not _torch.keeps_state_of_captures()
            draws = random_state.draws(self._device, drawn, self._side) if is_shared else None
        host = self._host if drawn else None
        if host is None:
            self._host.reset()
        inputs = None
        if self._statics or draws:
            words = [word for draw in draws or () for word in draw.words]
            reader = _torch.tensor_reader()
            inputs = _core.Inputs(template, reader, list(self._statics), words)
        results = outputs = None
        if self.results:
            results, self.results = Results(self.results), ()
            outputs = _core.Outputs(template, results.storages)
        if inputs is not None or outputs is not None:
            # An exec's inputs and outputs are set through its template, which must therefore stay.
            # The pool last: its memory goes back when it goes as its last user.
            template.retain((self._handle, host))
        if (watch := self._watch) is not None:
            watch.ends(cuda_pools.state(self._handle))
        pools: list[Handle] = [self._handle, *self._others]
        return Captured(
            template,
            pools=pools,
            current=_torch.current_stream_source(),
            ordinal=self._ordinal,
            check=None if watch is None else liveness.Check(self._device, template, watch, pools),
            random_step=None if host is None or draws is not None else host.replay,
            inputs=inputs,
            results=results,
            outputs=outputs,
            generators=[(draw.generator, draw.step) for draw in draws or ()],
            retained=(self._handle, self._others, self._leases, host),
            footprint=self._footprint,
            labels={} if self._labels is None else self._labels.found,
        )

    def _drawn(self) -> list[tuple[torch.Generator, int]]:
        """Return the generators that the capture drew from, and the steps of their offsets.

        The host is replayed once to find out, and the offsets are put back.
        """
        before = [generator.get_offset() for generator in self._generators]
        # Newer torch's replay does not instantiate.
        self._host.instantiate()
        self._host.replay()
        # The fills of this trial, and those at torch's begin of any capture, must not come after
        # those of a replay on another stream.
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
            f"capture on {self._stream} failed: {first_line(error)}. Work on a forked stream must"
            " be joined back (wait_stream) before the capture ends, and an operation that failed"
            " inside the capture breaks it"
        )
        failure.code = getattr(error, "code", None)
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
    reserved, in_use, freed = _torch.allocated(ordinal)
    return PoolSizes(reserved if mem_pool is None else mem_pool._core.reserved, in_use, freed)
