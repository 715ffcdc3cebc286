"""The file that keeps a ladder's graphs from one process to the next."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from cgraph import _driver, _torch
from cgraph._driver import Handle, Pool
from cgraph._ladder.kept_calls import KeptCall, KeptCalls
from cgraph._ladder.rung import Rung
from cgraph._reason import Reason
from cgraph._saved.kernels import Kernels, Opened
from cgraph._saved.loading import Loading
from cgraph._saved.reads import Reads, reads_of
from cgraph._saved.saving import NamedMemory, Saving, advice_on, require_savable
from cgraph._text import plural
from cgraph.causes import Cause
from cgraph.cudagraph import CUDAGraph
from cgraph.errors import ArgumentError, CgraphError, CgraphWarning, StateError
from cgraph.mempool import MemPool
from cgraph.segments import SegmentedGraph

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["LadderFile"]

_log = logging.getLogger("cgraph.ladder")
_MAGIC = b"\x89cgraph\n"


class LadderFile:
    """A file that keeps graphs of a ladder.

    :meth:`cgraph.GraphLadder.kept_in` makes it, and explains its arguments.

    Args:
        describe: Returns what a function reads.

    Attributes:
        path: The file.
        loaded: The keys whose graphs came from the file.
        captured: The keys that were captured, with the reason why each was not loaded.
        refused: The keys whose graphs the file cannot have, with the reasons.
        is_written: True if the block has written the file.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Kernels,
        *,
        check: bool,
        lazy: bool,
        describe: Callable[[Callable[..., Any]], Reads] = reads_of,
    ) -> None:
        self.path = path.path if isinstance(path, Kernels) else os.fspath(path)
        self.loaded: list[Hashable] = []
        self.captured: dict[Hashable, str] = {}
        self.refused: dict[Hashable, str] = {}
        self.is_written = False
        self._kernels = path if isinstance(path, Kernels) else None
        self._checks, self._is_lazy = check, lazy
        self._is_on_gpu = _driver.current().device_type == "cuda"
        self._opened: Opened | None = None
        self._loading: Loading | None = None
        self._pool: Handle | None = None
        # Why nothing is loaded.
        self._why: str | None = None
        self._calls = KeptCalls(describe)
        self._captures: dict[Hashable, tuple[KeptCall, Rung | None]] = {}
        # The functions whose tensors have names, by their numbers in the file.
        self._bound: dict[int, Reads] = {}

    def __enter__(self) -> Self:
        """Begin to read the file, beside what follows."""
        if not self._is_on_gpu:
            self._why = "graphs of the simulator are not kept"
        elif self._kernels is None and not os.path.exists(self.path):
            self._why = "there was no file"
        else:
            _require_ours(self.path)
            self._kernels = self._kernels or Kernels(self.path)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Instantiate what was loaded, or write what was captured."""
        try:
            if self._loading is not None:
                self._loading.finish()
            if error is None and self._is_on_gpu:
                self._settle()
        finally:
            for _, rung in self._captures.values():
                _drop_templates(rung)
            if self._loading is not None:
                self._loading.close()
            self._captures, self._bound = {}, {}
            self._calls.clear()
            self._kernels = self._opened = self._loading = None

    def __str__(self) -> str:
        """Return how many graphs were loaded and captured, and why."""
        lines = [
            f"{self.path}: {plural(len(self.loaded), 'graph')} loaded, {len(self.captured)}"
            f" captured{', and written' if self.is_written else ''}"
        ]
        lines += _by_reason(self.captured, "captured")
        lines += _by_reason(self.refused, "not kept")
        return "\n".join(lines)

    def find(
        self,
        key: Hashable,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        pool: Pool,
        is_fresh: bool,
        checks: bool,
    ) -> Rung | None:
        """Return a key's graph from the file; None if it is to be captured."""
        self.captured.pop(key, None)
        if not self._is_on_gpu:
            self.captured[key] = str(self._why)
            return None
        try:
            call = self._calls.of(key, fn, args)
        except ArgumentError as error:
            self.captured[key] = self.refused[key] = str(error)
            return None
        self._captures[key] = call, None
        try:
            rung = self._found(call, fn, pool, is_fresh=is_fresh, checks=checks)
        except torch.OutOfMemoryError:
            raise
        except CgraphError as error:
            self.captured[key] = str(error)
            return None
        self.loaded.append(key)
        _log.info("%.80r is loaded from %s", key, self.path)
        return rung

    def note(self, key: Hashable, rung: Rung) -> None:
        """Note a capture, whose template is kept until the end of the block."""
        if key in self._captures:
            self._captures[key] = self._captures[key][0], rung
        else:
            _drop_templates(rung)

    def run(self, rung: Rung) -> None:
        """Do the work of a loaded graph at once."""
        self._instantiate_now(rung)
        rung.graph.replay()

    def has(self, key: Hashable) -> bool:
        """Return whether the file may have a graph for a key."""
        opened = self._open() if self._is_on_gpu else None
        return opened is not None and repr(key) in opened.notes.graphs

    def _open(self) -> Opened | None:
        """Wait for the file; None if nothing can be loaded."""
        if self._opened is None and self._why is None:
            assert self._kernels is not None
            try:
                self._opened = self._kernels._opened()
                self._opened.require_current()
            except CgraphError as error:
                self._opened, self._why = None, str(error)
        return self._opened

    def _found(
        self, call: KeptCall, fn: Callable[..., Any], pool: Pool, *, is_fresh: bool, checks: bool
    ) -> Rung:
        """Return the graph of a capture.

        Raises:
            CgraphError: There is none, or it is for something else.
        """
        if (opened := self._open()) is None:
            raise StateError(str(self._why))
        notes, name = opened.notes, repr(call.key)
        if name not in notes.graphs:
            raise StateError(notes.refused.get(name, "the file has no graph of this key"))
        if (note := notes.graphs[name].call) is None:
            raise StateError("cgraph.save() has written the file, which cgraph.load() reads")
        if (other := call.difference(note, notes)) is not None:
            raise StateError(other)
        if (note.fresh is not None) != is_fresh:
            raise StateError("the ladder had another value of fresh_outputs")
        loading = self._loading_into(opened, pool)
        if self._bound.get(note.reads) is not call.reads:
            loading.bind(call.read_tensors(note.reads))
        loading.bind(call.given_tensors())
        if not self._bound:
            # Most calls have the memory of the first one's arguments.
            loading.ahead(one for one in notes.graphs if one != name)
        self._bound[note.reads] = call.reads
        leaves = [
            one.value if one.tensor is None else loading.tensor(one.tensor) for one in note.leaves
        ]
        fresh = [leaves[place] for place in note.fresh or ()]
        graph = loading.graph(name, call.sample.tensors, fresh, keeps=self._is_lazy)
        made = SegmentedGraph([graph])
        title, spec = f"the graph of {call.key!r:.80}", _torch.tree_loads(note.spec)
        rung = Rung(title, made, call.sample, leaves, spec, note.fresh, checks=checks)
        if not self._is_lazy:
            loading.begin_instantiate(graph)
        if self._checks:
            # Only users who check pay for the import.
            from cgraph._ladder.eager_check import difference_from_eager

            self._instantiate_now(rung)
            if (wrong := difference_from_eager(rung, fn, call.sample)) is not None:
                made.reset()
                raise StateError(f"it differs from an eager call: {wrong}")
        return rung

    def _loading_into(self, opened: Opened, pool: Pool) -> Loading:
        handle = _driver.token(pool)
        if self._loading is None:
            self._loading = opened.loading(self.path, MemPool.of(handle))
            self._pool = handle
        elif handle != self._pool:
            raise StateError("earlier keys were loaded into another pool")
        return self._loading

    def _instantiate_now(self, rung: Rung) -> None:
        assert self._loading is not None
        self._loading.finish(rung.graph.segments)

    def _settle(self) -> None:
        """Write the file if nothing came from it; remove it if it lacks what it should have."""
        if not self.captured:
            return
        if not self.loaded:
            try:
                self._write()
            except (CgraphError, OSError) as error:
                self._tell(str(error))
            if self.is_written:
                return
        elif self._opened is not None:
            known = self._opened.notes.refused
            if all(repr(key) in known for key in self.captured):
                return
        _log.info("%s is not kept, as it lacks graphs that were captured", self.path)
        with suppress(OSError):
            os.unlink(self.path)

    def _write(self) -> None:
        for key in self.captured:
            if self._captures.get(key, (None, None))[1] is None:
                self.refused.setdefault(key, "its capture has failed")
        found = [(call, rung, self._savable(call.key, rung)) for call, rung in self._noted()]
        kept = [(call, rung, graph) for call, rung, graph in found if graph is not None]
        ordinals = {graph._captured.ordinal for *_, graph in kept if graph._captured is not None}
        if len(ordinals) > 1:
            raise ArgumentError(f"the graphs are of {len(ordinals)} devices, expected those of one")
        if ordinals:
            named = NamedMemory(graph for *_, graph in kept)
            saving, tensors = Saving(ordinals.pop(), named), {}
            for call, rung, graph in kept:
                its_tensors = named.note(call.read_tensors(call.number) | call.given_tensors())
                try:
                    for name, note in its_tensors.items():
                        if not note.is_given:
                            raise ArgumentError(f"{name} lies in the pool of the graphs")
                    saving.add(repr(call.key), graph, call=call.note(rung, named))
                except CgraphError as error:
                    self.refused[call.key] = f"{error}{advice_on(str(error))}"
                    continue
                tensors.update(its_tensors)
            if saving.graphs:
                refused = {repr(key): why for key, why in self.refused.items()}
                saving.write(self.path, tensors, self._calls.reads(), refused)
                self.is_written = True
                _log.info("%s has %s", self.path, plural(len(saving.graphs), "graph"))
                return
        key, why = next(iter(self.refused.items()))
        self._tell(f"{key!r:.40}: {why}")

    def _noted(self) -> list[tuple[KeptCall, Rung]]:
        return [(call, rung) for call, rung in self._captures.values() if rung is not None]

    def _savable(self, key: Hashable, rung: Rung) -> CUDAGraph | None:
        """Return the graph of a rung if it can be in a file."""
        if (graph := rung.graph._alone) is None:
            self.refused[key] = "it has breaks, which run eagerly"
            return None
        try:
            require_savable(repr(key), graph)
        except CgraphError as error:
            self.refused[key] = str(error)
            return None
        return graph

    def _tell(self, why: str) -> None:
        text = f"no graph of {plural(len(self.captured), 'capture')} is kept in {self.path}: {why}"
        Reason(Cause.SAVED_GRAPHS, text).warn(kind=CgraphWarning)


def _by_reason(reasons: Mapping[Hashable, str], what: str) -> list[str]:
    """Return a line for each reason, with its keys."""
    keys: dict[str, list[str]] = {}
    for key, why in reasons.items():
        keys.setdefault(why, []).append(f"{key!r:.40}")
    return [
        f"  {', '.join(found[:8])}{', …' if len(found) > 8 else ''}: {what}, as {why}"
        for why, found in keys.items()
    ]


def _require_ours(path: str) -> None:
    """Raise unless a file is one of cgraph's, which may be replaced, or is not there."""
    with suppress(FileNotFoundError), open(path, "rb") as file:
        if (begin := file.read(len(_MAGIC))) != _MAGIC:
            raise ArgumentError(
                f"{path} begins with {begin!r}, expected a file of saved graphs, or none"
            )


def _drop_templates(rung: Rung | None) -> None:
    """Give up the templates of a capture that has kept them."""
    for one in () if rung is None else rung.graph.segments:
        if one._has_template:
            if not one._has_exec:
                one.instantiate()
            one._keep_graph = False
            one._drop_template(one._captured is not None and one._captured.outlives)
