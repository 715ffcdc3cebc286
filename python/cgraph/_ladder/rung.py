"""The graph of one key of a ladder, and how its calls match it."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cgraph import _core, _driver, _torch
from cgraph._callables.sample import Sample
from cgraph._captures.fresh_results import can_be_fresh, fresh_of
from cgraph._captures.pool_blocks import PoolBlocks, places_in, unowned_at
from cgraph._driver import Handle, Pool
from cgraph._torch import tree_flatten, tree_unflatten
from cgraph.errors import ArgumentError
from cgraph.segments import SegmentedGraph

__all__ = ["Rung"]


class Rung(_core.Rung):
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
        fresh: As given.
    """

    graph: SegmentedGraph
    result: Any
    kept: Any
    fresh: list[int] | None
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
    ) -> Rung:
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
        self.fresh = None if fresh is None else [*fresh]
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
        keeps: bool = False,
    ) -> tuple[Rung, Any]:
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
            keeps=keeps,
        )
        leaves, spec = tree_flatten(result)
        if blocks is not None:
            leaves = unowned_at(driver, token, leaves, places_in(driver, token, leaves))
            # Garbage may hold the results, as the first capture of a process makes some.
            del result
            blocks.are_left()
        rung = cls(name, graph, sample, leaves, spec, own if is_fresh else None, checks=checks)
        return rung, rung.present()

    def present(self) -> Any:
        """Return the result as calls do, with what its memory has now."""
        if self.fresh is None:
            return self.result
        leaves, spec = tree_flatten(self.result)
        copied = [*self.fresh, *_views(leaves, self._sample.tensors)]
        return tree_unflatten(_cloned(leaves, copied), spec)

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
