"""``CUDAGraph``: torch's name and interface, on cgraph's core."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from cgraph import _core, _driver, data
from cgraph._captures.capture_options import CaptureOptions
from cgraph._captures.capture_scopes import require_thawed
from cgraph._captures.footprint import is_weighing
from cgraph._driver import Captured, Driver, Handle, OpenCapture, Pool
from cgraph._reason import Reason
from cgraph._text import first_line, plural
from cgraph.causes import Cause
from cgraph.errors import (
    CaptureError,
    CgraphError,
    CgraphWarning,
    StateError,
    add_note,
)
from cgraph.labels import Label
from cgraph.ledger import GraphMemory, all_graphs, of_graph

if TYPE_CHECKING:
    from typing_extensions import Self


__all__ = ["CUDAGraph", "end_all"]

Hook = Callable[["CUDAGraph"], object]

_numbers = itertools.count(1)
_log = logging.getLogger("cgraph.capture")


def end_all() -> None:
    """Run the destroy callbacks of all graphs that are alive."""
    with ExitStack() as ends:  # an exit that raises SystemExit does not stop the others
        for graph in reversed(list(all_graphs.values())):
            ends.callback(graph._end_cycle)


class CUDAGraph(_core.Graph):
    """A captured graph of work, replayed by one call.

    Args:
        keep_graph: Keep the template (``cudaGraph_t``) after the capture, so that it can be
            inspected, changed and instantiated again. It is then instantiated by
            :meth:`instantiate` or by the first :meth:`replay`, and not by the capture.

    Only one thread at a time may capture with one object. Replays from several threads are
    serialised.
    """

    _capture: OpenCapture | None = None
    _captured: Captured | None = None
    _generators: list[Any]
    _ended: bool = False
    _driver: _driver.Driver
    """The driver of the last capture."""
    _number: int
    """A number in the order of captures."""
    _nodes: int
    """Number of nodes that the capture recorded."""
    _labels: dict[int, Label]
    """The origin of the template's nodes, by raw node."""
    _options: CaptureOptions = CaptureOptions()
    """Options of the next capture that ``capture_begin()`` does not take."""
    _statics: Sequence[Any] = ()
    """The tensors that replays copy to; see ``_replay_with()``."""

    def __new__(cls, keep_graph: bool = False, *args: Any, **kwargs: Any) -> Self:
        """Create an empty graph; subclasses may take further arguments."""
        self = super().__new__(cls, keep_graph)
        self._generators = []
        self._labels = {}
        return self

    def __init__(self, keep_graph: bool = False) -> None: ...

    def capture_begin(
        self,
        pool: Pool | None = None,
        capture_error_mode: str = "global",
        check_input_liveness: bool = False,
    ) -> None:
        """Begin a capture on the current stream, which must not be the default stream.

        Args:
            pool: A ``torch.cuda.MemPool``, or the token of :func:`graph_pool_handle` or
                :meth:`pool`, to share memory with other captures. Graphs that share a pool must be
                replayed in the order of their captures, never at the same time.
            capture_error_mode: Effect of unsafe calls while the capture is open: ``"global"`` (fail
                in every thread), ``"thread_local"`` (fail in this one), ``"relaxed"`` (nothing).
            check_input_liveness: Check before each replay that outside memory that the capture read
                is alive and unmoved: the tensors that operators read, and on CUDA the addresses
                that other kernels were given. Addresses that a kernel finds in memory or in a
                packed form, such as a TMA descriptor, are not seen.

        The capture-start hooks run inside the capture; if one raises, the capture is dropped.

        Raises:
            StateError: The object captures already or holds a graph; call :meth:`reset`. Or the
                pool is closed to captures: see :func:`cgraph.capture_scope`.
            CaptureError: The stream is the default stream or captures already.
            ForeignError: The pool is of another device or driver.
            ArgumentError: The mode is unknown.
        """
        self._require_empty()
        _driver.require_mode(capture_error_mode)
        require_thawed(pool)
        self._driver = _driver.current()
        preset = self._options
        options = CaptureOptions(
            pool,
            capture_error_mode,
            check_input_liveness,
            self._generators,
            preset.labels,
            preset.statics,
            preset.resumes,
            preset.is_weighed,
        )
        self._capture = self._driver.begin(options)
        self._statics, self._number = options.statics, next(_numbers)
        try:
            self._run_hooks("capture_start")
        except BaseException as error:
            self._abandon(error)
            raise

    def capture_end(self) -> None:
        """End the capture; afterwards :meth:`replay` is allowed.

        Runs the capture-end hooks and, unless the template is kept, instantiates, runs the
        post-instantiate hooks and drops the template. A hook that raises leaves the template live;
        call :meth:`instantiate` or :meth:`reset`.

        Raises:
            StateError: No capture was begun.
            CaptureError: The capture was broken, or a forked stream was not joined.
            InstantiateError: The captured graph cannot be instantiated; the object is empty then.
        """
        self.capture_end_pre()
        self._run_hooks("capture_end")
        if not self._keep_graph:
            try:
                self.instantiate()
            except CgraphError:
                if not self._has_exec:  # the driver's error, not a hook's
                    self.reset()
                raise
        self.capture_end_post()

    def capture_end_pre(self) -> None:
        """End the capture without finalising it: the template is live, even if it is not kept."""
        capture = self._require_capture()
        self._capture = None
        try:
            captured = capture.finish()
        except CaptureError as error:
            from cgraph._explanation.findings import blame_at_end

            if (culprit := blame_at_end(error)) is not None:
                add_note(error, f"cgraph: {culprit}")
            raise
        self._take_over(captured)
        if self._nodes == 0 and not capture.may_be_empty:
            text = (
                "The CUDA Graph is empty: nothing was enqueued on the capturing stream. Tensors of"
                " another device, or another current stream, are the usual cause"
            )
            Reason(Cause.EMPTY_GRAPH, text).warn(kind=CgraphWarning)
        _log.debug("%r is captured", self)

    def capture_end_post(self) -> None:
        """Finalise: drop the template unless it is kept. Does not instantiate."""
        if not self._ended:
            raise StateError(
                "capture_end_post() without a capture that has ended: call capture_end_pre() first,"
                " and reset() in no hook of the graph"
            )
        self._ended = False
        if not self._keep_graph:
            self._drop_template(self._captured is not None and self._captured.outlives)

    def instantiate(self) -> None:
        """Make the template executable, again if it was changed; the previous exec is dropped.

        CUDA allows a graph with nodes that allocate memory one exec at a time: for these, this
        waits for the replays of the previous exec, and drops it first.

        Raises:
            StateError: There is no live template: nothing was captured, or it is not kept.
            InstantiateError: The driver refuses; the previous exec stays unless it was dropped.
        """
        if self._captured is not None and not (self._keep_graph or self._has_template):
            raise StateError(
                "instantiate() is intended to be called by the user only when keep_graph=true:"
                " this graph was instantiated by its capture; create it with"
                " CUDAGraph(keep_graph=True)"
            )
        self._require_template("instantiate()")
        captured = self._captured
        assert captured is not None and captured.footprint is not None
        self._instantiate(captured.footprint.is_weighed or is_weighing())
        self._run_hooks("instantiate")

    def reset(self) -> None:
        """Drop everything captured; the object can capture again.

        Destroy callbacks run first and are used up, and retained objects go; hooks stay.
        """
        capture, self._capture = self._capture, None
        try:
            if capture is not None:
                capture.abandon()
        finally:
            try:
                self._end_cycle()
            finally:
                # The retained objects must outlast the exec.
                captured, self._captured, self._ended = self._captured, None, False
                self._labels = {}
                if captured is not None and captured.outlives:
                    self._drop_template(True)
                self._clear()
                del captured

    def memory(self) -> GraphMemory:
        """Return the device and host memory that the graph takes; see :mod:`cgraph.ledger`."""
        return of_graph(self)

    def __repr__(self) -> str:
        """Return the graph's number, its nodes and the line of its capture."""
        captured = self._captured
        if captured is None or captured.footprint is None:
            return "<cgraph.CUDAGraph: nothing captured>"
        found = of_graph(self, ())
        state = "" if self._has_exec else ", not instantiated"
        return f"<cgraph.{self._name}: {plural(found.nodes, 'node')} from {found.where}{state}>"

    @property
    def _name(self) -> str:
        return f"graph {self._number}"

    def pool(self) -> Handle:
        """Return the token of the memory pool, for other captures that share it."""
        if self._capture is not None:
            return self._capture.pool
        return self.pools()[0]

    def pools(self) -> list[Handle]:
        """Return the tokens of all memory pools that the graph keeps.

        The capture's pool comes first, then the pools that ``torch.cuda.use_mem_pool`` brought in
        inside it.
        """
        if self._captured is None:
            raise StateError("pool() before a successful capture: capture something first")
        return list(self._captured.pools)

    def enable_debug_mode(self) -> None:
        """Keep this graph's template from the next capture on, as ``keep_graph=True`` does."""
        self._keep_graph = True

    def debug_dump(self, debug_path: str, *, verbose: bool = True) -> None:
        """Write the live template as a Graphviz graph.

        Args:
            debug_path: The file to write.
            verbose: Include launch dimensions and bytes.
        """
        text = self._require_template("debug_dump()").dot(verbose)
        with open(debug_path, "w", encoding="utf-8") as file:
            file.write(text)

    def get_graph_data(self) -> dict[str, Any]:
        """Return all data of the live template and its exec; see :func:`cgraph.graph_data`."""
        return data.graph_data(self)

    def raw_cuda_graph(self) -> int:
        """Return the live template as a ``cudaGraph_t``; dies with :meth:`reset` or the object.

        It may be changed with any CUDA library; call :meth:`instantiate` afterwards.
        """
        if self._captured is not None and not self._has_template:
            raise StateError(
                "You cannot access the raw cudaGraph_t instance unless CUDAGraph was initialized"
                " with keep_graph=true: raw_cuda_graph() needs the template; create the graph with"
                " CUDAGraph(keep_graph=True) or call enable_debug_mode() before the capture"
            )
        return self._require_template("raw_cuda_graph()").handle

    def raw_cuda_graph_exec(self) -> int:
        """Return the exec as a ``cudaGraphExec_t``; dies with the next :meth:`instantiate`."""
        handle = self._exec_handle
        if handle is None:
            raise StateError(
                "You cannot access the raw cudaGraphExec_t instance until instantiate() has been"
                " called: raw_cuda_graph_exec() finds no exec yet"
            )
        return handle

    def register_capture_start_hook(self, hook: Hook) -> _core.HookHandle:
        """Call ``hook(graph)`` when a capture has begun: work that it enqueues becomes part of it.

        All hooks of a graph run in the order of registration, after those of :mod:`cgraph.hooks`,
        which are called for every graph. The first that raises stops the others, and its exception
        comes out of the current method. ``handle.remove()`` removes the hook. A hook may refer to
        its graph without keeping it alive.
        """
        return self._register("capture_start", hook)

    def register_capture_end_hook(self, hook: Hook) -> _core.HookHandle:
        """Call ``hook(graph)`` when a capture has succeeded and its template is live."""
        return self._register("capture_end", hook)

    def register_post_instantiate_hook(self, hook: Hook) -> _core.HookHandle:
        """Call ``hook(graph)`` after each instantiation, which makes a fresh exec."""
        return self._register("instantiate", hook)

    def register_replay_start_hook(self, hook: Hook) -> _core.HookHandle:
        """Call ``hook(graph)`` before each launch; if it raises, nothing is launched."""
        return self._register("replay_start", hook)

    def register_replay_end_hook(self, hook: Hook) -> _core.HookHandle:
        """Call ``hook(graph)`` when a replay is enqueued, not finished; also if the launch failed.

        It does not run where a replay-start hook has raised.
        """
        return self._register("replay_end", hook)

    def register_destroy_callback(
        self, cb: Callable[[], object], *, synchronize_before_release: bool = False
    ) -> _core.HookHandle:
        """Call ``cb()`` once, at the next :meth:`reset` or when the graph dies.

        It runs before the graph's device resources are freed; an exception goes to
        ``sys.unraisablehook``. It may refer to the graph without keeping it alive. A subclass with
        a ``__del__`` of its own must call that of its base.

        Args:
            cb: Called without arguments, in the order of registration.
            synchronize_before_release: Wait for the graph's replays before the callbacks run.
                Without it, a callback must not free what a replay in flight may use.
        """
        handle = self._register_destroy(cb, synchronize_before_release)
        all_graphs[id(self)] = self
        return handle

    def retain_object(
        self, obj: object, *, synchronize_before_release: bool = False
    ) -> _core.HookHandle:
        """Keep an object alive until the next :meth:`reset` or the graph's death.

        Replays in flight keep it alive too, so that it may own memory that the graph uses.

        Args:
            obj: It may refer to the graph without keeping it alive. A ``__del__`` of it runs then
                when the collector finds both, even while a replay is in flight.
            synchronize_before_release: Wait for the graph's replays, so that it goes at once.
        """
        return self._retain(obj, synchronize_before_release)

    def register_generator_state(self, generator: Any) -> None:
        """Let later captures draw random numbers from a generator besides the default one."""
        self._generators.append(generator)

    def __del__(self) -> None:
        # The retained objects may be in a cycle with the graph. They go to the exec before the
        # collector takes the cycle apart, and outlast its replays in flight.
        CUDAGraph.reset(self)

    def _replay_fresh(self, tensors: tuple[Any, ...] = ()) -> list[Any]:
        """Replay with tensors in place of static inputs; return new tensors like the results."""
        from cgraph._captures.fresh_results import fresh_of

        return self._replay_made(fresh_of(self._captured), tensors)

    def _hold(self, captured: Captured, driver: Driver) -> None:
        """Take over what was captured elsewhere, as in another process; its template is live."""
        self._require_empty()
        self._driver, self._number = driver, next(_numbers)
        self._take_over(captured)

    def _take_over(self, captured: Captured) -> None:
        assert captured.template is not None
        nodes = captured.template.node_count()
        self._adopt(captured)
        captured.template = None
        self._nodes = nodes
        self._captured = captured
        self._labels = captured.labels
        self._ended = True
        all_graphs[id(self)] = self

    def _require_capture(self) -> OpenCapture:
        if self._capture is None:
            raise StateError("capture_end() without a capture: call capture_begin() first")
        return self._capture

    def _require_empty(self) -> None:
        if self._capture is not None:
            raise StateError(
                "a capture into a graph that captures already: call capture_end() first"
            )
        if self._captured is not None:
            raise StateError(
                "a capture into a graph that holds a captured graph already: call reset() first"
            )

    def _instantiate_for_replay(self) -> None:
        """Instantiate for ``replay()`` when there is no exec."""
        if self._capture is not None:
            raise StateError("replay() inside the capture: call capture_end() first")
        if self._captured is None:
            raise StateError(
                "replay() before a successful capture, or after reset(): there is nothing to replay"
            )
        if not self._keep_graph:
            raise StateError(
                "replay() of a graph that was not finalised: call instantiate() or reset()"
            )
        self.instantiate()

    def _require_template(self, what: str) -> _core.Template:
        if self._has_template:
            return self._template
        if self._captured is None:
            raise StateError(f"{what} before a successful capture: capture something first")
        raise StateError(
            f"{what} needs the template, which this graph has not kept: create it with"
            " CUDAGraph(keep_graph=True) or call enable_debug_mode() before the capture"
        )

    def _abandon(self, error: BaseException) -> None:
        """Discard an open capture because of an exception in its body."""
        capture, self._capture = self._capture, None
        if capture is None:
            return
        try:
            reason = capture.abandon()
        except Exception as failure:  # the body's own exception is the one to come out
            reason = f"{failure} (while the capture was abandoned)"
        from cgraph._explanation.findings import blame

        lines = []
        if (culprit := blame(error, reason is not None)) is not None:
            lines.append(f"cgraph: {culprit}")
            if isinstance(error, CgraphError) and error.cause is None:
                culprit.given_to(error)
        if reason is not None:
            lines.append(f"cgraph: the capture was abandoned; the driver says: {reason}")
        _log.info("the capture has failed: %s", culprit or first_line(error))
        if lines:
            add_note(error, "\n".join(lines))
