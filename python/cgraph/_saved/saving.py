"""A file of graphs, while it is made: their pools, named tensors and random state."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from cgraph import _core, _driver, _torch
from cgraph._captures.eager_blocks import eager_blocks
from cgraph._saved.memory import OFFSET, SEED, WORD, Memory, Named, note_of
from cgraph._saved.notes import CallNote, GraphNote, Notes, TensorNote
from cgraph.errors import ArgumentError, CgraphError, ForeignError, StateError, add_note

if TYPE_CHECKING:
    from cgraph.cudagraph import CUDAGraph

__all__ = ["NamedMemory", "Saving", "advice_on", "require_savable"]


def require_savable(name: str, graph: CUDAGraph) -> int:
    """Raise unless a graph can be saved; return the number of its device."""
    captured = graph._captured
    if captured is None or not graph._has_template:
        raise StateError(
            f"save() of graph {name!r}, which has no template: capture with"
            " CUDAGraph(keep_graph=True)"
        )
    if graph._driver.device_type != "cuda":
        raise ForeignError(
            f"save() of graph {name!r} of the simulator, whose operators are no kernels: graphs are"
            " saved on a GPU"
        )
    if captured.random_step is not None:
        raise ArgumentError(
            f"graph {name!r} draws random numbers in a way that torch {torch.__version__} does not"
            " show, expected one that draws none, or another torch (2.8 to 2.11)"
        )
    if captured.generators and graph._generators:
        raise ArgumentError(
            f"graph {name!r} draws random numbers and has a generator of its own, expected one that"
            " draws from the device's default generator alone"
        )
    return captured.ordinal


class NamedMemory:
    """The memory of graphs that are captured, by its name.

    Args:
        graphs: The graphs, whose pools get names at once.

    Attributes:
        memory: The memory that has names.
        segments: The bytes of each segment of the pools, by its name.
        blocks: Place and range of each block there that is in use and that no capture has
            allocated.

    Raises:
        StateError: A pool is paused.
    """

    def __init__(self, graphs: Iterable[CUDAGraph]) -> None:
        self.memory = Memory()
        self.blocks = _name_pools(graphs, self.memory)
        self.segments = {name: size for name, _, size in self.memory.ranges}

    def note(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorNote]:
        """Describe tensors; the storages of those outside of pools become named memory."""
        for name, tensor in tensors.items():
            storage = tensor.untyped_storage()
            if self.memory.find(storage.data_ptr()) is None:
                self.memory.add(name, storage.data_ptr(), storage.nbytes(), storage)
        notes = ((name, self.note_there(one)) for name, one in tensors.items())
        # What has no bytes has no place.
        return {
            name: one or note_of(tensors[name], (name, 0), is_given=True) for name, one in notes
        }

    def note_there(self, tensor: torch.Tensor) -> TensorNote | None:
        """Describe a tensor in memory that has a name; None if it lies elsewhere."""
        place = self.memory.find(tensor.untyped_storage().data_ptr())
        if place is None:
            return None
        return note_of(tensor, place, is_given=place[0] not in self.segments)

    def ranges(self, graph: CUDAGraph) -> list[Named]:
        """Return the memory, with the words of the graph's random state if it draws."""
        captured = graph._captured
        assert captured is not None
        words = [
            [(SEED, seed, WORD), (OFFSET, offset, WORD)] for seed, offset in captured.random_words
        ]
        return [*self.memory.ranges, *(one for pair in words for one in pair)]


class Saving:
    """A file of graphs.

    Args:
        ordinal: The number of their device.
        named: Their memory.

    Attributes:
        graphs: The notes of the graphs.
    """

    def __init__(self, ordinal: int, named: NamedMemory) -> None:
        self.graphs: dict[str, GraphNote] = {}
        self._named, self._device = named, _torch.device_of(ordinal)
        self._saved = _core.SavedGraphs(self._device)
        with torch.cuda.device(ordinal):
            _driver.current().synchronize()

    def add(
        self,
        name: str,
        graph: CUDAGraph,
        again: tuple[CUDAGraph, NamedMemory] | None = None,
        call: CallNote | None = None,
    ) -> tuple[int, int]:
        """Add a graph, maybe with a second capture of it, and the calls that it serves.

        Returns:
            How many of its addresses are proven and assumed.
        """
        assert graph._captured is not None
        step = sum(step for _, step in graph._captured.generators)
        other = None if again is None else (again[0]._template, again[1].ranges(again[0]))
        try:
            found = self._saved.add(name, graph._template, self._named.ranges(graph), other)
        except CgraphError as error:
            add_note(error, f"cgraph: graph {name!r} was not saved{advice_on(str(error))}")
            raise
        self.graphs[name] = GraphNote(step, call)
        return found

    def write(
        self, path: str | os.PathLike[str], tensors: dict[str, TensorNote], **also: Any
    ) -> None:
        """Write the file, with the contents of what the graphs count on in their pools.

        Args:
            path: The file.
            tensors: The named tensors.
            also: Other fields of the notes.
        """
        for place, block in self._named.blocks:
            self._saved.add_contents(self._device, place, block)
        now, segments = Notes.versions_now(), self._named.segments
        self._saved.notes = Notes(now, tensors, self.graphs, segments, **also).text()
        self._saved.write(path)


def advice_on(text: str) -> str:
    """Return what to do about an error of these words, as the rest of a sentence."""
    if "of no module" in text:
        return ": call cgraph.record_images() before the first CUDA work of the process"
    if "memory without a name" in text:
        return ": name the tensor that lies there, or the module that has it"
    return ""


def _name_pools(
    graphs: Iterable[CUDAGraph], memory: Memory
) -> list[tuple[tuple[str, int], tuple[int, int]]]:
    found = []
    handles = {(one[0], one[1]): graph for graph in graphs for one in graph.pools()}
    for handle, graph in handles.items():
        pool = graph._driver.mem_pool(handle)
        if pool is not None and pool.is_paused:
            raise StateError(f"save() of graphs in {pool!r}, which is paused: call its resume()")
        state, eager = graph._driver.pool_state(handle), eager_blocks(handle)
        for start, size in sorted(state.segments):
            memory.add(f"<segment {len(memory.ranges)}>", start, size, graph)
        blocks = [one for one in state.blocks if eager is None or one[0] in eager]
        found += [(place, one) for one in blocks if (place := memory.find(one[0]))]
    return found
