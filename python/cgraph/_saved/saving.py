"""The parts of a file of graphs: their pools, named tensors and random state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch

from cgraph import _core
from cgraph._captures.eager_blocks import eager_blocks
from cgraph._saved.memory import OFFSET, SEED, WORD, Memory, Named, note_of
from cgraph._saved.notes import GraphNote, TensorNote
from cgraph.errors import ArgumentError, CgraphError, ForeignError, StateError, add_note

if TYPE_CHECKING:
    from cgraph.cudagraph import CUDAGraph

__all__ = ["add_graph", "noted", "pools_of", "require_savable"]


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


def pools_of(
    graphs: Iterable[CUDAGraph], memory: Memory
) -> list[tuple[tuple[str, int], tuple[int, int]]]:
    """Name the segments of all pools.

    Returns:
        Place and range of each block there that is in use and that no capture has allocated.

    Raises:
        StateError: A pool is paused.
    """
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


def noted(tensors: Mapping[str, torch.Tensor], memory: Memory) -> dict[str, TensorNote]:
    """Describe named tensors; the storages of those outside of pools become named memory."""
    notes = {}
    pools = {name for name, _, _ in memory.ranges}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        place = memory.find(start)
        if place is None:
            place = name, 0
            memory.add(name, start, storage.nbytes(), storage)
        offset = place[1] + int(tensor.storage_offset()) * tensor.element_size()
        notes[name] = note_of(tensor, (place[0], offset), is_given=place[0] not in pools)
    return notes


def add_graph(
    saved: _core.SavedGraphs,
    name: str,
    first: tuple[CUDAGraph, Memory],
    again: tuple[CUDAGraph, Memory] | None,
) -> tuple[tuple[int, int], GraphNote]:
    """Add a graph, maybe with a second capture of it.

    Returns:
        How many of its addresses are proven and assumed, and its note.
    """
    graph = first[0]
    assert graph._captured is not None
    step = sum(step for _, step in graph._captured.generators)
    other = None if again is None else (again[0]._template, _ranges(*again))
    try:
        return saved.add(name, graph._template, _ranges(*first), other), GraphNote(step)
    except CgraphError as error:
        add_note(error, f"cgraph: graph {name!r} was not saved{_advice(str(error))}")
        raise


def _ranges(graph: CUDAGraph, memory: Memory) -> list[Named]:
    """Return named memory, with the words of the graph's random state if it draws."""
    captured = graph._captured
    assert captured is not None
    words = [[(SEED, seed, WORD), (OFFSET, offset, WORD)] for seed, offset in captured.random_words]
    return [*memory.ranges, *(one for pair in words for one in pair)]


def _advice(text: str) -> str:
    if "of no module" in text:
        return ": call cgraph.record_images() before the first CUDA work of the process"
    if "memory without a name" in text:
        return ": name the tensor that lies there, or the module that has it"
    return ""
