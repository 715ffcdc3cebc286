"""The kernels of a file, which load beside other work."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from cgraph import _core, _torch
from cgraph._saved.loading import Loading
from cgraph._saved.notes import Notes
from cgraph.errors import ArgumentError, ForeignError
from cgraph.mempool import MemPool

__all__ = ["Kernels"]


class Kernels:
    """The kernels of a file, which a thread of their own reads and loads.

    Attributes:
        path: The file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        _torch.require_cuda()
        self.path = os.fspath(path)
        self._ordinal = torch.cuda.current_device() if _torch.has_gpu() else 0
        thread = ThreadPoolExecutor(1)
        self._found = thread.submit(self._load)
        # It ends with its work.
        thread.shutdown(wait=False)

    def _load(self) -> Opened:
        began = time.perf_counter()
        saved = _core.SavedGraphs.open(self.path)
        size = os.stat(self.path).st_size
        notes = Notes.of(saved.notes)
        if (now := Notes.versions_now()) != notes.versions:
            raise ArgumentError(f"the versions are {now}, expected {notes.versions}, as saved")
        opened = time.perf_counter()
        kernels = saved.load(_torch.device_of(self._ordinal))
        seconds = {"file": opened - began, "kernels": time.perf_counter() - opened}
        return Opened(kernels, notes, self._ordinal, size, seconds)

    def _opened(self) -> Opened:
        """Wait for the thread; return what it has loaded."""
        return self._found.result()


class Opened(NamedTuple):
    """A file whose kernels are loaded."""

    kernels: _core.SavedKernels
    notes: Notes
    ordinal: int
    size: int
    seconds: dict[str, float]

    def require_current(self) -> int:
        """Return the number of the device, which must be the current one."""
        if (now := torch.cuda.current_device()) != self.ordinal:
            raise ForeignError(
                f"cuda:{now} is current, expected cuda:{self.ordinal}, of the kernels"
            )
        return self.ordinal

    def loading(self, path: str, pool: MemPool) -> Loading:
        """Begin to build graphs, whose own memory comes from a pool."""
        return Loading(self.kernels, self.notes, self.ordinal, pool, path)
