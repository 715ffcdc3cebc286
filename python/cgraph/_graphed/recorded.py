"""The products of a capture of a graphed function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from cgraph import _core
from cgraph._graphed.leaf_gradients import LeafGradients
from cgraph._graphed.results import Result
from cgraph._python.assignments import Assigning
from cgraph.segments import SegmentedGraph

if TYPE_CHECKING:
    from cgraph._captures.fresh_results import Results
    from cgraph._debug.periodic_check import PeriodicCheck
    from cgraph._debug.replays import Debugged
    from cgraph._driver import Captured, Handle

__all__ = ["Recorded"]


class Recorded:
    """A captured graph of a function.

    Attributes:
        graph: The graph.
        statics: The tensors that calls are copied to.
        result: The result of the function.
        mutated: The places of the static tensors that the function writes.
        writes: The ends of each piece of memory that it writes and that is not its own.
        takes: The ends of all memory that it works on and that is not its own.
        kept: Memory from outside that it reads, which must stay.
        gradients: The changes to the ``.grad`` of leaves.
        generators: The generators that it draws from, besides the default one.
        frozen: The unguarded tensors that it reads, as text.
        seconds: The time of capture and instantiation together.
        stream: The stream of the capture; None if it shares its pool with no other.
        assign: Assigns what the function does.
        debugged: Replays it for debugging, with tensors for the static ones; None without.
    """

    debugged: Debugged | PeriodicCheck | None = None

    def __init__(
        self,
        graph: SegmentedGraph,
        statics: list[torch.Tensor],
        result: Result,
        seconds: float,
        stream: Any = None,
    ) -> None:
        self.graph = graph
        self.statics = statics
        self.result = result
        self.mutated: list[int] = []
        self.writes: list[tuple[int, int]] = []
        self.takes: list[tuple[int, int]] = []
        self.kept: list[Any] = []
        self.gradients = LeafGradients()
        self.generators: Sequence[torch.Generator] = ()
        self.frozen: tuple[str, ...] = ()
        self.seconds = seconds
        self.stream = stream
        self.assign = Assigning()

    def give_up_results(self) -> None:
        """Let captures to come use the memory of the results, which each replay fills anew."""
        self.result = self.result.unowned(self.pool)

    @property
    def outputs(self) -> list[Any]:
        """The leaves of the function's result."""
        pairs = zip(self.result.leaves, self.result.kinds, strict=True)
        return [self.statics[one] if kind == "argument" else one for one, kind in pairs]

    @property
    def spec(self) -> Any:
        """The specification by which the leaves form the result."""
        return self.result.spec

    @property
    def is_flat_tuple(self) -> bool:
        """True if the result is a tuple of leaves."""
        spec = self.spec
        return spec.type is tuple and spec.num_nodes - 1 == spec.num_leaves == spec.num_children

    @property
    def pool(self) -> Handle:
        """The pool of its memory."""
        return self.graph.pool()

    @property
    def breaks(self) -> tuple[str, ...]:
        """The places where the graph is divided for eager work."""
        return self.graph.breaks

    @property
    def is_running(self) -> bool:
        """True if a replay in segments is under way, of which the caller may be part."""
        return self.graph._is_running

    @property
    def inputs(self) -> _core.Inputs | None:
        """The root nodes that copy to the static tensors; None with breaks."""
        alone = self.graph._alone
        return None if alone is None or alone._captured is None else alone._captured.inputs

    @property
    def _last(self) -> Captured:
        """The capture of the last segment."""
        captured = self.graph.segments[-1]._captured
        assert captured is not None
        return captured

    @property
    def copies(self) -> Results | None:
        """The results that replays copy; None if they copy none."""
        return self._last.results

    @property
    def nodes(self) -> int:
        """Number of nodes of the graph."""
        return self.graph.memory().nodes

    @property
    def memory_bytes(self) -> int:
        """Bytes of the device for its exec."""
        return self.graph.memory().exec or 0

    @property
    def leaves_more(self) -> bool:
        """True if work that the graph cannot do follows each replay."""
        return bool(self.mutated or self.gradients)

    def reset(self) -> None:
        """Drop the graph, and the memory that only its results use."""
        self.graph.reset()
        if self.debugged is not None:
            self.debugged.reset()
            self.debugged = None
        self.kept = []
        self.gradients = LeafGradients()
        self.result = Result([], self.result.spec, [])
