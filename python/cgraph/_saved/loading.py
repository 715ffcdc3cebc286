"""Graphs built from a file, with memory of their own and memory that was given."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from cgraph import _core, _driver, _torch
from cgraph._captures import cuda_pools
from cgraph._captures.footprint import Footprint
from cgraph._driver import Captured
from cgraph._saved.memory import OFFSET, SEED, WORD, Memory, require_like
from cgraph._saved.notes import Notes
from cgraph.cudagraph import CUDAGraph
from cgraph.errors import ArgumentError
from cgraph.mempool import MemPool

__all__ = ["Loading"]


class Loading:
    """The graphs of a file, while they are built.

    Args:
        kernels: The file's graphs, with their kernels loaded.
        notes: The file's notes.
        ordinal: The number of the device.
        pool: The pool for the graphs' own memory.

    Attributes:
        segments: The bytes of each segment of that memory, by its name.
    """

    def __init__(
        self, kernels: _core.LoadedGraphs, notes: Notes, ordinal: int, pool: MemPool
    ) -> None:
        self._kernels, self._notes, self._ordinal, self._pool = kernels, notes, ordinal, pool
        self._driver = _driver.current()
        self._memory = Memory()
        self.segments: dict[str, torch.Tensor] = {}
        self._allocate()

    def bind(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take the tensors that were given, which are to be like those that were saved."""
        bound: dict[str, int] = {}
        for name, note in self._notes.tensors.items():
            if not note.is_given:
                continue
            if name not in tensors:
                raise ArgumentError(f"names has no {name!r}, expected it among them, as saved")
            require_like(name, tensors[name], note)
            storage = tensors[name].untyped_storage()
            start = storage.data_ptr()
            if note.memory not in bound:
                bound[note.memory] = start
                self._memory.add(note.memory, start, storage.nbytes(), storage)
            elif bound[note.memory] != start:
                raise ArgumentError(
                    f"{name} has a storage of its own, expected that of {note.memory}, as saved"
                )

    def graph(self, name: str, path: str) -> CUDAGraph:
        """Build a graph, which keeps all memory alive."""
        began = time.perf_counter()
        ranges, owners = self._memory.ranges, list(self._memory.owners)
        words: list[int] = []
        step = self._notes.graphs[name].step
        if step:
            state = torch.empty(128, dtype=torch.int64, device=self._ordinal)
            words = [state.data_ptr(), state[64:].data_ptr()]
            ranges = [*ranges, (SEED, words[0], WORD), (OFFSET, words[1], WORD)]
            owners.append(state)
        template = self._kernels.template(name, ranges, owners)
        handle = cuda_pools.handle_of(self._pool.id)
        template.retain_pool(self._pool._core)
        pools = self._driver.mem_pools()
        template.require_named([one._core for one in pools if one is not self._pool])
        inputs = None
        generators = []
        if words:
            inputs = _core.Inputs(template, _torch.tensor_reader(), [], words)
            default = torch.cuda.default_generators[self._ordinal]
            generators.append((default.graphsafe_get_state(), step))
        graph = CUDAGraph()
        captured = Captured(
            template,
            pools=[handle],
            current=_torch.current_stream_source(),
            ordinal=self._ordinal,
            inputs=inputs,
            generators=generators,
            retained=(handle, owners),
            footprint=Footprint(0, None, None, None, path, time.perf_counter() - began),
        )
        graph._hold(captured, self._driver)
        graph.instantiate()
        graph.capture_end_post()
        return graph

    def _allocate(self) -> None:
        """Allocate the graphs' own memory in one piece, and restore what lies there."""
        sizes = self._notes.pools
        with torch.cuda.use_mem_pool(self._pool):  # type: ignore[arg-type]
            whole = torch.empty(sum(sizes.values()), dtype=torch.uint8, device=self._ordinal)
        begin = 0
        for name, size in sizes.items():
            self.segments[name] = segment = whole[begin : begin + size]
            self._memory.add(name, segment.data_ptr(), size, whole)
            begin += size
        # The allocator may give memory that earlier work still uses.
        self._driver.synchronize()
        self._kernels.restore(self._memory.ranges)
