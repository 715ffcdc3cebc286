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

__all__ = ["Flag", "Held", "Surroundings", "entry_of_call", "entry_of_graph"]

Flag = tuple[torch.nn.Module, bool]
"""A module, and whether it was training."""
Held = Callable[[int, torch.Tensor | None, Any], None]
"""Called before a result is overwritten that a caller still has."""


class Surroundings:
    """What a function can reach besides its arguments, as it is now.

    Args:
        modules: The modules.

    Attributes:
        flags: The modules, and whether they are training.
        fixed: Their tensors, where they lie; None if there are none.
        owned: The ``id`` of each of these.
        storages: The numbers of their storages.
        needs_grad: Whether one of them requires a gradient.
    """

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self.flags: list[Flag] = [(module, module.training) for module in modules]
        self.owned: set[int] = set()
        self.storages: set[int] = set()
        self.needs_grad = False
        self._owners: list[dict[str, Any]] = []
        self._tensors: list[torch.Tensor] = []
        self._names: list[str] = []
        for module in modules:
            for path, part in module.named_modules():
                for owner in (part._parameters, part._buffers):
                    if owner:
                        self._add(path, owner)
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        self.fixed: _core.Fixed | None = None
        if self._owners:
            self.fixed = _torch.fixed(self._owners, self._tensors, self._addresses)

    @property
    def moved(self) -> str | None:
        """The name of a tensor that is another one now or lies elsewhere; None if there is none."""
        if self.fixed is None or self.fixed.is_in_place():
            return None
        addresses = zip(self._names, self._tensors, self._addresses, strict=True)
        elsewhere = (name for name, one, address in addresses if one.data_ptr() != address)
        return next(elsewhere, None) or self._replaced()

    def _add(self, path: str, owner: dict[str, Any]) -> None:
        self._owners.append(owner)
        for name, tensor in owner.items():
            if tensor is None or id(tensor) in self.owned:
                continue
            self.needs_grad |= tensor.requires_grad
            self.owned.add(id(tensor))
            if tensor.layout is torch.strided:
                self.storages.add(_torch.storage_id(tensor.untyped_storage()))
                self._tensors.append(tensor)
                self._names.append(f"{path}.{name}" if path else name)

    def _replaced(self) -> str:
        known = {id(tensor) for tensor in self._tensors}
        names = (
            name for owner in self._owners for name, now in owner.items() if id(now) not in known
        )
        return next(names, "a parameter")


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
    if recorded.debugged is not None:
        work = recorded.debugged
    elif recorded.mutated:
        work = functools.partial(_write_back, recorded.feed(), recorded)
    elif lane is None:
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
) -> _core.Entry:
    """An entry whose calls are handed on as they are.

    Args:
        function: What they are handed to.
        call: A call of the key.
        surroundings: What its function reaches.
        lane: As for :func:`entry_of_graph`.
    """
    return _core.Entry(
        *call.patterns([_torch.signature(tensor) for tensor in call.tensors]),
        modes=call.mode,
        flags=surroundings.flags,
        fixed=None,
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
