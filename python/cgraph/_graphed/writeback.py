"""The effects of a replay on its caller besides the result: written arguments and gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from cgraph import _torch
from cgraph._graphed.argument_containers import items_in
from cgraph._graphed.call import Call
from cgraph._graphed.recorded import Recorded
from cgraph._graphed.results import View
from cgraph._reason import Reason
from cgraph._torch import tree_map
from cgraph.causes import Cause

__all__ = ["Fed", "change_given", "handed_over", "leave", "reason_beside"]


class Fed:
    """A replay with the tensors of a call that also writes the caller's tensors and gradients."""

    def __init__(self, recorded: Recorded) -> None:
        self._recorded = recorded

    def __call__(
        self, tensors: tuple[torch.Tensor, ...], to: Sequence[tuple[int, int]] = ()
    ) -> None:
        """Replay.

        Args:
            tensors: The tensors of the call.
            to: Address and bytes of the destination of each piece of memory of the results.
        """
        recorded = self._recorded
        if to:
            recorded.graph._replay_into(tensors or None, to)
        else:
            recorded.graph._replay_with(tensors)
        leave(recorded, tensors, recorded.statics)


def leave(
    recorded: Recorded, tensors: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
) -> None:
    """Copy to the caller's tensors what the function has written to their copies."""
    # Without gradients, as the caller's tensors may be leaves.
    with torch.no_grad():
        for place in recorded.mutated:
            if tensors[place] is not sources[place]:
                tensors[place].copy_(sources[place])
    recorded.gradients.give()


def handed_over(
    result: Any,
    containers: Sequence[tuple[Any, Any]],
    statics: Sequence[torch.Tensor],
    tensors: Sequence[torch.Tensor],
) -> Any:
    """Build the return value of a call that went on eagerly with copies of its arguments.

    Args:
        result: The result of the function.
        containers: The copies of containers, each with the caller's own.
        statics: The copies of tensors, whose contents the caller's get where they differ.
        tensors: The caller's tensors.
    """
    with torch.no_grad():
        for static, tensor in zip(statics, tensors, strict=True):
            if not torch.equal(static, tensor):
                tensor.copy_(static)
    change_given(containers, statics, tensors)
    own = next((own for made, own in containers if made is result), None)
    return tree_map(_given_for(statics, tensors), result) if own is None else own


def change_given(
    containers: Sequence[tuple[Any, Any]],
    statics: Sequence[torch.Tensor],
    tensors: Sequence[torch.Tensor],
) -> str | None:
    """Change the caller's containers as their copies were; return the type of one.

    Return None if none has changed. See :func:`handed_over` for the arguments.
    """
    owns, given = {id(made): own for made, own in containers}, _given_for(statics, tensors)
    changed = None
    for made, own in containers:
        if isinstance(own, tuple):
            continue
        items = items_in(made)
        now = [(key, owns[id(one)] if id(one) in owns else given(one)) for key, one in items]
        before, is_list = items_in(own), isinstance(own, list)
        # Keys may be tensors, which `==` compares by element.
        is_same = len(now) == len(before) and all(
            (is_list or a[0] is b[0]) and a[1] is b[1] for a, b in zip(now, before, strict=True)
        )
        if not is_same:
            changed = type(own).__name__
            if is_list:
                own[:] = [value for _, value in now]
            else:
                of_own = own if isinstance(own, dict) else vars(own)
                of_own.clear()
                of_own.update(now)
    return changed


def _given_for(
    statics: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
) -> Callable[[Any], Any]:
    """Return a function that returns the caller's tensor for its copy, also for a view of it."""
    own: dict[int, int] = {}
    for place, static in enumerate(statics):
        own.setdefault(_torch.storage_id(static.untyped_storage()), place)

    def given(leaf: Any) -> Any:
        memory = _torch.memory_of(leaf) if isinstance(leaf, torch.Tensor) else None
        place = None if memory is None else own.get(_torch.storage_id(memory))
        if place is None:
            return leaf
        if leaf is statics[place]:
            return tensors[place]
        view = View.of(leaf, statics[place], place)
        return leaf if view is None else view(tensors[place])

    return given


def reason_beside(
    call: Call,
    mutated: Sequence[int],
    writes: Sequence[tuple[int, int]],
    takes: Sequence[tuple[int, int]],
    written: Collection[str] = (),
) -> Reason | None:
    """Return why no graph serves a call: its tensors overlap written memory; None otherwise.

    A graph reads copies of them, which do not overlap.

    Args:
        call: The call.
        mutated: The places of the copied tensors that the graph writes.
        writes: The ends of each piece of other memory that it writes.
        takes: The ends of all other memory that it works on.
        written: The names of arguments that it writes, if these are those of the previous call:
            a tensor that has not moved was an input before, and is read where it lies now.
    """
    statics = {one.name: _span(one.value) for one in call.statics}
    writes = [*writes, *(statics[name] for name in statics if name in written)]
    if not mutated and not writes:
        return None
    names, spans = call.names, [_span(one) for one in call.tensors]
    for place, (begin, end) in enumerate(spans):
        if _touches(writes, begin, end):
            return _overlap(f"{names[place]} shares memory with a tensor that the function writes")
    for place in mutated:
        name = names[place]
        if _torch.overlaps_itself(call.tensors[place]):
            return _overlap(f"{name} is written, and its elements share memory")
        begin, end = spans[place]
        if _touches([*takes, *statics.values()], begin, end):
            return _overlap(f"{name} is written, and shares memory with what the function reads")
        for other, (first, last) in enumerate(spans):
            if other != place and first < end and begin < last:
                return _overlap(f"{names[other]} shares memory with {name}, which is written")
    return None


def _overlap(text: str) -> Reason:
    return Reason(Cause.OVERLAP, text)


def _touches(pieces: Sequence[tuple[int, int]], begin: int, end: int) -> bool:
    """Return whether a span has bytes in common with one of some pieces."""
    return any(first < end and begin < last for first, last in pieces)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    return (0, 0) if _torch.memory_of(tensor) is None else _torch.span_of(tensor)
