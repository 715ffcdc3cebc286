"""Results of a capture that replays copy to new memory of the caller."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from cgraph import _core, _torch
from cgraph.errors import ArgumentError, StateError

if TYPE_CHECKING:
    from cgraph._driver import Captured

__all__ = ["FreshFeed", "FreshReplay", "Results", "can_be_fresh", "fresh_feed", "fresh_replay"]

FreshFeed = Callable[[tuple[Any, ...], Sequence[tuple[int, int]], Sequence[Any]], None]
"""A function that replays with tensors as static inputs, and copies results to new memory.

It takes the tensors, address and bytes of the destination of each piece of memory, and the new
tensors that own it; see ``_core.Fresh.make``.
"""

FreshReplay = Callable[[tuple[Any, ...]], list[torch.Tensor]]
"""A function that replays with tensors as static inputs, and returns new tensors."""


class Results:
    """The memory of results that replays copy: one piece for all that share a storage.

    Args:
        tensors: The results of the capture, which :func:`can_be_fresh` accepts; not kept.

    Attributes:
        storages: Address and bytes of each piece, from the first to the last byte.
        fresh: Makes new tensors like the results.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        groups: dict[int, list[torch.Tensor]] = {}
        for tensor in tensors:
            number = _torch.storage_id(tensor.untyped_storage())
            groups.setdefault(number, []).append(tensor)
        self.storages = [_torch.piece_of(group) for group in groups.values()]
        places = {number: place for place, number in enumerate(groups)}
        numbers = [_torch.storage_id(one.untyped_storage()) for one in tensors]
        pairs = zip(numbers, tensors, strict=True)
        self.fresh = self._fresh([(places[number], one) for number, one in pairs])

    def cut(self, tensors: Sequence[torch.Tensor]) -> _core.Fresh:
        """Return a maker of tensors like others in the same memory, as the first rows of results.

        Raises:
            ArgumentError: A tensor lies elsewhere.
        """
        return self._fresh([(self._place(tensor), tensor) for tensor in tensors])

    def _fresh(self, results: list[tuple[int, torch.Tensor]]) -> _core.Fresh:
        reader, empty = _torch.tensor_reader(), torch.empty_strided
        # The core makes some tensors to examine them.
        with _torch.without_modes():
            functions = _torch.fresh_functions()
            return _core.Fresh(self.storages, results, reader, empty, functions)

    def _place(self, tensor: torch.Tensor) -> int:
        begin, end = _torch.span_of(tensor)
        for place, (address, nbytes) in enumerate(self.storages):
            if begin == end or (address <= begin and end <= address + nbytes):
                return place
        raise ArgumentError(
            f"a tensor of {end - begin} bytes at {begin:#x} lies in no result of the capture"
        )


class _Replayed(Protocol):
    """A graph, or several in a row."""

    def replay(self) -> None: ...

    def _replay_into(
        self, tensors: tuple[Any, ...] | None, to: Sequence[tuple[int, int]]
    ) -> None: ...

    def _replay_made(self, fresh: _core.Fresh, tensors: tuple[Any, ...]) -> list[Any]: ...


def fresh_feed(graph: _Replayed, first: Captured, last: Captured) -> FreshFeed:
    """Return a function that replays a graph and copies its results.

    Args:
        graph: The graph.
        first: Its capture; for several in a row, the capture of the first one.
        last: The capture of the last one, which has the results.
    """
    feed, deliver = first.feed, last.deliver

    def replay(
        tensors: tuple[Any, ...], to: Sequence[tuple[int, int]], owners: Sequence[Any]
    ) -> None:
        if deliver is None:
            graph._replay_into(tensors or None, to)
            return
        if feed is not None and tensors:
            feed(tensors)
        graph.replay()
        deliver(to, owners)

    return replay


def fresh_replay(graph: _Replayed, first: Captured | None, last: Captured | None) -> FreshReplay:
    """Return a function that replays a graph and returns new tensors like its results.

    Args:
        graph: The graph.
        first: As for :func:`fresh_feed`; None if nothing was captured.
        last: As for :func:`fresh_feed`.

    Raises:
        StateError: The capture was given no results.
    """
    if first is None or last is None or last.results is None:
        raise StateError("a replay with new results of a graph that was captured without results")
    fresh = last.results.fresh
    if last.deliver is None:
        return functools.partial(graph._replay_made, fresh)
    feed = fresh_feed(graph, first, last)

    def replay(tensors: tuple[Any, ...]) -> list[torch.Tensor]:
        made, to = fresh.make()
        feed(tensors, to, made)
        return made

    return replay


def can_be_fresh(tensor: torch.Tensor) -> bool:
    """Return whether dtype, device, sizes and strides suffice to make a tensor like this one."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return False
    if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
        return False
    return _torch.memory_of(tensor) is not None
