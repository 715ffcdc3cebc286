"""``GraphLadder``: captured graphs of one pool by key, for those who write an engine.

See :class:`GraphLadder` for an example.
"""

from __future__ import annotations

import functools
import itertools
import logging
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch

from cgraph import _core, _driver, _torch
from cgraph._callables.sample import Sample
from cgraph._captures.fresh_results import can_be_fresh, fresh_of
from cgraph._captures.pool_blocks import PoolBlocks, places_in, unowned_at
from cgraph._driver import Handle, Pool
from cgraph._text import plural
from cgraph._torch import tree_flatten, tree_unflatten
from cgraph.errors import ArgumentError, StateError
from cgraph.segments import SegmentedGraph

__all__ = ["GraphLadder"]

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
        if before is not None:
            before()
        rung, result = _Rung.captured(
            f"the graph of {key!r:.80}",
            fn,
            args,
            stream=stream,
            pool=pool,
            is_weak=self._weak_outputs,
            is_fresh=self._fresh_outputs,
            runs=run,
            checks=self._check_addresses,
        )
        rung.kept = fn, keep
        _log.info("%.80r is captured", key)
        if after is not None:
            after()
        before_it = self._rungs.pop(key, None)
        self._rungs[key] = rung
        if before_it is not None:
            before_it.graph.reset()
        return result  # type: ignore[no-any-return]

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
                rung.graph.reset()

    def _rung(self, key: Hashable) -> _Rung:
        rung: _Rung | None = self._rungs.get(key)
        if rung is not None:
            return rung
        if not self._rungs:
            raise StateError(
                f"a call of key {key!r:.80} of a ladder that has no graph: nothing was captured, or"
                " clear() has dropped it"
            )
        known = ", ".join(f"{one!r:.80}" for one in self._rungs)
        raise ArgumentError(f"key is {key!r:.80}, expected one that was captured: {known}")


class _Rung(_core.Rung):
    """The graph of one key.

    Args:
        name: Its name in errors.
        graph: The graph.
        sample: The arguments of the capture.
        leaves: The leaves of the result.
        spec: Their structure.
        fresh: The leaves that replays copy to new tensors, by place; None if all of the capture's
            own are returned.
        checks: True if calls may give no tensors that lie elsewhere.

    Attributes:
        graph: The graph.
        result: The result, in the memory that replays write.
        kept: Objects that replays need.
    """

    graph: SegmentedGraph
    result: Any
    kept: Any
    _name: str
    _sample: Sample
    _checks: bool
    _is_shared: bool
    _places: list[_Place]

    def __new__(
        cls,
        name: str,
        graph: SegmentedGraph,
        sample: Sample,
        leaves: list[Any],
        spec: Any,
        fresh: Sequence[int] | None,
        *,
        checks: bool,
    ) -> _Rung:
        """Describe to native code what calls return, and which it serves alone."""
        result = tree_unflatten(leaves, spec)
        is_shared = _share_memory(sample.tensors)
        described: list[tuple[Any, ...]] = [("constant", result)]
        build: _Build = "single"
        if fresh is not None:
            described = _described(graph, leaves, fresh)
            build = _cloning(_build_of(result, leaves, spec), _views(leaves, sample.tensors))
        self = super().__new__(
            cls,
            graph,
            (described, build, None),
            len(sample.tensors) if sample.is_flat and not (checks or is_shared) else None,
        )
        self.graph, self.result, self.kept = graph, result, ()
        self._name, self._sample = name, sample
        self._places = _places_of(sample.tensors)
        self._checks, self._is_shared = checks, is_shared
        return self

    @classmethod
    def captured(
        cls,
        name: str,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        stream: Any,
        pool: Pool,
        is_weak: bool,
        is_fresh: bool,
        runs: bool,
        checks: bool,
    ) -> tuple[_Rung, Any]:
        """Capture a function; return the rung and the result."""
        sample = Sample(args, {})
        own: list[int] = []

        def results(result: Any) -> list[torch.Tensor]:
            """Return the tensors that replays copy to new memory, and note their places."""
            leaves, _ = tree_flatten(result)
            own.extend(
                place for place in places_in(driver, token, leaves) if can_be_fresh(leaves[place])
            )
            return [leaves[place] for place in own]

        driver, token = _driver.current(), _driver.token(pool)
        blocks = PoolBlocks(driver, pool) if is_weak else None
        _require_device(driver, sample)
        _require_owned(driver, token, sample)
        graph, result = SegmentedGraph._with_results(
            lambda: fn(*args),
            results if is_fresh else lambda _: (),
            pool=pool,
            stream=stream,
            statics=sample.tensors,
            runs=runs,
        )
        leaves, spec = tree_flatten(result)
        if blocks is not None:
            leaves = unowned_at(driver, token, leaves, places_in(driver, token, leaves))
            # Garbage may hold the results, as the first capture of a process makes some.
            del result
            blocks.are_left()
        rung = cls(name, graph, sample, leaves, spec, own if is_fresh else None, checks=checks)
        if not is_fresh:
            return rung, rung.result
        now = _cloned(leaves, [*own, *_views(leaves, sample.tensors)])
        return rung, tree_unflatten(now, spec)

    def __call__(self, args: tuple[Any, ...]) -> Any:
        """Replay with arguments that native code has not taken, or with none."""
        tensors = self._sample.matched(self._name, args, {}) if args else ()
        if tensors and (self._checks or self._is_shared):
            self._require_places(tensors)
            tensors = ()
        return self.serve(tensors)

    def _require_places(self, tensors: Sequence[torch.Tensor]) -> None:
        now = _places_of(tensors)
        if now == self._places:
            return
        names = [name for name, _ in self._sample.named_tensors()]
        moved = [
            f"{name}: expected {_place_in_words(before)}, got {_place_in_words(here)}"
            for name, before, here in zip(names, self._places, now, strict=True)
            if before != here
        ]
        why = (
            "The tensors of the capture share memory, so that no others can be copied there:"
            " capture with tensors of their own"
            if self._is_shared
            else "Write new values into the tensors of the capture, or leave check_addresses off,"
            " so that they are copied"
        )
        raise ArgumentError(
            f"Input addresses for cudagraphs are different during replay of {self._name}:"
            f" {'; '.join(moved)}. {why}"
        )


_Place = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]


def _places_of(tensors: Sequence[torch.Tensor]) -> list[_Place]:
    """Return where tensors lie, and how."""
    return [(one.data_ptr(), tuple(one.shape), one.stride(), one.dtype) for one in tensors]


def _place_in_words(place: _Place) -> str:
    address, shape, strides, _ = place
    return f"{address:#x} with shape {shape} and strides {strides}"


def _share_memory(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether tensors share memory with each other, or within themselves."""
    plain = [one for one in tensors if one.layout is torch.strided and one.numel()]
    spans = sorted(map(_torch.span_of, plain))
    overlaps = any(begin < end for (_, end), (begin, _) in itertools.pairwise(spans))
    return overlaps or any(map(_torch.overlaps_itself, plain))


def _require_device(driver: _driver.Driver, sample: Sample) -> None:
    """Refuse arguments that replays cannot copy: a graph keeps what it has read on the host."""
    for name, one in sample.named_tensors():
        if one.device.type != driver.device_type:
            raise ArgumentError(
                f"argument {name} is on {one.device}, expected {driver.device_type}: move it there,"
                " or give a number, which is a constant of the graph"
            )


def _require_owned(driver: _driver.Driver, pool: Handle, sample: Sample) -> None:
    """Refuse arguments in a pool's memory that a capture into the pool may take."""
    inside = [
        (name, one)
        for name, one in sample.named_tensors()
        if _torch.can_be_unowned(one) and driver.is_in_pool(one, pool)
    ]
    owned = driver.block_starts(pool) if inside else set()
    for name, one in inside:
        if one.untyped_storage().data_ptr() not in owned:
            raise ArgumentError(
                f"argument {name} lies in memory of the pool that nobody owns, as results of a"
                " ladder do, and the capture would write over it: clone it, or make the ladder with"
                " weak_outputs=False"
            )


_Build = str | Callable[[list[Any]], Any]
"""A way to form a result from its leaves; see ``_core.Entry``."""


def _described(
    graph: SegmentedGraph, leaves: Sequence[Any], fresh: Sequence[int]
) -> list[tuple[Any, ...]]:
    """Describe the leaves of a result of which some are new tensors, by place."""
    made = fresh_of(graph.segments[-1]._captured) if fresh else None
    numbers = {place: number for number, place in enumerate(fresh)}
    return [
        ("fresh", numbers[place], made) if place in numbers else ("constant", leaf)
        for place, leaf in enumerate(leaves)
    ]


def _views(leaves: Sequence[Any], statics: Sequence[torch.Tensor]) -> list[int]:
    """Return the places of leaves in memory of the static inputs, which the next call writes."""
    memories = {_torch.storage_id(one) for one in _torch.memories_of(statics)}
    return [
        place
        for place, leaf in enumerate(leaves)
        if isinstance(leaf, torch.Tensor)
        and any(_torch.storage_id(one) in memories for one in _torch.memories_of([leaf]))
    ]


def _cloned(leaves: Sequence[Any], places: Sequence[int]) -> list[Any]:
    """Replace tensors by clones, which share memory as they do."""
    found = list(leaves)
    made = _torch.clone_together([leaves[place] for place in places])
    for place, one in zip(places, made, strict=True):
        found[place] = one
    return found


def _build_of(result: Any, leaves: Sequence[Any], spec: Any) -> _Build:
    """Return how leaves form a result like this one."""
    if spec.is_leaf():
        return "single"
    is_flat = type(result) in (tuple, list) and len(result) == len(leaves)
    if is_flat and all(map(operator.is_, result, leaves)):
        return "tuple" if type(result) is tuple else list
    return functools.partial(tree_unflatten, treespec=spec)


def _cloning(build: _Build, views: Sequence[int]) -> _Build:
    """Return how leaves form a result if some are to be cloned first."""
    if not views:
        return build
    formed: Any = {"single": operator.itemgetter(0), "tuple": tuple}.get(build, build)  # type: ignore[arg-type]
    return lambda leaves: formed(_cloned(leaves, views))
