"""Graphs built from a file, with memory of their own and memory that was given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from cgraph import _core, _driver, _torch
from cgraph._captures import cuda_pools
from cgraph._captures.footprint import Footprint, is_weighing
from cgraph._captures.fresh_results import Results
from cgraph._driver import Captured
from cgraph._saved.memory import OFFSET, SEED, WORD, Memory, require_like, tensor_over
from cgraph._saved.notes import Notes, TensorNote
from cgraph.cudagraph import CUDAGraph
from cgraph.errors import ArgumentError
from cgraph.mempool import MemPool

__all__ = ["Loading"]

_THREADS = 8
"""The driver builds graphs and execs side by side; more threads than this do not help."""


class Loading:
    """The graphs of a file, while they are built.

    Args:
        kernels: The file's graphs, with their kernels loaded.
        notes: The file's notes.
        ordinal: The number of the device.
        pool: The pool for the graphs' own memory, which is allocated at once.
        path: The file, in reports.

    Attributes:
        segments: The bytes of each segment of that memory, by its name.
    """

    def __init__(
        self, kernels: _core.SavedKernels, notes: Notes, ordinal: int, pool: MemPool, path: str
    ) -> None:
        self._kernels, self._notes, self._ordinal, self._pool = kernels, notes, ordinal, pool
        self._path, self._driver = path, _driver.current()
        self._handle = cuda_pools.handle_of(pool.id)
        pools = self._driver.mem_pools()
        self._others = [one._core for one in pools if one is not pool]
        self._memory = Memory()
        self._given: dict[str, torch.UntypedStorage] = {}
        self.segments: dict[str, torch.Tensor] = {}
        self._allocate()

    def bind(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take tensors that were given, which are to be like those that were saved.

        Raises:
            ArgumentError: One is not.
        """
        notes = self._notes.tensors
        for name in notes.keys() & tensors.keys():
            if not notes[name].is_given:
                raise ArgumentError(
                    f"{name} was given, and lies in the graphs' own memory: use the result's"
                    f" tensors[{name!r}] in its place"
                )
        for name, note in notes.items():
            if name not in tensors:
                continue
            require_like(name, tensors[name], note)
            storage = tensors[name].untyped_storage()
            if (known := self._given.get(note.memory)) is None:
                self._given[note.memory] = storage
                self._memory.add(note.memory, storage.data_ptr(), note.size, storage)
            elif known.data_ptr() != storage.data_ptr():
                raise ArgumentError(
                    f"{name} has a storage of its own, expected that of {note.memory}, as saved"
                )

    def tensor(self, note: TensorNote) -> torch.Tensor:
        """Return a tensor over the memory of the graphs, or over that of a given tensor."""
        if note.is_given:
            return tensor_over(self._given[note.memory], 0, note)
        memory = self.segments[note.memory]
        return tensor_over(memory.untyped_storage(), int(memory.storage_offset()), note)

    def graphs(self, names: Iterable[str], *, keeps: bool = False) -> dict[str, CUDAGraph]:
        """Build graphs; each keeps all memory alive. They are not instantiated."""
        names = list(names)
        with self._threads() as threads:
            templates = list(threads.map(self._template, names))
        return {
            name: self._graph(name, template, (), (), keeps=keeps)
            for name, template in zip(names, templates, strict=True)
        }

    def graph(
        self,
        name: str,
        statics: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        *,
        keeps: bool,
    ) -> CUDAGraph:
        """Build one graph, which copies to static inputs and copies results to new tensors."""
        return self._graph(name, self._template(name), statics, results, keeps=keeps)

    def instantiate(self, graphs: Sequence[CUDAGraph]) -> None:
        """Instantiate graphs and drop their templates."""
        measures = is_weighing()
        with self._threads() as threads:
            # All of them, or the error of the first that fails.
            for _ in threads.map(lambda graph: graph._instantiate(measures), graphs):
                pass
        for graph in graphs:
            graph._run_hooks("instantiate")
            graph.capture_end_post()

    def _threads(self) -> ThreadPoolExecutor:
        # What is measured must be all that happens meanwhile.
        return ThreadPoolExecutor(1 if is_weighing() else _THREADS)

    def _template(self, name: str) -> tuple[_core.Template, list[int]]:
        """Build a template; return it with the addresses of its random state, if it draws."""
        ranges, owners = self._memory.ranges, list(self._memory.owners)
        words: list[int] = []
        if self._notes.graphs[name].step:
            # As far apart as torch's allocator puts them.
            state = torch.empty(128, dtype=torch.int64, device=self._ordinal)
            words = [state.data_ptr(), state[64:].data_ptr()]
            ranges = [*ranges, (SEED, words[0], WORD), (OFFSET, words[1], WORD)]
            owners.append(state)
        template = self._kernels.template(name, ranges, owners)
        template.retain_pool(self._pool._core)
        if self._others:
            template.require_named(self._others)
        return template, words

    def _graph(
        self,
        name: str,
        built: tuple[_core.Template, list[int]],
        statics: Sequence[torch.Tensor],
        fresh: Sequence[torch.Tensor],
        *,
        keeps: bool,
    ) -> CUDAGraph:
        """Return a graph of a template, which is live."""
        (template, words), step = built, self._notes.graphs[name].step
        inputs = results = outputs = None
        generators = []
        if words or statics:
            inputs = _core.Inputs(template, _torch.tensor_reader(), list(statics), words)
        if words:
            default = torch.cuda.default_generators[self._ordinal]
            generators.append((default.graphsafe_get_state(), step))
        if fresh:
            results = Results(fresh)
            outputs = _core.Outputs(template, results.storages)
        graph = CUDAGraph(keeps)
        graph._statics = statics
        captured = Captured(
            template,
            pools=[self._handle],
            current=_torch.current_stream_source(),
            ordinal=self._ordinal,
            inputs=inputs,
            generators=generators,
            results=results,
            outputs=outputs,
            retained=self._handle,
            footprint=Footprint(0, None, None, None, self._path, 0),
        )
        graph._hold(captured, self._driver)
        return graph

    def _allocate(self) -> None:
        """Allocate the graphs' own memory in one piece, and restore what lies there."""
        sizes = self._notes.pools
        with torch.cuda.use_mem_pool(self._pool):  # type: ignore[arg-type]
            whole = torch.empty(sum(sizes.values()), dtype=torch.uint8, device=self._ordinal)
        own, begin = Memory(), 0
        for name, size in sizes.items():
            self.segments[name] = segment = whole[begin : begin + size]
            for memory in (own, self._memory):
                memory.add(name, segment.data_ptr(), size, whole)
            begin += size
        # The allocator may give memory that earlier work still uses.
        self._driver.synchronize()
        self._kernels.restore(own.ranges)
