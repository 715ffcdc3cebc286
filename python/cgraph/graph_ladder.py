"""``GraphLadder``: captured graphs of one pool by key, for those who write an engine.

See :class:`GraphLadder` for an example.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from cgraph import _core, _driver
from cgraph._driver import Pool
from cgraph._ladder.file import LadderFile
from cgraph._ladder.rung import Rung
from cgraph._text import plural
from cgraph.errors import ArgumentError, StateError
from cgraph.segments import SegmentedGraph

if TYPE_CHECKING:
    from cgraph._saved.kernels import Kernels

__all__ = ["GraphLadder", "LadderFile"]

R = TypeVar("R")
_log = logging.getLogger("cgraph.ladder")


class GraphLadder(_core.Ladder):
    """Captured graphs by key, one for each size of a batch or whatever else distinguishes calls.

    Their memory is that of the largest if the largest is captured first, as later captures take the
    memory of earlier results. So a result is valid until the next call or capture of the ladder,
    and may be an argument of a later capture only with ``weak_outputs=False``.

    Args:
        pool: The pool of all captures, as for :class:`cgraph.graph`; by default a new one.
        weak_outputs: Let captures to come have the memory of results. Without it each graph keeps
            its own.
        check_addresses: Refuse a call whose tensors do not lie where those of the capture lay,
            instead of copying them there. So it is, in any case, where tensors of the capture
            share memory with each other, or within themselves as expanded ones.
        fresh_outputs: Copy the results of each call to new tensors, in the same replay.

    A capture keeps its function, the arguments and ``keep``. The ladder keeps the pool.

    A call is ``ladder(key, *args)``, with arguments like those of the capture, or none. It replays
    the graph of the key and returns its result. A tensor that lies elsewhere is copied to the one
    of the capture; what the function writes to that stays there. Without arguments, it reads what
    lies in the memory of the capture's tensors. One native call does it, if the arguments are just
    tensors, and new results just tensors, a tuple or a list of them.

    Raises:
        ArgumentError: By a call for which there is no such key, an argument has another shape or
            structure, a constant differs, or a tensor lies elsewhere and ``check_addresses`` is on.

    >>> import torch, cgraph
    >>> with cgraph.sim.use(), cgraph.capture_scope() as pool:
    ...     weight, x = torch.eye(3), torch.ones(8, 3)
    ...     ladder = cgraph.GraphLadder(pool)
    ...     for rows in (8, 4, 2):
    ...         _ = ladder.capture(rows, lambda x: x @ weight + 1, x[:rows])
    ...     print(ladder.keys, ladder(2, torch.zeros(2, 3)).sum().item())
    (8, 4, 2) 6.0
    """

    def __init__(
        self,
        pool: Pool | None = None,
        weak_outputs: bool = True,
        check_addresses: bool = False,
        *,
        fresh_outputs: bool = False,
    ) -> None:
        if pool is not None:
            _driver.token(pool)
        self._pool = pool
        self._weak_outputs, self._fresh_outputs = weak_outputs, fresh_outputs
        self._check_addresses = check_addresses
        self._file: LadderFile | None = None

    def capture(
        self,
        key: Hashable,
        fn: Callable[..., R],
        *args: Any,
        stream: Any = None,
        pool: Pool | None = None,
        before: Callable[[], object] | None = None,
        after: Callable[[], object] | None = None,
        keep: Sequence[object] = (),
        run: bool = True,
    ) -> R:
        """Run a function once, and capture it for a key, in place of an earlier capture.

        It is captured as by :meth:`cgraph.SegmentedGraph.capture`: its breaks stay eager, and its
        writes happen once. Call it before, or let ``before`` do so, if its first call sets
        something up. Many captures in a :func:`cgraph.capture_scope` take less time.

        Args:
            key: The key of calls.
            fn: The function.
            *args: Its arguments. The tensors among them, also in containers that pytree knows, are
                those that calls are copied to; anything else is a constant.
            stream: As for :class:`cgraph.graph`.
            pool: A pool in place of the ladder's, as after a sleep that has discarded that.
            before: Called before the capture begins: warm-ups, preparation of other state.
            after: Called when the capture has ended.
            keep: Objects that replays need and that neither the function nor its arguments keep.
            run: Let the captured work run at once. Without it, nothing is launched before the first
                call, as collectives need whose buffers are registered after all captures; the
                function may have no breaks, and the result is computed by that call.

        Returns:
            The result of the function, as calls return it.

        Raises:
            ArgumentError: The key is not hashable, or an argument is a tensor on the host, or lies
                in memory of the pool that nobody owns, as the result of another key does.
            CaptureError: A capture is open, or the function cannot be captured.

        If anything raises, an earlier capture of the key stays.
        """
        try:
            hash(key)
        except TypeError as error:
            raise ArgumentError(f"key is {key!r:.80}, expected a hashable value: {error}") from None
        pool = self.pool if pool is None else pool
        file, rung = self._file, None
        if file is not None:
            ways = {"fresh_outputs": self._fresh_outputs, "weak_outputs": self._weak_outputs}
            words = {name: str(value) for name, value in ways.items()}
            checks = self._check_addresses
            rung = file.find(key, fn, args, pool, words, runs=run, checks=checks)
        if rung is not None:
            result = rung.present()
        else:
            if before is not None:
                before()
            rung, result = Rung.captured(
                f"the graph of {key!r:.80}",
                fn,
                args,
                stream=stream,
                pool=pool,
                is_weak=self._weak_outputs,
                is_fresh=self._fresh_outputs,
                runs=run,
                checks=self._check_addresses,
                keeps=file is not None,
            )
            if file is not None:
                file.note(key, fn, rung)
            _log.info("%.80r is captured", key)
            if after is not None:
                after()
        rung.kept = fn, keep
        before_it = self._rungs.pop(key, None)
        self._rungs[key] = rung
        if before_it is not None:
            self._reset(before_it)
        return result  # type: ignore[no-any-return]

    @contextmanager
    def kept_in(
        self, path: str | os.PathLike[str] | Kernels, *, check: bool = False, lazy: bool = False
    ) -> Iterator[LadderFile]:
        """Keep the graphs of captures in the block in a file, for the next process.

        A capture whose graph is in the file runs nothing of its function: neither ``before`` nor
        ``after`` is called, and its graph works on the memory of its arguments, and of the tensors
        that the function reads. If the file has none of them, all are captured as usual, and
        written at the end of the block, unless that raises. A file that lacks some goes, so that
        the next process writes it anew. On the simulator nothing is kept.

        A graph is taken from the file only if its function is the same: by the names in its code,
        and in the code that it reaches, the same code, plain values, and forms of tensors, from
        source files that are the same. A capture that changes what it reads is not kept.
        ``docs/guides/saved.md`` tells what is not seen.

        Args:
            path: The file, or the result of :func:`cgraph.load_kernels` for it. The process that
                writes it needs ``cgraph.record_images(unless=path)`` before its first CUDA work.
            check: Compare the first replay of each loaded graph with an eager call, and capture
                where they differ.
            lazy: Make each loaded graph executable at its first call, not by several threads at
                the end of the block. Captures with ``run=True`` are their own first call.

        Returns:
            What was loaded and what was captured, for ``print``.

        Raises:
            ArgumentError: Something else than saved graphs is in the file.
            StateError: A block is open.
        """
        with self._keeping(LadderFile(path, check=check, lazy=lazy)) as file:
            yield file

    @contextmanager
    def _keeping(self, file: LadderFile) -> Iterator[LadderFile]:
        """Let captures in the block be loaded from a file, or be written to it."""
        if self._file is not None:
            raise StateError(f"kept_in() in a block of {self._file.path}: end that first")
        with file:
            self._file = file
            try:
                yield file
            finally:
                self._file = None

    def _is_kept(self, key: Hashable) -> bool:
        """Return whether a file in use may have the graph of a key."""
        return self._file is not None and self._file.has(key)

    def _was_kept(self, key: Hashable) -> bool:
        """Return whether the graph of a key came from a file in use."""
        return self._file is not None and key in self._file.loaded

    @property
    def pool(self) -> Pool:
        """The pool of the captures to come that are given none of their own."""
        if self._pool is None:
            self._pool = _driver.current().pool_handle()
        return self._pool

    @property
    def keys(self) -> tuple[Hashable, ...]:
        """The keys that have a graph, in the order of the captures."""
        return tuple(self._rungs)

    def __contains__(self, key: Hashable) -> bool:
        """Return whether a key has a graph."""
        return key in self._rungs

    def graph(self, key: Hashable) -> SegmentedGraph:
        """Return the graphs of a key, and with them their memory, seconds and breaks."""
        return self._rung(key).graph

    def bytes(self, key: Hashable) -> int:
        """Return the bytes of the device that the capture of a key took: of the pool, and execs."""
        return self.graph(key).memory().device

    def __repr__(self) -> str:
        """Return the keys that have a graph."""
        keys = ", ".join(f"{one!r:.40}" for one in self.keys[:8])
        more = ", …" if len(self.keys) > 8 else ""
        return f"<cgraph.GraphLadder: {plural(len(self.keys), 'graph')} ({keys}{more})>"

    def clear(self, *keys: Hashable) -> None:
        """Drop the graphs of some keys, or all."""
        for key in keys or self.keys:
            if (rung := self._rungs.pop(key, None)) is not None:
                self._reset(rung)

    def _reset(self, rung: Rung) -> None:
        """Drop a graph, when no thread makes it executable any more."""
        if self._file is not None:
            self._file.wait_for(rung)
        rung.graph.reset()

    def _rung(self, key: Hashable) -> Rung:
        rung: Rung | None = self._rungs.get(key)
        if rung is not None:
            return rung
        if not self._rungs:
            raise StateError(
                f"a call of key {key!r:.80} of a ladder that has no graph: nothing was captured, or"
                " clear() has dropped it"
            )
        known = ", ".join(f"{one!r:.80}" for one in self._rungs)
        raise ArgumentError(f"key is {key!r:.80}, expected one that was captured: {known}")
