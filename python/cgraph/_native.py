"""Native entries: the calls that are replays of a captured graph, and what they return."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cgraph import _core, _torch
from cgraph._calls import Call
from cgraph._recorded import Recorded
from cgraph._source import user_frame
from cgraph._torch import tree_unflatten

__all__ = ["Fixed", "Flag", "Held", "Surroundings", "entry_of_call", "entry_of_graph"]

Fixed = tuple[dict[str, Any], str, torch.Tensor, _core.Signature]
"""A tensor of a module: the dictionary it is in, its name there, itself, and how it lies."""
Flag = tuple[torch.nn.Module, bool]
"""A module, and whether it was training."""
Held = Callable[[int, torch.Tensor | None, Any], None]
"""Called before a result is overwritten that a caller still has."""


class Surroundings:
    """What a function can reach besides its arguments, as it is now.

    Args:
        modules: The modules.
    """

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        parts = {part: None for module in modules for part in module.modules()}
        self.flags: list[Flag] = [(part, part.training) for part in parts]
        self.fixed: list[Fixed] = []
        self.owned: set[int] = set()
        self.storages: set[int] = set()
        self.needs_grad = False
        for part in parts:
            for owner in (part._parameters, part._buffers):
                self._add(owner)

    def _add(self, owner: dict[str, Any]) -> None:
        for name, tensor in owner.items():
            if tensor is None:
                continue
            self.needs_grad |= tensor.requires_grad
            if id(tensor) in self.owned:
                continue
            self.owned.add(id(tensor))
            try:
                signature = _torch.signature(tensor)
            except Exception:  # a layout without an address: it cannot be looked after
                continue
            self.storages.add(_torch.storage_id(tensor.untyped_storage()))
            self.fixed.append((owner, name, tensor, signature))


def entry_of_graph(
    recorded: Recorded,
    call: Call,
    surroundings: Surroundings,
    *,
    copies: bool,
    held: Held | None,
    lane: _core.Lane | None,
) -> _core.Entry:
    """The entry of a captured key.

    Args:
        recorded: The capture.
        call: A call of the key.
        surroundings: What its function reaches.
        copies: Whether results are copies.
        held: Who is told of results that a caller still has.
        lane: The stream that the pool was used on last; None where there is just one.
    """
    work: Any = recorded.graph
    if recorded.mutated:
        work = functools.partial(_write_back, recorded.feed(), recorded)
    elif lane is None or not recorded.is_single:
        work = recorded.feed()
    return _core.Entry(
        *call.patterns([_torch.signature(static) for static in recorded.statics]),
        modes=call.mode,
        flags=surroundings.flags,
        fixed=surroundings.fixed,
        work=work,
        outputs=returned(recorded, recorded.outputs, surroundings, copies=copies, held=held),
        lane=lane,
    )


def entry_of_call(
    function: Callable[..., Any],
    call: Call,
    surroundings: Surroundings,
    lane: _core.Lane | None = None,
    *,
    is_replay: bool = False,
) -> _core.Entry:
    """An entry whose calls are handed on as they are.

    Args:
        function: What they are handed to.
        call: A call of the key.
        surroundings: What its function reaches.
        lane: As for :func:`entry_of_graph`.
        is_replay: Whether it replays a graph, which reads parameters where they lay.
    """
    return _core.Entry(
        *call.patterns([_torch.signature(tensor) for tensor in call.tensors]),
        modes=call.mode,
        flags=surroundings.flags,
        fixed=surroundings.fixed if is_replay else [],
        work=function,
        outputs=None,
        lane=lane,
    )


def returned(
    recorded: Recorded,
    outputs: Sequence[Any],
    surroundings: Surroundings,
    *,
    copies: bool,
    held: Held | None,
) -> tuple[list[tuple[Any, ...]], Any, Any]:
    """What a native entry returns for these leaves of a result."""
    own = {_torch.storage_id(static.untyped_storage()) for static in recorded.statics}
    leaves = [_leaf(recorded, output, own, surroundings.storages, copies) for output in outputs]
    build: Any = functools.partial(_build, recorded.spec)
    if recorded.spec.is_leaf():
        build = "single"
    elif recorded.is_flat_tuple:
        build = "tuple"
    return leaves, build, None if held is None or copies else (held, sys._getframe, user_frame)


def _leaf(
    recorded: Recorded, output: Any, statics: set[int], outside: set[int], copies: bool
) -> tuple[Any, ...]:
    if not isinstance(output, torch.Tensor):
        return "constant", output
    place = recorded.argument(output)
    if place is not None:
        return "argument", place
    if output.layout is not torch.strided or output.device != recorded.device:
        return "constant", output
    number = _torch.storage_id(output.untyped_storage())
    if number in outside:
        # What it lies in is the caller's, too.
        return "constant", output
    if copies or number in statics or output.numel() == 0 or output.is_conj() or output.is_neg():
        return "copied", output.detach()
    storage = recorded.storage(output)
    return "static", output.detach(), _torch.signature(output), storage


def _build(spec: Any, leaves: list[Any]) -> Any:
    return tree_unflatten(leaves, spec)


def _write_back(
    feed: Callable[[tuple[Any, ...]], None], recorded: Recorded, tensors: tuple[Any, ...]
) -> None:
    """Replay, and give the caller's tensors what the function has written to its own."""
    feed(tensors)
    for place in recorded.mutated:
        tensors[place].copy_(recorded.statics[place])
