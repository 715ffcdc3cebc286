"""``CUDAGraph`` and ``graph``: torch's names, on cgraph's core.

Differences to ``torch.cuda``: an exception in the body of :class:`graph` is the one that comes out,
and stream, allocator, random state and capture are as before, whatever fails.
Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar

from typing_extensions import Self

from cgraph import _core, _driver, _torch, data
from cgraph._driver import Captured, Handle, Pool, Recording
from cgraph.errors import (
    ArgumentError,
    CaptureError,
    CgraphError,
    ForeignError,
    StateError,
    add_note,
)

__all__ = ["CUDAGraph", "graph", "graph_pool_handle", "is_current_stream_capturing"]


def is_current_stream_capturing() -> bool:
    """Whether a capture is under way on the current stream; creates no CUDA context."""
    return _driver.current().is_capturing()


def graph_pool_handle() -> Handle:
    """An opaque token of a new memory pool, for the ``pool`` argument of captures that share it."""
    return _driver.current().pool_handle()


class CUDAGraph(_core.Graph):
    """A captured graph of work, replayed by one call.

    Args:
        keep_graph: Keep the template (``cudaGraph_t``) after the capture, so that it can be looked
            at, changed and instantiated again. It is then instantiated by :meth:`instantiate` or by
            the first :meth:`replay`, and not by the capture.

    Only one thread at a time may capture with one object. Replays from several threads are
    serialised.
    """

    _hooks: _core.Hooks
    _recording: Recording | None
    _captured: Captured | None
    _generators: list[Any]
    _ended: bool

    def __new__(cls, keep_graph: bool = False, *args: Any, **kwargs: Any) -> Self:
        """Create an empty graph; subclasses may take further arguments."""
        self = super().__new__(cls, keep_graph)
        self._hooks = _core.Hooks()
        self._recording = None
        self._captured = None
        self._generators = []
        self._ended = False
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
            capture_error_mode: What unsafe calls do while the capture is open: ``"global"`` (fail
                in every thread), ``"thread_local"`` (fail in this one), ``"relaxed"`` (nothing).
            check_input_liveness: Check before each replay that the memory from outside that the
                capture read is alive and where it was: the tensors that operators read, and on CUDA
                the addresses that other kernels were given. Not seen are addresses that a kernel
                finds in memory or in a packed form, such as a TMA descriptor.

        Raises:
            StateError: The object captures already or holds a graph; call :meth:`reset`.
            CaptureError: The stream is the default stream or captures already.
            ForeignError: The pool is of another device or driver.
            ArgumentError: The mode is unknown.
        """
        self._require_empty()
        _require_mode(capture_error_mode)
        self._recording = _driver.current().begin(
            pool=pool,
            mode=capture_error_mode,
            check_liveness=check_input_liveness,
            generators=self._generators,
        )

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
        self._hooks.run("capture_end", self)
        if not self._keep_graph:
            try:
                self._instantiate()
            except CgraphError:
                self.reset()
                raise
            self._hooks.run("instantiate", self)
        self.capture_end_post()

    def capture_end_pre(self) -> None:
        """End the capture without finalising it: the template is live, also if it is not kept."""
        recording = self._recording
        if recording is None:
            raise StateError("capture_end() without a capture: call capture_begin() first")
        self._recording = None
        captured = recording.finish()
        template, captured.template = captured.template, None
        assert template is not None
        empty = template.is_empty()
        self._adopt(
            template,
            current=captured.current,
            ordinal=captured.ordinal,
            check=captured.check,
            random_step=captured.random_step,
            sim=captured.sim,
            retained=captured.retained,
        )
        self._captured = captured
        self._ended = True
        if empty:
            warnings.warn(
                "the captured graph is empty: nothing was enqueued on the capturing stream. Tensors"
                " of another device, or another current stream, are the usual cause.",
                stacklevel=_levels_to_user(),
            )

    def capture_end_post(self) -> None:
        """Finalise: drop the template unless it is kept. Does not instantiate."""
        if not self._ended:
            raise StateError("capture_end_post() without capture_end_pre()")
        self._ended = False
        if not self._keep_graph:
            self._release_template()

    def instantiate(self) -> None:
        """Make the template executable, again if it was changed; the exec before is dropped.

        Raises:
            StateError: There is no live template: nothing was captured, or it is not kept.
            InstantiateError: The driver refuses; the exec before stays.
        """
        self._require_template("instantiate()")
        self._instantiate()
        self._hooks.run("instantiate", self)

    def reset(self) -> None:
        """Drop all that was captured; the object can capture again. Hooks stay."""
        recording, self._recording = self._recording, None
        captured, self._captured, self._ended = self._captured, None, False
        try:
            if recording is not None:
                recording.abandon()
        finally:
            self._clear()
            if captured is not None:
                _release(captured)

    def pool(self) -> Handle:
        """The token of the memory pool, for other captures that are to share it."""
        if self._recording is not None:
            return self._recording.pool
        return self.pools()[0]

    def pools(self) -> list[Handle]:
        """The tokens of all memory pools that the graph keeps: first that of the capture, then
        those that ``torch.cuda.use_mem_pool`` brought in inside it.
        """  # noqa: D205
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
            verbose: With launch dimensions and bytes.
        """
        text = self._require_template("debug_dump()").dot(verbose)
        with open(debug_path, "w", encoding="utf-8") as file:
            file.write(text)

    def get_graph_data(self) -> dict[str, Any]:
        """All that is known of the live template and its exec; see :func:`cgraph.graph_data`."""
        return data.graph_data(self)

    def raw_cuda_graph(self) -> int:
        """The live template as a ``cudaGraph_t``; dies with :meth:`reset` or the object.

        It may be changed with any CUDA library; :meth:`instantiate` afterwards.
        """
        return self._require_template("raw_cuda_graph()").handle

    def raw_cuda_graph_exec(self) -> int:
        """The exec as a ``cudaGraphExec_t``; dies with the next :meth:`instantiate`."""
        handle = self._exec_handle
        if handle is None:
            raise StateError("raw_cuda_graph_exec() before instantiate(): there is no exec yet")
        return handle

    def register_capture_end_hook(self, hook: Callable[[CUDAGraph], object]) -> _core.HookHandle:
        """Call ``hook(graph)`` when a capture has ended and its template is live.

        Hooks run in the order of registration; the first that raises stops the others, and its
        exception comes out of :meth:`capture_end`. ``handle.remove()`` takes the hook away.
        """
        return self._hooks.register("capture_end", hook)

    def register_post_instantiate_hook(
        self, hook: Callable[[CUDAGraph], object]
    ) -> _core.HookHandle:
        """Call ``hook(graph)`` after each instantiation; see :meth:`register_capture_end_hook`."""
        return self._hooks.register("instantiate", hook)

    def register_generator_state(self, generator: Any) -> None:
        """Let later captures draw random numbers from a generator besides the default one."""
        self._generators.append(generator)

    def __del__(self) -> None:
        recording = getattr(self, "_recording", None)
        if recording is not None:
            self.reset()

    def _require_empty(self) -> None:
        if self._recording is not None:
            raise StateError(
                "a capture into a graph that captures already: call capture_end() first"
            )
        if self._captured is not None:
            raise StateError(
                "a capture into a graph that holds a captured graph already: call reset() first"
            )

    def _instantiate_for_replay(self) -> None:
        """Called by ``replay()`` when there is no exec."""
        if self._recording is not None:
            raise StateError("replay() inside the capture: call capture_end() first")
        if self._captured is None:
            raise StateError("replay() before a successful capture: there is nothing to replay")
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

    def _release_template(self) -> None:
        self._drop_template()
        if self._captured is not None:
            _release(self._captured)

    def _abandon(self, error: BaseException) -> None:
        """Throw an open capture away because of an exception in its body."""
        recording, self._recording = self._recording, None
        if recording is None:
            return
        try:
            reason = recording.abandon()
        except Exception as failure:  # the body's own exception is the one to come out
            reason = f"{failure} (while the capture was abandoned)"
        if reason is not None:
            add_note(error, f"cgraph: the capture was abandoned; the driver says: {reason}")


def _require_mode(mode: object) -> None:
    if mode not in _driver.MODES:
        raise ArgumentError(
            "Unknown capture error mode. Expected `global`, `thread_local`, or `relaxed`, got"
            f" {mode!r}"
        )


def _levels_to_user() -> int:
    """How many calls up the first one is that is not cgraph's, for a warning."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("cgraph."):
        level, frame = level + 1, frame.f_back
    return level


def _release(captured: Captured) -> None:
    """Let the owner of the template go."""
    owner, captured.owner = captured.owner, None
    if owner is not None:
        owner.reset()  # type: ignore[attr-defined]


class graph:
    """Capture the work of a ``with`` block into a :class:`CUDAGraph`.

    Args:
        cuda_graph: The graph to capture into.
        pool: As for :meth:`CUDAGraph.capture_begin`.
        stream: The stream to capture on; current inside the block. Default: a side stream of
            cgraph, one per device. It must outlive the graph.
        capture_error_mode: As for :meth:`CUDAGraph.capture_begin`.
        check_input_liveness: As for :meth:`CUDAGraph.capture_begin`.

    If the block raises, its exception comes out with the driver's reason as a note, the capture is
    thrown away and everything is as before.
    """

    default_capture_stream: ClassVar[Any] = None
    _default_streams: ClassVar[list[Any]] = []

    def __init__(
        self,
        cuda_graph: CUDAGraph,
        pool: Pool | None = None,
        stream: Any = None,
        capture_error_mode: str = "global",
        check_input_liveness: bool = False,
    ) -> None:
        if not isinstance(cuda_graph, CUDAGraph):
            raise ArgumentError(
                f"cuda_graph is {cuda_graph!r}, expected a cgraph.CUDAGraph: torch's own graphs are"
                " captured with torch.cuda.graph"
            )
        _require_mode(capture_error_mode)
        self.cuda_graph = cuda_graph
        self.pool = pool
        self.capture_error_mode = capture_error_mode
        self.check_input_liveness = check_input_liveness
        self._driver = _driver.current()
        self.capture_stream = self._default_stream() if stream is None else stream
        self._stream_context: AbstractContextManager[object] | None = None

    def __enter__(self) -> None:
        """Begin the capture."""
        # All that can be known to be wrong comes before the first call that touches anything.
        if _driver.current() is not self._driver:
            raise ForeignError(
                "the driver in force is another one than when this graph(...) was made: make it"
                " where it is entered"
            )
        self.cuda_graph._require_empty()
        if self._driver.is_capturing():
            raise CaptureError(
                "a capture inside another one: captures cannot be nested; end the first one before"
            )
        context = self._driver.stream(self.capture_stream)
        self._driver.synchronize()
        if _torch.wants_gc():
            gc.collect()
        self._driver.empty_cache()
        context.__enter__()
        try:
            self.cuda_graph.capture_begin(
                pool=self.pool,
                capture_error_mode=self.capture_error_mode,
                check_input_liveness=self.check_input_liveness,
            )
        except BaseException:
            context.__exit__(None, None, None)
            raise
        self._stream_context = context

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """End the capture; the block's own exception stays the one that is raised."""
        context, self._stream_context = self._stream_context, None
        if context is None:
            raise StateError("graph.__exit__() without __enter__(): use it in a with statement")
        try:
            if error is None:
                self.cuda_graph.capture_end()
            else:
                self.cuda_graph._abandon(error)
        finally:
            context.__exit__(None, None, None)

    @classmethod
    def _forget_streams_of(cls, device: object) -> None:
        """Let the streams that were made for captures on a device go."""
        cls._default_streams = [s for s in cls._default_streams if s.device != device]
        if cls.default_capture_stream is not None and cls.default_capture_stream.device == device:
            cls.default_capture_stream = None

    def _default_stream(self) -> Any:
        """The class's side stream of the current device, made on first use."""
        cls = type(self)
        if "_default_streams" not in vars(cls) or cls.default_capture_stream is None:
            cls._default_streams = []
        device = self._driver.current_stream().device
        for stream in cls._default_streams:
            if stream.device == device:
                break
        else:
            stream = self._driver.new_stream()
            cls._default_streams.append(stream)
        cls.default_capture_stream = stream
        return stream
