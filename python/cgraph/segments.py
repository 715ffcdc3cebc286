"""``SegmentedGraph``: a function with breaks as several graphs, replayed by one native call.

See :func:`cgraph.eager_break` for an example.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from cgraph import _core, _driver, _torch
from cgraph._breaks.inner_flows import InnerFlow
from cgraph._breaks.outer_flows import OuterFlow
from cgraph._breaks.sessions import Break, Session
from cgraph._captures.capture_scopes import prepare
from cgraph._captures.collector import collections_held_off
from cgraph._captures.fresh_results import fresh_of
from cgraph._captures.turns import Turn
from cgraph._driver import Handle, Pool
from cgraph._operators.snapshots import RandomSnapshot
from cgraph._text import plural
from cgraph.breaks import breakable, on_one_thread
from cgraph.cudagraph import CUDAGraph
from cgraph.errors import CaptureError, StateError
from cgraph.graphs import graph
from cgraph.ledger import GraphMemory, living, of_graph

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["SegmentedGraph"]

R = TypeVar("R")


def _none(result: object) -> Sequence[torch.Tensor]:
    """Return no tensor of a result."""
    return ()


class SegmentedGraph(_core.Segments):
    """Graphs of one pool, and the breaks between them; made by :meth:`capture`.

    Attributes:
        segments: The graphs in order. Segments that a break left empty are missing.
        breaks: The breaks in order, each as its name and the line that called it.
        bridge_bytes: Bytes of memory that results of breaks are copied into. A break that writes
            into an argument and returns None needs none.

    Replays run in the order of the calls, and never two at the same time.
    """

    segments: tuple[CUDAGraph, ...]
    breaks: tuple[str, ...]
    bridge_bytes: int
    _order: tuple[CUDAGraph | str, ...]
    """The graphs and the names of the breaks, in the order of a replay."""

    def __new__(cls, steps: Sequence[Any]) -> Self:
        """Take graphs and breaks in order; :meth:`capture` makes them."""
        native = [step.native() if isinstance(step, Break) else step for step in steps]
        self = super().__new__(cls, native, _torch.mode_functions())
        self.segments = tuple(step for step in steps if isinstance(step, CUDAGraph))
        breaks = [step for step in steps if isinstance(step, Break)]
        self._order = tuple(step.title if isinstance(step, Break) else step for step in steps)
        self.breaks = tuple(step.title for step in breaks)
        self.bridge_bytes = sum(step.bridge_bytes for step in breaks)
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
        keep_graph: bool = False,
        enable_annotations: bool = False,
    ) -> tuple[SegmentedGraph, R]:
        """Run a function once, and capture all of it except its breaks.

        Each segment is replayed as soon as it ends, so that a break finds real values, and the
        result is valid at the return. Later, :meth:`replay` writes to the same tensors.

        Args:
            body: Called without arguments. As for any capture, call it once before if its first
                call sets something up.
            pool: As for :class:`cgraph.graph`, for all segments.
            stream: As for :class:`cgraph.graph`.
            capture_error_mode: As for :class:`cgraph.graph`.
            statics: Tensors that :meth:`replay_with` copies to before the first segment.
            generators: Generators that random numbers are drawn from besides the default one.
            keep_graph: Keep the templates of the segments, for :func:`cgraph.view`.
            enable_annotations: As for :class:`cgraph.graph`, for all segments.

        Returns:
            The segments and the function's result.

        Raises:
            CaptureError: A capture is open, the function cannot be captured, or it went on after a
                break had failed.

        Side streams that a break finds in the capture are joined there, and go on in the next
        segment. If the function or a break raises, the exception comes out, and stream, allocator
        and random state are as before; earlier writes of the segments remain.
        """
        session = cls._session(pool, stream, capture_error_mode, generators)
        session.keeps, session.annotates = keep_graph, enable_annotations
        return cls._made(session, body, statics)

    @classmethod
    def _with_results(
        cls,
        body: Callable[[], R],
        results: Callable[[R], Sequence[torch.Tensor]],
        *,
        pool: Pool,
        stream: Any,
        statics: Sequence[torch.Tensor],
        runs: bool = True,
        keeps: bool = False,
    ) -> tuple[SegmentedGraph, R]:
        """Capture as :meth:`capture`, with results for :meth:`_replay_fresh`.

        Where gradients are disabled, none get back through breaks. Unless it ``runs``, there may be
        no breaks, and the first replay computes the result. Templates stay if it ``keeps`` them.
        """
        flow = InnerFlow if torch.is_grad_enabled() else None
        session = cls._session(pool, stream, "thread_local", (), flow, runs=runs)
        session.keeps = keeps
        return cls._made(session, body, statics, results)

    @classmethod
    def _session(
        cls,
        pool: Pool | None,
        stream: Any,
        capture_error_mode: str,
        generators: Sequence[torch.Generator],
        flow: type[InnerFlow] | None = InnerFlow,
        *,
        runs: bool = True,
    ) -> Session:
        """Return a capture that has not begun."""
        _driver.require_mode(capture_error_mode)
        if _driver.current().is_capturing():
            raise CaptureError(
                "SegmentedGraph.capture() inside a capture: captures cannot be nested; end the"
                " open one first"
            )
        stream = graph(CUDAGraph()).capture_stream if stream is None else stream
        pool = _driver.current().pool_handle() if pool is None else pool
        return Session(stream, pool, capture_error_mode, generators, flow, runs=runs, gives_up=True)

    @classmethod
    def _forward(
        cls,
        body: Callable[[], R],
        *,
        pool: Pool,
        stream: Any,
        capture_error_mode: str,
        statics: Sequence[torch.Tensor],
    ) -> tuple[SegmentedGraph, R, tuple[OuterFlow, ...]]:
        """Capture as :meth:`capture`, with breaks that gradients get back through.

        Returns:
            The segments, the function's result, and its breaks where gradients are recorded, for
            :meth:`_backward`.
        """
        session = Session(stream, pool, capture_error_mode, (), OuterFlow)
        made, result = cls._made(session, body, statics)
        return made, result, tuple(one for one in session.flows if isinstance(one, OuterFlow))

    @classmethod
    def _backward(
        cls,
        body: Callable[[], R],
        flows: Sequence[OuterFlow],
        *,
        pool: Pool,
        stream: Any,
        capture_error_mode: str,
        statics: Sequence[torch.Tensor],
    ) -> tuple[SegmentedGraph, R]:
        """Capture the backward pass of a result of :meth:`_forward`, without running it.

        The saved tensors of the forward pass are read only later.

        Args:
            body: Called without arguments, as for :meth:`capture`.
            flows: The flows that :meth:`_forward` has returned.
            pool: As for :meth:`capture`.
            stream: As for :meth:`capture`.
            capture_error_mode: As for :meth:`capture`.
            statics: As for :meth:`capture`.
        """
        session = Session(stream, pool, capture_error_mode, (), runs=False)
        for flow in flows:
            flow.divides = session
        try:
            return cls._made(session, body, statics)
        finally:
            for flow in flows:
                flow.divides = None

    @classmethod
    def _made(
        cls,
        session: Session,
        body: Callable[[], R],
        statics: Sequence[torch.Tensor],
        results: Callable[[R], Sequence[torch.Tensor]] = _none,
    ) -> tuple[SegmentedGraph, R]:
        """Run and capture a function.

        Args:
            session: The capture, which has not begun.
            body: The function.
            statics: As for :meth:`capture`.
            results: Returns the tensors of the function's result that :meth:`_replay_fresh` copies
                to new memory.
        """
        driver, stream = session.driver, session.stream
        before = driver.current_stream()
        context = driver.stream(stream)
        with Turn(driver, waits=True):
            prepare(driver, waits=True)
            ordinal = stream.device_index if driver.device_type == "cuda" else None
            random = RandomSnapshot(session.generators, ordinal)
            try:
                with (
                    context,
                    collections_held_off(),
                    session.forks.watched(),
                    _torch.without_autocast_cache(),
                    breakable(session),
                ):
                    session.begin(statics)
                    with on_one_thread():
                        result = body()
                    made = cls(session.finish(results(result)))
                    session.close()
                _wait(before, stream)
            except BaseException as error:
                try:
                    session.fail(error)
                finally:
                    random.put_back()
                    with suppress(RuntimeError):  # segments may be under way
                        _wait(before, stream)
                raise
            return made, result

    def __repr__(self) -> str:
        """Return how many segments and breaks there are."""
        if not self.segments:
            return "<cgraph.SegmentedGraph: nothing captured>"
        parts = f"{plural(len(self.segments), 'segment')}, {plural(len(self.breaks), 'break')}"
        return f"<cgraph.SegmentedGraph: {parts}>"

    def pool(self) -> Handle:
        """Return the token of the memory pool of all segments."""
        return self._require("pool()")[0].pool()

    def memory(self) -> GraphMemory:
        """Return the memory of all segments together; shared workspaces count once.

        On CUDA the last segment alone has the bytes of all, unless ``record_memory`` is on.
        """
        segments = self._require("memory()")
        others = living(segments[0]._driver)
        found = [of_graph(one, others) for one in segments]
        names = {one.name for one in found}
        return replace(
            found[0],
            name=found[0].name if len(found) == 1 else f"{found[0].name} to {found[-1].name}",
            reserved=sum(one.reserved or 0 for one in found),
            peak=max((one.peak for one in found if one.peak is not None), default=None),
            held=sum(one.held or 0 for one in found),
            workspace=max(one.workspace or 0 for one in found),
            exec=sum(one.exec or 0 for one in found),
            host=sum(one.host for one in found),
            nodes=sum(one.nodes for one in found),
            seconds=sum(one.seconds for one in found),
            shares_with=tuple(name for name in found[0].shares_with if name not in names),
            timeline=found[0].timeline if len(found) == 1 else None,
        )

    def reset(self) -> None:
        """Drop all segments and breaks; a replay is refused from then on."""
        segments, self.segments, self.breaks = self.segments, (), ()
        self.bridge_bytes, self._order = 0, ()
        self._clear()
        with ExitStack() as resets:
            for one in segments:
                resets.callback(one.reset)

    def replay_with(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """Replay, with each tensor copied into its static input before the first segment.

        Args:
            tensors: One for each of the ``statics`` of the capture, of the same shape.

        Raises:
            ArgumentError: There are more or fewer, or one is of another shape.
            StateError: Nothing was captured, or it was reset.
        """
        self._replay_with(tensors)

    @property
    def _alone(self) -> CUDAGraph | None:
        """The only segment, if there is no break either."""
        return self.segments[0] if len(self.segments) == 1 and not self.breaks else None

    def _replay_fresh(self, tensors: tuple[torch.Tensor, ...] = ()) -> list[torch.Tensor]:
        """Replay with tensors in place of static inputs; return new tensors like the results."""
        last = self._require("a replay with new results")[-1]
        return self._replay_made(fresh_of(last._captured), tensors)

    def _require(self, what: str) -> tuple[CUDAGraph, ...]:
        if not self.segments:
            raise StateError(f"{what} after reset(): capture again")
        return self.segments


def _wait(stream: Any, other: Any) -> None:
    """Let a stream wait for another one."""
    if stream != other:
        stream.wait_stream(other)
