"""What a capture of a graphed function has made."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from cgraph import _core, _torch
from cgraph._state.gradients import Gradients
from cgraph._state.holders import Holder
from cgraph.cudagraph import CUDAGraph
from cgraph.segments import SegmentedGraph

if TYPE_CHECKING:
    from cgraph._captures.footprint import Footprint
    from cgraph._driver import Handle
    from cgraph._functions.debug.replays import Debugged

__all__ = ["Recorded", "numbered"]


class Recorded:
    """A captured graph of a function.

    Attributes:
        graph: The graph.
        statics: The tensors that calls are copied to.
        outputs: The leaves of what the function returned.
        spec: How they are put together.
        mutated: The places of the static tensors that the function writes.
        writes: The ends of each piece of memory that it writes and that is not its own.
        in_place: The numbers of the storages of arguments that are read where they lie.
        outside: Other memory that it reads and that nobody follows, as a table in a cache that may
            drop it: it is not to go.
        seconds: What warm-up, capture and instantiation took together.
        eager_seconds: One call without a graph; None if it was not measured.
        graph_seconds: One replay, likewise.
        has_added_hooks: Whether a hook was added to something during the capture.
        gradients: What becomes of the ``.grad`` of leaves.
        used: Where those of the tensors are that the function may find which the graph uses.
        reads: Where numbers, texts and functions are that it reads, and that breaks do not change.
        states: Where the states and settings of optimizers are that step in it.
        neighbours: The graphs of the same pool, and the number of this one among them.
        debugged: What replays it instead, with tensors for the static ones; None without debugging.
    """

    debugged: Debugged | None = None

    def __init__(
        self,
        graph: CUDAGraph | SegmentedGraph,
        statics: list[torch.Tensor],
        outputs: list[Any],
        spec: Any,
        neighbours: tuple[_core.Neighbours, int] | None = None,
    ) -> None:
        self.graph = graph
        self.statics = statics
        self.outputs, self.spec = outputs, spec
        self.mutated: list[int] = []
        self.writes: list[tuple[int, int]] = []
        self.in_place: set[int] = set()
        self.outside: list[torch.UntypedStorage] = []
        self.gradients = Gradients([])
        self.used: list[Holder] = []
        self.reads: list[Holder] = []
        self.states: list[Holder] = []
        # A number of its capture's, where others may have come since.
        self.neighbours = neighbours or numbered(tuple(graph.pool()))
        self.has_added_hooks = False
        self.seconds = 0.0
        self.eager_seconds: float | None = None
        self.graph_seconds: float | None = None
        self._storages: dict[int, _core.Storage] = {}

    @property
    def device(self) -> torch.device | None:
        """The device of the tensors; None if there are none."""
        tensors = [one for one in (*self.statics, *self.outputs) if isinstance(one, torch.Tensor)]
        return next((one.device for one in tensors if one.device.type != "cpu"), None) or next(
            (one.device for one in tensors), None
        )

    @property
    def is_flat_tuple(self) -> bool:
        """Whether the result is a tuple of leaves."""
        return self.spec.type is tuple and all(one.is_leaf() for one in _children(self.spec))

    def feed(self) -> Callable[[tuple[Any, ...]], None]:
        """What replays with tensors for the static ones."""
        if self.statics:
            return self.graph._feeder()
        return lambda _: self.graph.replay()

    def storage(self, tensor: torch.Tensor) -> _core.Storage:
        """The storage of an output, the same object for all outputs that lie in it."""
        number = _torch.storage_id(tensor.untyped_storage())
        if number not in self._storages:
            self._storages[number] = _torch.storage_of(tensor)
        return self._storages[number]

    @property
    def pool(self) -> Handle:
        """The pool of its memory."""
        return self.graph.pool()

    @property
    def breaks(self) -> tuple[str, ...]:
        """Where the graph is broken up for eager work."""
        return self.graph.breaks if isinstance(self.graph, SegmentedGraph) else ()

    @property
    def is_running(self) -> bool:
        """Whether a replay in segments is under way, of which the asker may be part."""
        return isinstance(self.graph, SegmentedGraph) and self.graph._is_running

    @property
    def whole(self) -> CUDAGraph:
        """The graph of a function without breaks."""
        assert isinstance(self.graph, CUDAGraph)
        return self.graph

    @property
    def inputs(self) -> _core.Inputs | None:
        """The root nodes that copy to the static tensors; None on the simulator and with breaks."""
        captured = self.graph._captured if isinstance(self.graph, CUDAGraph) else None
        return None if captured is None else captured.inputs

    @property
    def footprint(self) -> Footprint | None:
        """What the capture did to its pool; None with breaks."""
        captured = self.graph._captured if isinstance(self.graph, CUDAGraph) else None
        return None if captured is None else captured.footprint

    @property
    def is_waiting(self) -> bool:
        """Whether the graph is whole and has no exec."""
        return isinstance(self.graph, CUDAGraph) and not self.graph._has_exec

    @property
    def is_kept(self) -> bool:
        """Whether the graph can do without its exec, as it has a template to make it from."""
        graph = self.graph
        # One that is being finished has a template that is about to go.
        return isinstance(graph, CUDAGraph) and graph._keep_graph and graph._has_template

    def drop_exec(self) -> None:
        """Let the exec of a graph go that is kept."""
        self.whole._drop_exec()

    def instantiate(self) -> float:
        """Make it again; the seconds that it took."""
        began = time.perf_counter()
        self.whole.instantiate()
        return time.perf_counter() - began

    @property
    def nodes(self) -> int:
        """How many nodes the graph has."""
        return self.graph.memory().nodes

    @property
    def memory_bytes(self) -> int:
        """Bytes of the device that the graph holds in its pool and for its exec."""
        memory = self.graph.memory()
        return memory.held + memory.exec

    def reset(self) -> None:
        """Let the graph go, and the memory that only its outputs use."""
        self.graph.reset()
        if self.debugged is not None:
            self.debugged.reset()
            self.debugged = None
        self._storages.clear()
        self.outputs, self.outside = [], []
        self.gradients = Gradients([])

    @property
    def leaves_more(self) -> bool:
        """Whether a replay is followed by what its graph cannot do."""
        return bool(self.mutated or self.gradients)

    def argument(self, output: object) -> int | None:
        """The place of the argument that an output is itself."""
        places = (place for place, static in enumerate(self.statics) if static is output)
        return next(places, None)


_neighbours: weakref.WeakValueDictionary[tuple[int, ...], _core.Neighbours] = (
    weakref.WeakValueDictionary()
)


def numbered(pool: tuple[int, ...]) -> tuple[_core.Neighbours, int]:
    """The graphs of a pool, and the number of one that was captured just now."""
    neighbours = _neighbours.get(pool)
    if neighbours is None:
        # Another thread may have made them meanwhile.
        neighbours = _neighbours.setdefault(pool, _core.Neighbours())
    return neighbours, neighbours.number()


def _children(spec: Any) -> list[Any]:
    """What a specification of torch's consists of; newer torch has another name for it."""
    specs: list[Any] = (
        spec.children() if callable(getattr(spec, "children", None)) else spec.children_specs
    )
    return specs
