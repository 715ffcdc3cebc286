"""Nodes of a graph tree, and who owns the memory of their outputs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cgraph import _core, _torch
from cgraph._captures.fresh_results import Results
from cgraph.cudagraph import CUDAGraph

__all__ = ["Node", "Outputs"]


@dataclass
class Outputs:
    """The outputs of a recording.

    Attributes:
        described: What a replay returns at each place; see ``_core.TreeNode``.
        new: The tensors over new memory of the pool, one for each that is returned.
        pieces: The number of the piece of memory of each of these.
        storages: The storage of each piece.
        with_gradients: The places of those that require gradients.
    """

    described: list[tuple[str, Any]]
    new: list[torch.Tensor]
    pieces: list[int]
    storages: list[_torch.WeakStorage]
    with_gradients: list[int]


@dataclass
class ReadyToOwn:
    """A node whose outputs are to own their blocks.

    Attributes:
        node: The node.
        storages: The storage of each piece.
        unused: The prototypes that it is to hold afterwards.
    """

    node: Node
    storages: list[_torch.WeakStorage]
    unused: list[torch.Tensor]

    def own(self) -> None:
        """Let the node hold the storages weakly: those that live are to own their blocks."""
        self.node._unused = self.unused
        self.node._own(self.storages)


class Node(_core.TreeNode):
    """A recorded call.

    After the recording, the outputs that callers have own their blocks of the pool, until the path
    ends. From then on the node holds prototypes, which own nothing: callers of replays get aliases
    of these. Before another call is recorded behind a replay, outputs own their blocks again.

    Attributes:
        graph: The graph.
        checkpoint: The blocks of the pool in use behind the node.
    """

    graph: CUDAGraph
    checkpoint: Any
    # Storages whose blocks outputs own; None where prototypes stand for them.
    _owning: list[_torch.WeakStorage] | None
    _unused: list[torch.Tensor]
    # The storages of the pieces, so that others do not get their addresses.
    _kept: list[_torch.WeakStorage]

    def __new__(
        cls,
        graph: CUDAGraph,
        copied: Sequence[int],
        spans: Sequence[tuple[int, int]],
        stand_ins: Sequence[tuple[int, Callable[[], torch.Tensor]]],
        outputs: Outputs,
        keeps_held: bool,
        results: Results | None,
        *,
        may_be_fresh: bool,
    ) -> Node:
        """Make a node whose outputs own their blocks.

        Args:
            graph: The graph.
            copied: The places of the inputs that it copies.
            spans: Those among them that are copied in a row; see ``_core.TreeNode``.
            stand_ins: What makes other tensors like inputs in outputs of the path, by place.
            outputs: Its outputs.
            keeps_held: Outputs that are held when the path ends get memory of their own.
            results: Its outputs that replays can copy to new memory; None if they copy none.
            may_be_fresh: Another recording may have that.
        """
        node = super().__new__(
            cls,
            graph,
            copied,
            spans,
            stand_ins,
            outputs.described,
            outputs.with_gradients,
            outputs.pieces,
            keeps_held,
            _torch.tensor_reader(),
            None if _torch.counts_uses_natively() else _torch.count_uses,
            None if results is None else results.fresh,
            may_be_fresh,
        )
        node.graph, node._kept = graph, []
        node._unused = _prototypes(outputs.new)
        node._own(outputs.storages)
        return node

    @property
    def copied_bytes(self) -> int:
        """The bytes of the inputs that a replay copies."""
        return sum(one.nbytes for one in self.graph._statics)

    def first_prototype(self, piece: int) -> torch.Tensor:
        """Return a prototype over a piece of memory."""
        return self.prototypes[self.places.index(piece)]

    def ready_to_own(self) -> ReadyToOwn:
        """Return what lets outputs own their blocks; nothing changes yet."""
        storages = [_torch.WeakStorage(one) for one in self._firsts(self.prototypes)]
        return ReadyToOwn(self, storages, _prototypes(self.prototypes))

    def hold_prototypes(self) -> None:
        """Hold prototypes again: no output owns its block any more."""
        if self._owning is not None:
            self._hold(self._unused)
            self._owning, self._unused = None, []

    def storage(self, piece: int) -> torch.UntypedStorage | None:
        """Return the storage of a piece of memory that somebody may hold; None if it is gone."""
        if self._owning is not None:
            return self._owning[piece].get()
        return self.first_prototype(piece).untyped_storage()

    def end(self, pieces: Mapping[int, torch.UntypedStorage | None], message: str) -> None:
        """Take pieces away from those who hold them, where prototypes stand for the outputs.

        Other prototypes are in place of those of the pieces then. One native call does it, so that
        an interrupt finds all of it done or nothing.

        Args:
            pieces: The memory that holders of a piece get; None to let each access raise.
            message: The text of the error.
        """
        before = list(self.prototypes)
        places = [place for place, piece in enumerate(self.places) if piece in pieces]
        new = dict(zip(places, _prototypes([before[place] for place in places]), strict=True))
        ends: list[Callable[[], object]] = []
        for piece, other in pieces.items():
            storage = self.first_prototype(piece).untyped_storage()
            if other is None:
                ends.append(functools.partial(_torch.set_stale, storage._cdata, message))
            else:
                ends.append(_torch.exchange(storage, other))
        self._hold([new.get(place, one) for place, one in enumerate(before)], ends)

    def _own(self, storages: list[_torch.WeakStorage]) -> None:
        self._owning = storages
        self.hold((), [(one.pointer, 0) for one in storages])

    def _hold(
        self, prototypes: Sequence[torch.Tensor], ends: Sequence[Callable[[], object]] = ()
    ) -> None:
        storages = [_torch.WeakStorage(one) for one in self._firsts(prototypes)]
        uses = [(one.pointer, _torch.count_uses(one.pointer)) for one in storages]
        # Those before are in use until the node holds the others.
        self._kept = [*self._kept, *storages]
        self.hold(tuple(prototypes), uses, list(ends))
        self._kept = storages

    def _firsts(self, prototypes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the first prototype of each piece."""
        found: dict[int, torch.Tensor] = {}
        for piece, one in zip(self.places, prototypes, strict=True):
            found.setdefault(piece, one)
        return [found[piece] for piece in sorted(found)]


def _prototypes(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors over the same memory that own nothing, and of which views have versions."""
    return _torch.unowned(tensors, is_inference=False)
