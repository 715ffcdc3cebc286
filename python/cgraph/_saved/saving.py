"""What a file of graphs is made from: their pools, named tensors and random state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from cgraph import _core
from cgraph._saved.memory import OFFSET, SEED, WORD, Memory, note_of
from cgraph._saved.notes import GraphNote, TensorNote
from cgraph.errors import ArgumentError, CgraphError, ForeignError, StateError, add_note

if TYPE_CHECKING:
    import torch

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
    if captured.random_step is not None or (captured.generators and graph._generators):
        raise ArgumentError(
            f"graph {name!r} draws random numbers from a generator of its own, expected one that"
            " draws from the device's default generator alone"
        )
    return captured.ordinal


def pools_of(
    graphs: Iterable[CUDAGraph], memory: Memory
) -> list[tuple[tuple[str, int], tuple[int, int]]]:
    """Name the segments of all pools; return the place and range of each block that is alive there.

    Raises:
        StateError: A pool is paused.
    """
    found = []
    handles = {(one[0], one[1]): graph for graph in graphs for one in graph.pools()}
    for handle, graph in handles.items():
        pool = graph._driver.mem_pool(handle)
        if pool is not None and pool.is_paused:
            raise StateError(f"save() of graphs in {pool!r}, which is paused: call its resume()")
        state = graph._driver.pool_state(handle)
        for start, size in state.segments:
            memory.add(f"<segment {len(memory.ranges)}>", start, size, graph)
        found += [(place, one) for one in state.blocks if (place := memory.find(one[0]))]
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
    saved: _core.SavedGraphs, name: str, graph: CUDAGraph, memory: Memory
) -> tuple[int, GraphNote]:
    """Add a graph; return the number of its addresses, and its note."""
    captured = graph._captured
    assert captured is not None
    ranges, step = memory.ranges, 0
    if captured.generators:
        [(_, step)], [(seed, offset)] = captured.generators, captured.random_words
        ranges = [*ranges, (SEED, seed, WORD), (OFFSET, offset, WORD)]
    try:
        return saved.add(name, graph._template, ranges), GraphNote(step)
    except CgraphError as error:
        add_note(error, f"cgraph: graph {name!r} was not saved{_advice(str(error))}")
        raise


def _advice(text: str) -> str:
    if "of no module" in text:
        return ": call cgraph.record_images() before the first CUDA work of the process"
    if "memory without a name" in text:
        return ": name the tensor that lies there, or the module that has it"
    return ""
