"""Graphs built from a file, with memory of their own and memory that was given."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias

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

_Built: TypeAlias = "tuple[_core.Template, list[int]]"
"""A template, and the addresses of its random state, if it draws."""


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
        self._storages: dict[tuple[str, int, int], torch.UntypedStorage] = {}
        self._threads = ThreadPoolExecutor(_THREADS)
        self._built: dict[str, Future[_Built]] = {}
        self._begun: list[tuple[CUDAGraph, Future[None] | None]] = []
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
        """Return a tensor over the memory of the graphs, or over that of a given tensor.

        Those that shared a storage share one again.

        Raises:
            ArgumentError: Its memory was not given.
        """
        # Graphs of one pool have results of several sizes at one place.
        place = note.memory, note.begin, note.size
        storage = self._given.get(note.memory) if note.is_given else self._storages.get(place)
        if storage is None and note.is_given:
            raise ArgumentError(f"the memory of {note.memory} was not given")
        if storage is None:
            whole = self.segments[note.memory]
            begin = whole.data_ptr() + note.begin
            storage = _torch.lent_storage(begin, note.size, whole.device, whole)
            self._storages[place] = storage
        return tensor_over(storage, note)

    def ahead(self, names: Iterable[str]) -> None:
        """Begin to build graphs, by threads. Those whose tensors are not there yet come later."""
        if not is_weighing():
            self._built = {name: self._threads.submit(self._template, name) for name in names}

    def graph(
        self,
        name: str,
        statics: Sequence[torch.Tensor] = (),
        results: Sequence[torch.Tensor] = (),
        *,
        keeps: bool = False,
    ) -> CUDAGraph:
        """Return a graph, which copies to static inputs and copies results to new tensors.

        It keeps all memory alive. It has no exec, and keeps its template if it ``keeps`` that.
        """
        built = self._built.pop(name, None)
        if built is None or built.exception() is not None:
            return self._graph(name, self._template(name), statics, results, keeps=keeps)
        return self._graph(name, built.result(), statics, results, keeps=keeps)

    def begin_instantiate(self, graph: CUDAGraph) -> None:
        """Let a thread instantiate a graph, until :meth:`finish`."""
        if is_weighing():
            # What is measured must be all that happens meanwhile.
            graph._instantiate(True)
            self._begun.append((graph, None))
        else:
            self._begun.append((graph, self._threads.submit(graph._instantiate, False)))

    def finish(self, graphs: Collection[CUDAGraph] | None = None) -> None:
        """Wait for graphs that are being instantiated, by default for all, and end their capture.

        Raises:
            InstantiateError: The driver refuses one.
        """
        wanted = [one for one in self._begun if graphs is None or one[0] in graphs]
        self._begun = [one for one in self._begun if one not in wanted]
        for graph, done in wanted:
            if done is not None:
                done.result()
            # It may have been reset since.
            if graph._captured is not None:
                graph._run_hooks("instantiate")
                graph.capture_end_post()

    def close(self) -> None:
        """End the threads; what they have built and nobody took goes."""
        self._threads.shutdown(cancel_futures=True)
        self._built = {}

    def _template(self, name: str) -> _Built:
        """Build a template; return it with the addresses of its random state, if it draws."""
        ranges, owners = list(self._memory.ranges), list(self._memory.owners)
        words: list[int] = []
        if self._notes.graphs[name].step:
            # As far apart as torch's allocator puts them.
            state = torch.empty(128, dtype=torch.int64, device=self._ordinal)
            words = [state.data_ptr(), state[64:].data_ptr()]
            ranges += [(SEED, words[0], WORD), (OFFSET, words[1], WORD)]
            owners.append(state)
        template = self._kernels.template(name, ranges, owners)
        template.retain_pool(self._pool._core)
        if self._others:
            template.require_named(self._others)
        return template, words

    def _graph(
        self,
        name: str,
        built: _Built,
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
