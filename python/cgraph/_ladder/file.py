"""The file that keeps a ladder's graphs from one process to the next."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Hashable, Mapping
from contextlib import ExitStack, suppress
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
from cgraph._saved.notes import TensorNote
from cgraph._saved.reads import Reads, reads_of
from cgraph._saved.saving import NamedMemory, Saving, advice_on, require_savable
from cgraph._saved.source_files import other_file
from cgraph._text import plural
from cgraph.causes import Cause
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
        # Otherwise what is there at the end is another process's.
        self._was_there = os.path.exists(self.path)
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
        elif self._kernels is None and not self._was_there:
            self._why = "there was no file"
        else:
            self._require_ours()
            self._kernels = self._kernels or Kernels(self.path)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Instantiate what was loaded, or write what was captured."""
        with ExitStack() as ends:
            # Each of these runs whatever the others raise, the last one first.
            ends.callback(self._forget)
            for _, rung in self._captures.values():
                ends.callback(_drop_templates, rung)
            if error is None and self._is_on_gpu:
                ends.callback(self._settle)
            if self._loading is not None:
                ends.callback(self._loading.finish)

    def _forget(self) -> None:
        """Give up what the block needed, tensors among it."""
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
        settings: Mapping[str, str],
        *,
        runs: bool,
        checks: bool,
    ) -> Rung | None:
        """Return a key's graph from the file; None if it is to be captured.

        Args:
            key: The key.
            fn: The function.
            args: Its arguments.
            pool: The pool of the capture.
            settings: The ladder's settings in words, by their names.
            runs: Do the work of the graph at once.
            checks: As for :class:`Rung`.
        """
        if key in self.loaded:
            self.loaded.remove(key)
        for known in (self.captured, self.refused, self._captures):
            known.pop(key, None)
        if not self._is_on_gpu:
            self.captured[key] = str(self._why)
            return None
        opened = self._open()
        try:
            call = self._calls.of(key, fn, args, settings)
            self._captures[key] = call, None
            if opened is None:
                raise StateError(str(self._why))
            rung = self._found(opened, call, fn, pool, checks=checks)
            if runs:
                self.wait_for(rung)
                rung.graph.replay()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a file has, a capture does as well
            self.captured[key] = str(error)
            if key not in self._captures:
                self.refused[key] = str(error)
            return None
        self.loaded.append(key)
        _log.info("%.80r is loaded from %s", key, self.path)
        return rung

    def note(self, key: Hashable, fn: Callable[..., Any], rung: Rung) -> None:
        """Note a capture, whose template is kept until the end of the block."""
        if key not in self._captures:
            _drop_templates(rung)
            return
        call, _ = self._captures[key]
        self._captures[key] = call, rung
        if (change := self._calls.change(fn, call.reads)) is not None:
            self.refused[key] = f"the values that it reads changed in the capture: {change}"

    def wait_for(self, rung: Rung) -> None:
        """Wait until a graph that was loaded has an exec, if it is to have one."""
        if self._loading is not None:
            self._loading.finish(rung.graph.segments)

    def has(self, key: Hashable) -> bool:
        """Return whether the file may have a graph for a key."""
        opened = self._open() if self._is_on_gpu else None
        return opened is not None and repr(key) in opened.notes.graphs

    def _open(self) -> Opened | None:
        """Wait for the file; None if nothing can be loaded.

        Raises:
            ArgumentError: It is one of :func:`cgraph.save` or of a Rust program.
        """
        if self._opened is None and self._why is None:
            assert self._kernels is not None
            try:
                opened = self._kernels._opened()
                opened.require_current()
            except (CgraphError, OSError) as error:
                self._why = str(error)
                return None
            if any(one.call is None for one in opened.notes.graphs.values()):
                self._why = "it is a file of cgraph.save()"
                raise ArgumentError(f"{self.path} is a file of cgraph.save(), expected a ladder's")
            if (path := other_file(opened.notes.files)) is not None:
                self._why = f"{path} has changed"
                return None
            self._opened = opened
        return self._opened

    def _found(
        self, opened: Opened, call: KeptCall, fn: Callable[..., Any], pool: Pool, *, checks: bool
    ) -> Rung:
        """Return the graph of a capture.

        Raises:
            Exception: There is none, or it is for something else.
        """
        notes, name = opened.notes, repr(call.key)
        if name not in notes.graphs:
            raise StateError(notes.refused.get(name, "the file has no graph of this key"))
        note = notes.graphs[name].call
        assert note is not None  # else it was not opened
        if (other := call.difference(note, notes)) is not None:
            raise StateError(other)
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

            self.wait_for(rung)
            written = [*call.reads.tensors.values(), *call.sample.tensors]
            written = [one for one in written if not isinstance(one, torch.nn.Parameter)]
            args = call.sample.args
            if (wrong := difference_from_eager(rung, fn, args, written)) is not None:
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

    def _settle(self) -> None:
        """Write the file if nothing came from it; remove it if it lacks what it should have."""
        if not self.captured:
            return
        if os.path.exists(self.path):
            # It may be another one by now.
            self._require_ours()
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
        if self._was_there:
            _log.info("%s goes, as it lacks graphs that were captured", self.path)
            with suppress(OSError):
                os.unlink(self.path)

    def _write(self) -> None:
        kept = [
            (call, rung, graph) for call, rung in self._noted() for graph in rung.graph.segments
        ]
        ordinals = {graph._captured.ordinal for *_, graph in kept if graph._captured is not None}
        if len(ordinals) > 1:
            raise ArgumentError(f"the graphs are of {len(ordinals)} devices, expected those of one")
        if kept:
            named, tensors = NamedMemory(graph for *_, graph in kept), {}
            saving = Saving(ordinals.pop(), named)
            for call, rung, graph in kept:
                try:
                    its_tensors = named.note(call.read_tensors(call.number) | call.given_tensors())
                    inside = [name for name, note in its_tensors.items() if not note.is_given]
                    if inside:
                        raise ArgumentError(f"{inside[0]} lies in the pool of the graphs")
                    saving.add(repr(call.key), graph, call=call.note(rung, named))
                except Exception as error:  # it goes into no file; the others may
                    self.refused[call.key] = f"{error}{advice_on(str(error))}"
                    continue
                tensors.update(its_tensors)
            if saving.graphs:
                self._write_graphs(saving, tensors)
                return
        key, why = next(iter(self.refused.items()))
        self._tell(f"{key!r:.40}: {why}")

    def _write_graphs(self, saving: Saving, tensors: dict[str, TensorNote]) -> None:
        reads, files = self._calls.reads(), {}
        for one in reads:
            files.update(one.files)
        refused = {repr(key): why for key, why in self.refused.items()}
        words = [one.words for one in reads]
        saving.write(self.path, tensors, reads=words, files=files, refused=refused)
        self.is_written = True
        _log.info("%s has %s", self.path, plural(len(saving.graphs), "graph"))

    def _noted(self) -> list[tuple[KeptCall, Rung]]:
        """Return the captures whose graphs can be in a file; note why the others cannot."""
        found = []
        for key in self.captured:
            call, rung = self._captures.get(key, (None, None))
            if key in self.refused or call is None:
                continue
            if rung is None:
                self.refused[key] = "its capture has failed"
            elif rung.graph._alone is None:
                self.refused[key] = "it has breaks, which run eagerly"
            else:
                try:
                    require_savable(repr(key), rung.graph._alone)
                    found.append((call, rung))
                except CgraphError as error:
                    self.refused[key] = str(error)
        return found

    def _require_ours(self) -> None:
        """Raise unless a file is one of cgraph's, which may be replaced."""
        try:
            with open(self.path, "rb") as file:
                begin = file.read(len(_MAGIC))
        except OSError as error:
            raise ArgumentError(f"{self.path} cannot be read: {error}") from error
        if begin != _MAGIC:
            raise ArgumentError(
                f"{self.path} begins with {begin!r}, expected a file of saved graphs, or none"
            )

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


def _drop_templates(rung: Rung | None) -> None:
    """Give up the templates of a capture that has kept them."""
    for one in () if rung is None else rung.graph.segments:
        if one._has_template:
            if not one._has_exec:
                one.instantiate()
            one._keep_graph = False
            one._drop_template(one._captured is not None and one._captured.outlives)
