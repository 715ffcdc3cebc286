"""``graph``, and queries for a pool or a capture: torch's names, on cgraph's core.

Differences from ``torch.cuda``: an exception in the body of :class:`graph` is the one that comes
    out,
and stream, allocator, random state and capture are as before, whatever fails.
Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import torch

from cgraph import _driver, _torch
from cgraph._captures.capture_scopes import freeze as freeze_pool
from cgraph._captures.capture_scopes import prepare, prepared
from cgraph._captures.collector import collections_held_off
from cgraph._captures.label_recorder import LabelRecorder
from cgraph._driver import Handle, Pool
from cgraph._operators.codes import HostCalls
from cgraph.cudagraph import CUDAGraph
from cgraph.errors import ArgumentError, CaptureError, ForeignError, StateError
from cgraph.labels import parse_config

__all__ = ["capture_scope", "graph", "graph_pool_handle", "is_current_stream_capturing"]


def is_current_stream_capturing() -> bool:
    """Return whether the current stream captures; creates no CUDA context."""
    return _driver.current().is_capturing()


def graph_pool_handle() -> Handle:
    """Return a token of a new memory pool, for the ``pool`` argument of captures that share it."""
    _torch.let_managers_go()
    return _driver.current().pool_handle()


@contextmanager
def capture_scope(pool: Pool | None = None, *, freeze: bool = False) -> Iterator[Pool]:
    """Prepare once for all captures of a ``with`` block, which share a pool.

    A capture waits for the device and gives unused cached memory back before it begins. Here that,
    and a garbage collection, happens once, before the block; none starts by itself inside.
    Captures of a block that begin with the largest take what that one takes, if nobody keeps their
    outputs: see :func:`cgraph.weak_ref`.

    Args:
        pool: As for :meth:`CUDAGraph.capture_begin`; by default a new one.
        freeze: Raise :class:`~cgraph.errors.StateError` at any capture into the pool after the
            block, also in a block around it: a server that captures while it serves has a mistake.

    Yields:
        The pool, to be given to each capture.

    Raises:
        CaptureError: The current stream captures.
        ArgumentError: The pool is none.

    >>> import torch, cgraph
    >>> with cgraph.sim.use():
    ...     x = torch.ones(4)
    ...     with cgraph.capture_scope(freeze=True) as pool:
    ...         graphs = [cgraph.CUDAGraph() for _ in range(2)]
    ...         for graph in graphs:
    ...             with cgraph.graph(graph, pool=pool):
    ...                 y = x * 2
    ...     try:
    ...         cgraph.graph(cgraph.CUDAGraph(), pool=pool).__enter__()
    ...     except cgraph.CgraphError as error:
    ...         print(type(error).__name__)
    StateError
    """
    driver = _driver.current()
    if driver.is_capturing():
        raise CaptureError("capture_scope() inside a capture: begin it before the first one")
    pool = driver.pool_handle() if pool is None else pool
    _driver.token(pool)
    with prepared(driver):
        yield pool
    if freeze:
        freeze_pool(pool)


class graph:
    """Capture the work of a ``with`` block into a :class:`CUDAGraph`.

    Args:
        cuda_graph: The graph to capture into.
        pool: As for :meth:`CUDAGraph.capture_begin`.
        stream: The stream to capture on; current inside the block. Default: a side stream of
            cgraph, one per device. It must outlive the graph.
        capture_error_mode: As for :meth:`CUDAGraph.capture_begin`.
        enable_annotations: Record the origin of each node: the scopes of :class:`cgraph.annotate`,
            the module, the operator and the line; see :class:`cgraph.labels.Label`. Works with any
            driver and thread.
        annotation_config: Options of the above, as torch has them; a key or value that torch does
            not know is refused.

            - ``"record_py_stacks"`` (``False``): record all lines of the user's Python instead of
              the innermost one, outermost first.
            - ``"py_stack_filter_paths"`` (``None``): directories whose lines are left out of these,
              instead of those of torch and cgraph; an empty list leaves nothing out.
            - ``"backend"`` (``"auto"``, ``"cupti"``, ``"edge_walk"``) and ``"key_by"``
              (``"exec"``, ``"source"``, ``"auto"``) choose among torch's ways to find nodes and
              to join them with a profiler's records. cgraph has one way, which needs neither CUPTI
              nor a profiler: all values are accepted and do the same.
        check_input_liveness: As for :meth:`CUDAGraph.capture_begin`.

    No garbage collection starts by itself inside the block: it might free CUDA resources, such as a
    graph of torch's, and that ends every capture.

    If the block raises, its exception comes out with the driver's reason as a note, the capture is
    discarded and everything is as before.
    """

    default_capture_stream: ClassVar[Any] = None
    _default_streams: ClassVar[list[Any]] = []
    _of_torch: ClassVar[Any] = None
    """torch's own ``graph`` while torch is patched, for torch's graphs."""

    def __init__(
        self,
        cuda_graph: CUDAGraph,
        pool: Pool | None = None,
        stream: Any = None,
        capture_error_mode: str = "global",
        enable_annotations: bool = False,
        annotation_config: dict[str, Any] | None = None,
        check_input_liveness: bool = False,
    ) -> None:
        self._handed_over: AbstractContextManager[object] | None = None
        handed_over = self._of_torch is not None and _torch.is_torch_graph(cuda_graph)
        if not isinstance(cuda_graph, CUDAGraph) and not handed_over:
            raise ArgumentError(
                f"cuda_graph is {cuda_graph!r}, expected a cgraph.CUDAGraph: torch's own graphs are"
                " captured with torch.cuda.graph"
            )
        _driver.require_mode(capture_error_mode)
        self._label_config = parse_config(annotation_config)
        self.enable_annotations = enable_annotations
        self.cuda_graph = cuda_graph
        self.pool = pool
        self.capture_error_mode = capture_error_mode
        self.check_input_liveness = check_input_liveness
        if handed_over:
            newer = {
                "enable_annotations": enable_annotations,
                "annotation_config": annotation_config,
                "check_input_liveness": check_input_liveness,
            }
            given = {name: value for name, value in newer.items() if value}
            theirs = self._of_torch(cuda_graph, pool, stream, capture_error_mode, **given)
            self._handed_over, self.capture_stream = theirs, theirs.capture_stream
            return
        self._driver, self._number = _driver.current(), _driver.number()
        self.capture_stream = self._default_stream() if stream is None else stream
        self._entered: _Around | None = None
        self._host_calls: HostCalls | None = None
        self._noting: AbstractContextManager[object] | None = None

    def __enter__(self) -> None:
        """Begin the capture."""
        if self._handed_over is not None:
            self._handed_over.__enter__()
            return
        # All possible checks come before the first call that changes anything.
        if _driver.number() != self._number:
            raise ForeignError(
                "the driver in force has changed since this graph(...) was made: make it"
                " where it is entered"
            )
        self.cuda_graph._require_empty()
        if self._driver.is_capturing():
            raise CaptureError(
                "a capture inside another one: captures cannot be nested; end the open one first"
            )
        around = _Around(self._driver.stream(self.capture_stream))
        prepare(self._driver)
        around.__enter__()
        try:
            options = self.cuda_graph._options
            try:
                if self.enable_annotations:
                    recorder = LabelRecorder(self._label_config)
                    self.cuda_graph._options = options._replace(labels=recorder)
                self.cuda_graph.capture_begin(
                    pool=self.pool,
                    capture_error_mode=self.capture_error_mode,
                    check_input_liveness=self.check_input_liveness,
                )
            finally:
                self.cuda_graph._options = options
            if self._driver.device_type == "cpu":
                self._host_calls = HostCalls()
                self._noting = self._host_calls.noted()
                self._noting.__enter__()
        except BaseException as error:
            around.__exit__(type(error), error, error.__traceback__)
            raise
        self._entered = around

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """End the capture; the block's own exception stays the one that is raised."""
        if self._handed_over is not None:
            self._handed_over.__exit__(kind, error, trace)  # type: ignore[arg-type]
            return
        entered, self._entered = self._entered, None
        if entered is None:
            raise StateError("graph.__exit__() without __enter__(): use it in a with statement")
        noting, self._noting = self._noting, None
        if noting is not None:
            noting.__exit__(None, None, None)
        host_calls, self._host_calls = self._host_calls, None
        try:
            if error is not None:
                self.cuda_graph._abandon(error)
            elif host_calls is not None and (refused := host_calls.refusal) is not None:
                self.cuda_graph._abandon(refused)
                raise refused
            else:
                self.cuda_graph.capture_end()
        finally:
            entered.__exit__(None, None, None)

    @classmethod
    def _forget_streams_of(cls, device: object) -> None:
        """Drop the streams that were made for captures on a device."""
        cls._default_streams = [s for s in cls._default_streams if s.device != device]
        if cls.default_capture_stream is not None and cls.default_capture_stream.device == device:
            cls.default_capture_stream = None

    def _default_stream(self) -> Any:
        """Return the class's side stream of the current device, made on first use.

        A stream that the user has set as ``default_capture_stream`` takes precedence.
        """
        cls, device = type(self), self._driver.current_stream().device
        chosen = cls.default_capture_stream
        if chosen is not None and chosen.device == device:
            return chosen
        if "_default_streams" not in vars(cls) or cls.default_capture_stream is None:
            cls._default_streams = []
        for stream in cls._default_streams:
            if stream.device == device:
                break
        else:
            stream = self._driver.new_stream()
            cls._default_streams.append(stream)
        cls.default_capture_stream = stream
        return stream


class _Around:
    """The state around the body of one capture: current stream, collector, autocast's cache."""

    def __init__(self, stream: AbstractContextManager[object]) -> None:
        self._stream = stream
        self._held_off = collections_held_off()

    def __enter__(self) -> None:
        self._stream.__enter__()
        try:
            self._held_off.__enter__()
            # A cast from outside would be freed while the graph reads it, and replays would
            # overwrite one from inside.
            torch.clear_autocast_cache()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise

    def __exit__(self, *error: Any) -> None:
        try:
            torch.clear_autocast_cache()
        finally:
            try:
                self._held_off.__exit__(*error)
            finally:
                self._stream.__exit__(*error)
