"""Native entries: the calls that are replays of a captured graph, and what they return."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cgraph import _core, _torch
from cgraph._captures.footprint import in_blocks
from cgraph._functions.leaving import Leaving
from cgraph._recording.calls import Call
from cgraph._recording.held import Holding
from cgraph._recording.recorded import Recorded
from cgraph._recording.training import Trained
from cgraph._source import calling_frame
from cgraph._state.reach import Surroundings
from cgraph._torch import tree_unflatten

__all__ = ["entry_of_call", "entry_of_graph", "returned"]


def entry_of_graph(
    recorded: Recorded,
    function: Callable[..., Any],
    call: Call,
    surroundings: Surroundings,
    flags: _core.Flags,
    *,
    copies: bool,
    held: Holding | None,
    lane: _core.Lane | None,
) -> _core.Entry:
    """The entry of a captured key.

    Args:
        recorded: The capture.
        function: What was captured.
        call: A call of the key.
        surroundings: What its function reaches.
        flags: Which modules trained at the capture.
        copies: Whether results are copies.
        held: Who is told of results that a caller still has.
        lane: The stream that the pool was used on last; None where there is just one.
    """
    work: Any = recorded.graph
    if recorded.debugged is not None:
        work = recorded.debugged
    elif recorded.leaves_more:
        # With tensors of its own: the caller's are not kept.
        like = call.replaced(recorded.statics)
        outside = surroundings.storages
        gradients = recorded.gradients
        leaving = Leaving(recorded, function, like, lambda: recorded.outputs, outside, gradients)
        work = _Feed(recorded, leaving)
    elif lane is None:
        work = recorded.feed()
    return _core.Entry(
        *call.patterns([_torch.signature(static) for static in recorded.statics]),
        is_in_order=call.is_in_order,
        modes=call.mode,
        flags=flags,
        fixed=surroundings.fixed,
        work=work,
        outputs=returned(recorded, recorded.outputs, surroundings, copies=copies, held=held),
        lane=lane,
        turn=surroundings.turn,
        written=recorded.writes,
        has_breaks=bool(recorded.breaks),
    )


def entry_of_call(
    function: Callable[..., Any],
    call: Call,
    surroundings: Surroundings,
    flags: _core.Flags,
    lane: _core.Lane | None = None,
    *,
    trained: Trained | None = None,
) -> _core.Entry:
    """An entry whose calls are handed on as they are.

    Args:
        function: What they are handed to.
        call: A call of the key.
        surroundings: What its function reaches.
        flags: Which modules train in such calls.
        lane: As for :func:`entry_of_graph`.
        trained: What it replays, which reads parameters where they lay; None if it runs eagerly.
    """
    return _core.Entry(
        *call.patterns([_torch.signature(tensor) for tensor in call.tensors]),
        is_in_order=call.is_in_order,
        modes=call.mode,
        flags=flags,
        fixed=None if trained is None else surroundings.fixed,
        work=function,
        outputs=None,
        lane=lane,
        turn=None if trained is None else surroundings.turn,
        written=[] if trained is None else trained.writes,
        has_breaks=trained is not None and bool(trained.breaks),
        is_open=None if trained is None else trained.is_open,
    )


def returned(
    recorded: Recorded,
    outputs: Sequence[Any],
    surroundings: Surroundings,
    *,
    copies: bool,
    held: Holding | None,
) -> tuple[list[tuple[Any, ...]], Any, Any, tuple[_core.Neighbours, int, bool]]:
    """What a native entry returns for these leaves of a result."""
    own = {_torch.storage_id(static.untyped_storage()) for static in recorded.statics}
    outside = surroundings.storages
    if recorded.in_place:
        outside = outside | recorded.in_place
    device = recorded.device
    leaves = [_leaf(recorded, output, device, own, outside, copies) for output in outputs]
    build: Any = functools.partial(_build, recorded.spec)
    if recorded.spec.is_leaf():
        build = "single"
    elif recorded.is_flat_tuple:
        build = "tuple"
    among = *recorded.neighbours, _overwrites_others(recorded, own | outside)
    if held is None or copies:
        return leaves, build, None, among
    storages = {place: leaf[3] for place, leaf in enumerate(leaves) if leaf[0] == "static"}
    who = held, storages, calling_frame, held.stride
    return leaves, build, who, among


def _leaf(
    recorded: Recorded,
    output: Any,
    device: torch.device | None,
    statics: set[int],
    outside: set[int],
    copies: bool,
) -> tuple[Any, ...]:
    if not isinstance(output, torch.Tensor):
        return "constant", output
    place = recorded.argument(output)
    if place is not None:
        return "argument", place
    if output.layout is not torch.strided or output.device != device:
        return "constant", output
    number = _torch.storage_id(output.untyped_storage())
    if number in outside:
        # What it lies in is the caller's, too.
        return "constant", output
    if copies or number in statics or output.numel() == 0 or output.is_conj() or output.is_neg():
        # As it is: another alias would count as a reference of the caller's to its storage.
        return "copied", output
    storage = recorded.storage(output)
    return "static", output.detach(), _torch.signature(output), storage


def _overwrites_others(recorded: Recorded, outside: set[int]) -> bool:
    """Whether replays write memory of their pool besides their results, which others may have.

    Args:
        recorded: The capture.
        outside: The numbers of storages that are not the pool's.
    """
    footprint = recorded.footprint
    if footprint is None or recorded.debugged is not None:
        return True
    if footprint.freed or footprint.workspace:
        return True
    tensors = (one for one in recorded.outputs if isinstance(one, torch.Tensor))
    memories = filter(None, map(_torch.memory_of, tensors))
    own = {_torch.storage_id(one): one.nbytes() for one in memories}
    # What else is in use at the end may be let go later, and be given to another capture.
    kept = sum(in_blocks(size) for number, size in own.items() if number not in outside)
    return footprint.held != kept


def _build(spec: Any, leaves: list[Any]) -> Any:
    return tree_unflatten(leaves, spec)


class _Feed:
    """Replays, and leaves to the caller what else the function does.

    Args:
        recorded: The capture.
        leaving: What leaves it.
    """

    def __init__(self, recorded: Recorded, leaving: Leaving) -> None:
        self._leaving = leaving
        self._feed = recorded.feed()
        self._statics = recorded.statics

    def __call__(self, tensors: tuple[torch.Tensor, ...]) -> bool:
        """Whether it was called without a replay."""
        if self._leaving.is_seen_elsewhere(tensors):
            self._leaving.run_eagerly(tensors)
            return True
        self._feed(tensors)
        self._leaving.leave(tensors, self._statics)
        return False
