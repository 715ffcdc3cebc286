"""The effects of a replay on its caller besides the result: written arguments and gradients."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from cgraph import _torch
from cgraph._graphed.call import Call
from cgraph._graphed.recorded import Recorded
from cgraph._graphed.results import View
from cgraph._torch import tree_map

__all__ = ["Fed", "handed_over", "leave", "reason_beside", "with_statics"]


class Fed:
    """A replay with the tensors of a call that also writes the caller's tensors and gradients.

    Args:
        recorded: The capture.
    """

    def __init__(self, recorded: Recorded) -> None:
        self._recorded = recorded
        self._feed = recorded.feed()
        self._fresh = None if recorded.copies is None else recorded.graph._fresh_feeder()

    def __call__(
        self,
        tensors: tuple[torch.Tensor, ...],
        to: Sequence[tuple[int, int]] = (),
        owners: Sequence[torch.Tensor] = (),
    ) -> None:
        """Replay.

        Args:
            tensors: The tensors of the call.
            to: Address and bytes of the destination of each piece of memory of the results.
            owners: The tensors that own the destinations.
        """
        if owners and self._fresh is not None:
            self._fresh(tensors, to, owners)
        else:
            self._feed(tensors)
        leave(self._recorded, tensors, self._recorded.statics)


def leave(
    recorded: Recorded, tensors: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
) -> None:
    """Copy to the caller's tensors what the function has written to their copies.

    Args:
        recorded: The capture; a replay of it was enqueued.
        tensors: The caller's tensors.
        sources: The tensors that hold their new contents.
    """
    # Without gradients, as the caller's tensors may be leaves.
    with torch.no_grad():
        for place in recorded.mutated:
            if tensors[place] is not sources[place]:
                tensors[place].copy_(sources[place])
    recorded.gradients.give()


def handed_over(
    result: Any, statics: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
) -> Any:
    """Build the return value of a call that went on eagerly with the copies of its tensors.

    Args:
        result: The result of the function.
        statics: The copies, whose contents the caller's tensors get where they differ.
        tensors: The caller's tensors.
    """
    own: dict[int, int] = {}
    for place, (static, tensor) in enumerate(zip(statics, tensors, strict=True)):
        own.setdefault(_torch.storage_id(static.untyped_storage()), place)
        with torch.no_grad():
            if not torch.equal(static, tensor):
                tensor.copy_(static)

    def given(leaf: Any) -> Any:
        memory = _torch.memory_of(leaf) if isinstance(leaf, torch.Tensor) else None
        place = None if memory is None else own.get(_torch.storage_id(memory))
        if place is None:
            return leaf
        if leaf is statics[place]:
            return tensors[place]
        view = View.of(leaf, statics[place], place)
        return leaf if view is None else view(tensors[place])

    return tree_map(given, result)


def reason_beside(
    call: Call,
    mutated: Sequence[int],
    writes: Sequence[tuple[int, int]],
    takes: Sequence[tuple[int, int]],
) -> str | None:
    """Return why no graph serves a call: its tensors overlap written memory; None otherwise.

    A graph reads copies of them, which do not overlap.

    Args:
        call: The call.
        mutated: The places of the copied tensors that the graph writes.
        writes: The ends of each piece of other memory that it writes.
        takes: The ends of all other memory that it works on.
    """
    if not mutated and not writes:
        return None
    names, spans = call.names, [_span(one) for one in call.tensors]
    for place, (begin, end) in enumerate(spans):
        if _touches(writes, begin, end):
            return f"{names[place]} shares memory with a tensor that the function writes"
    for place in mutated:
        if _torch.overlaps_itself(call.tensors[place]):
            return f"{names[place]} is written, and its elements share memory"
        begin, end = spans[place]
        if _touches(takes, begin, end):
            return f"{names[place]} is written, and shares memory with what the function reads"
        for other, (first, last) in enumerate(spans):
            if other != place and first < end and begin < last:
                return f"{names[other]} shares memory with {names[place]}, which is written"
    return None


def with_statics(
    call: Call,
    written: Collection[str],
    writes: Sequence[tuple[int, int]],
    takes: Sequence[tuple[int, int]],
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the memory that a capture writes and works on besides its inputs.

    It is more than the previous call has shown: a tensor that has not moved was an input before,
    and is read where it lies from now on.

    Args:
        call: The call that is captured.
        written: The names of arguments that the previous call has written.
        writes: As for :func:`reason_beside`, of the previous call.
        takes: Likewise.
    """
    spans = {one.name: _span(one.value) for one in call.statics}
    return [*writes, *(spans[name] for name in spans if name in written)], [*takes, *spans.values()]


def _touches(pieces: Sequence[tuple[int, int]], begin: int, end: int) -> bool:
    """Return whether a span has bytes in common with one of some pieces."""
    return any(first < end and begin < last for first, last in pieces)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    return (0, 0) if _torch.memory_of(tensor) is None else _torch.span_of(tensor)
