"""Graphs in a file: captured in one process, replayed in the next without running the model.

In the process that saves::

    cgraph.record_images()  # before the first CUDA work
    graph = cgraph.CUDAGraph(keep_graph=True)
    with cgraph.graph(graph):
        out = model(x)
    cgraph.save("decode.cgraph", {"decode": graph}, {"model": model, "x": x, "out": out})

In the next one::

    loaded = cgraph.load("decode.cgraph", {"model": model, "x": x})
    loaded.graphs["decode"].replay()
    print(loaded.tensors["out"])
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from cgraph import _torch
from cgraph._driver import Handle
from cgraph._saved.kernels import Kernels
from cgraph._saved.memory import Given, named_tensors
from cgraph._saved.saving import NamedMemory, Saving, require_savable
from cgraph._text import in_units, table
from cgraph.cudagraph import CUDAGraph
from cgraph.errors import ArgumentError, ForeignError
from cgraph.mempool import MemPool

Graphs: TypeAlias = "Mapping[str, CUDAGraph]"
"""Graphs by their names."""

__all__ = [
    "FileReport",
    "Kernels",
    "LoadedGraphs",
    "load",
    "load_kernels",
    "record_images",
    "save",
]


@dataclass(frozen=True)
class FileReport:
    """The numbers of a file that was saved or loaded.

    Attributes:
        path: The file.
        size: Its bytes.
        nodes: The number of nodes of each graph.
        addresses: For each graph, how many addresses a second capture has proven, and how many are
            assumed; empty after a load.
        pools: Bytes of the memory that the graphs have for themselves.
        seconds: How long each part took.
    """

    path: str
    size: int
    nodes: dict[str, int]
    addresses: dict[str, tuple[int, int]]
    pools: int
    seconds: dict[str, float]

    def __str__(self) -> str:
        """Return the numbers as a table, and the bytes and seconds."""
        rows = [
            [name, str(count), *map(str, self.addresses.get(name, ("", "")))]
            for name, count in self.nodes.items()
        ]
        parts = ", ".join(f"{name} {spent * 1e3:.0f} ms" for name, spent in self.seconds.items())
        text = f"{self.path}: {in_units(self.size)}, pools {in_units(self.pools)}; {parts}"
        return f"{table(['graph', 'nodes', 'proven', 'assumed'], rows)}\n{text}"


@dataclass(frozen=True)
class LoadedGraphs:
    """The graphs of a file.

    Attributes:
        graphs: The graphs by name; they can be replayed at once.
        tensors: The named tensors that lie in the graphs' own memory, as results.
        report: What was loaded, and how long it took.
    """

    graphs: dict[str, CUDAGraph]
    tensors: dict[str, torch.Tensor]
    report: FileReport


def record_images(*, unless: str | os.PathLike[str] | None = None) -> None:
    """Keep the machine code of all kernels that the process loads from now on, for :func:`save`.

    Call it before the first CUDA work: what was loaded before cannot be saved. It uses CUPTI, which
    serves one user at a time: profilers find it taken in this process.

    Args:
        unless: Do nothing if this file is there: it is to be loaded, and nothing saved.

    Raises:
        TorchError: CUPTI is not installed.
        CgraphError: A profiler uses it.
    """
    if unless is None or not os.path.exists(unless):
        _torch.record_images()


def save(
    path: str | os.PathLike[str],
    graphs: CUDAGraph | Graphs,
    names: Given,
    *,
    again: tuple[CUDAGraph | Graphs, Given] | None = None,
) -> FileReport:
    """Write graphs to a file, with the kernels that they launch, for :func:`load`.

    The file is good for processes with the same GPU model, driver, torch and cgraph. The graphs'
    own memory, their pools, comes with it; all other memory that they use must have a name, and is
    given again under that name.

    Args:
        path: The file, which only its owner may read. One that is there is replaced at once.
        graphs: Graphs that keep their templates (``keep_graph=True``), by name; one alone is called
            ``"graph"``.
        names: Tensors, and modules for their parameters and buffers. Name results as well: those
            in the graphs' pools come back from :func:`load`.
        again: The same graphs and names from a second capture, in another pool and with other
            tensors. A word among the arguments of a kernel is then an address only if it moved with
            its memory; without it, if it lies in memory that has a name.

    Raises:
        ArgumentError: A graph has a node that cannot be saved, or names memory without a name.
        StateError: A graph has no template, or its pool is paused.
        ForeignError: A graph of the simulator, or graphs of several devices.
        CgraphError: The file cannot be written.
    """
    began = time.perf_counter()
    first, second = _by_name(graphs), None
    ordinal = _device_of(first)
    named = NamedMemory(first.values())
    saving = Saving(ordinal, named)
    tensors = named.note(named_tensors(names, ordinal))
    if again is not None:
        second = _by_name(again[0])
        _device_of(second)
        others = NamedMemory(second.values())
        others.note(named_tensors(again[1], ordinal))
        if list(second) != list(first):
            raise ArgumentError(f"again has graphs {list(second)}, expected {list(first)}")
    found = {}
    for name, graph in first.items():
        other = None if second is None else (second[name], others)
        found[name] = saving.add(name, graph, other)
    saving.write(path, tensors)
    nodes = {name: graph._nodes for name, graph in first.items()}
    seconds = {"saved in": time.perf_counter() - began}
    size, pools = os.stat(path).st_size, sum(named.segments.values())
    return FileReport(os.fspath(path), size, nodes, found, pools, seconds)


def load_kernels(path: str | os.PathLike[str]) -> Kernels:
    """Begin to read a file and to load its kernels, which needs no tensors, and return at once.

    :func:`load` takes the result in place of the path, and raises what went wrong. Call this before
    weights are loaded: it is the longer half of a load.

    Args:
        path: The file.
    """
    return Kernels(path)


def load(
    path: str | os.PathLike[str] | Kernels,
    names: Given,
    *,
    pool: MemPool | CUDAGraph | Handle | None = None,
    instantiate: bool = True,
) -> LoadedGraphs:
    """Read graphs that :func:`save` has written; nothing is run and nothing is captured.

    The file's kernels run with the rights of this process: load files of your own. A file that
    somebody else may have changed is refused.

    Args:
        path: The file, or the result of :func:`load_kernels` for it.
        names: The tensors and modules that were named outside of the graphs' pools, with the same
            shapes, types and strides, on the current device. The graphs keep them alive and use
            them where they are.
        pool: The pool of cgraph's for the graphs' own memory, as for a capture; by default a new
            one.
        instantiate: Make all graphs executable now, by several threads. Without it each one is
            when it is first replayed, and keeps its template, as with ``keep_graph=True``.

    Returns:
        The graphs, and the tensors in their own memory.

    Raises:
        ArgumentError: A tensor is missing or unlike the saved one, or the file is for another GPU,
            driver or torch.
        ForeignError: Another device is current than at :func:`load_kernels`.
        CgraphError: The file is damaged, or not this user's.
        torch.OutOfMemoryError: There is no room for the graphs' own memory.
    """
    kernels = path if isinstance(path, Kernels) else Kernels(path)
    opened = kernels._opened()
    began, notes = time.perf_counter(), opened.notes
    given = named_tensors(names, opened.require_current())
    wanted = (name for name, one in notes.tensors.items() if one.is_given)
    if missing := [name for name in wanted if name not in given]:
        raise ArgumentError(f"names lacks {', '.join(missing)}, as saved: give them, too")
    loading = opened.loading(kernels.path, MemPool() if pool is None else MemPool.of(pool))
    try:
        loading.bind(given)
        loading.ahead(notes.graphs)
        graphs = {name: loading.graph(name, keeps=not instantiate) for name in notes.graphs}
        for graph in graphs.values() if instantiate else ():
            loading.begin_instantiate(graph)
        loading.finish()
    finally:
        loading.close()
    own = {name: one for name, one in notes.tensors.items() if not one.is_given}
    tensors = {name: loading.tensor(note) for name, note in own.items()}
    nodes = {name: graph._nodes for name, graph in graphs.items()}
    seconds = {**opened.seconds, "graphs": time.perf_counter() - began}
    own_bytes = sum(notes.pools.values())
    report = FileReport(kernels.path, opened.size, nodes, {}, own_bytes, seconds)
    return LoadedGraphs(graphs, tensors, report)


def _by_name(graphs: CUDAGraph | Graphs) -> dict[str, CUDAGraph]:
    return {"graph": graphs} if isinstance(graphs, CUDAGraph) else dict(graphs)


def _device_of(graphs: Graphs) -> int:
    """Return the number of the device of graphs that can be saved."""
    ordinals = {require_savable(name, graph) for name, graph in graphs.items()}
    if len(ordinals) != 1:
        raise ForeignError(f"graphs of {len(ordinals)} devices, expected those of one")
    return ordinals.pop()
