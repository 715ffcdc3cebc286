"""Native entries: the calls that are replays of a captured graph, and what they return."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cgraph import _core, _torch
from cgraph._attributes import dictionaries_of
from cgraph._calls import Call
from cgraph._footprint import in_blocks
from cgraph._held import Holding
from cgraph._leaving import Leaving
from cgraph._recorded import Recorded
from cgraph._source import calling_frame
from cgraph._surroundings import Holder, held_now, holders_of, tensors_of
from cgraph._torch import tree_unflatten
from cgraph._training import Trained

__all__ = ["Surroundings", "entry_of_call", "entry_of_graph"]


class Surroundings:
    """What a function can reach besides its arguments, as it is now.

    Args:
        function: The function.
        modules: The modules, with those among the arguments.
        turn: What lets one thread at a time replay.

    Attributes:
        modules: The same.
        turn: The same.
        dictionaries: What holds the attributes that it may set.
        fixed: The modules' tensors, where they lie; None if there are none.
        owned: The ``id`` of each of these.
        reason_against: Why a function that reaches them is better not captured; None if it is not.
        storages: The numbers of their storages, and of those of the other tensors.
        requires_grad: Whether each of the modules' tensors requires a gradient.
        needs_grad: Whether one of them requires a gradient.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        modules: Sequence[torch.nn.Module],
        turn: _core.Turn,
    ) -> None:
        self.modules = modules
        self.turn = turn
        parts = [one for module in modules for one in module.named_modules()]
        self.dictionaries = dictionaries_of(function, [part for _, part in parts])
        self._holders = holders_of(function)
        with_flags: list[dict[str, Any]] = []
        self.owned: set[int] = set()
        self.storages: set[int] = set()
        self.needs_grad = False
        self.reason_against: str | None = None
        self._owners: list[dict[str, Any]] = []
        self._tensors: list[torch.Tensor] = []
        self._names: list[str] = []
        hooks = [("all modules", one) for one in _torch.hooks_of(None)]
        for path, part in parts:
            if isinstance(part, torch.jit.ScriptModule):
                self.reason_against = self.reason_against or (
                    "TorchScript, whose parameters and flags cannot be watched:"
                    f" {path or 'the module'} is of torch.jit"
                )
                continue
            if "training" in vars(part):
                with_flags.append(vars(part))
            for owner in (part._parameters, part._buffers):
                if owner:
                    self._add(path, owner)
            # One that is replaced has other tensors.
            self._owners.append(part._modules)
            hooks += [(path or "the module", one) for one in _torch.hooks_of(part)]
        self._with_flags, self._flags = with_flags, _core.Flags(with_flags)
        self._hooks = [(name, one, _torch.hooks_of_users(one)) for name, one in hooks]
        self._items = [list(owner.items()) for owner in self._owners]
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        self.requires_grad = tuple(tensor.requires_grad for tensor in self._tensors)
        self._find()
        others = tensors_of(function, modules=False)
        memories = [_torch.memory_of(one) for one in others if id(one) not in self.owned]
        self.storages.update(_torch.storage_id(one) for one in memories if one is not None)

    def with_holders(self, holders: Sequence[Holder], full: Sequence[Holder]) -> Surroundings:
        """The same, with what must still be there, and tensors where they are.

        Args:
            holders: Where it is.
            full: Likewise, with all that is in dictionaries there.
        """
        other = copy.copy(self)
        holders = [*holders, *full]
        other._holders = [*self._holders, *holders]
        tensors = (one for one in holders if isinstance(one[2], torch.Tensor))
        strided = [one for one in tensors if one[2].layout is torch.strided]
        other._names = [*self._names, *(_named(name) for _, name, _ in strided)]
        other._tensors = [*self._tensors, *(tensor for *_, tensor in strided)]
        other._addresses = [*self._addresses, *(one.data_ptr() for *_, one in strided)]
        # With what is in these, as the state of an optimizer is.
        held = [value for *_, value in full if isinstance(value, dict)]
        inner = (value for one in held for value in one.values())
        dictionaries = [*held, *(one for one in inner if isinstance(one, dict))]
        other._owners = [*self._owners, *dictionaries]
        other._items = [*self._items, *(list(one.items()) for one in dictionaries)]
        other._find()
        return other

    def is_of(self, modules: Sequence[torch.nn.Module]) -> bool:
        """Whether these are the modules."""
        return [*map(id, modules)] == [*map(id, self.modules)]

    @property
    def training(self) -> tuple[bool, ...]:
        """Whether each of the modules is training now."""
        return self.flags.values

    @property
    def flags(self) -> _core.Flags:
        """The modules, and whether they are training now."""
        flags = self._flags
        if not flags.are_same():
            flags = self._flags = _core.Flags(self._with_flags)
        return flags

    @property
    def moved(self) -> str | None:
        """What is another one now, or a tensor that lies elsewhere; None if there is nothing."""
        grad = torch.is_grad_enabled()
        if self.fixed is None or self.fixed.is_in_place(grad):
            return None
        if hooked := self._hooked:
            return f"a hook of {hooked}"
        # cgraph's own hooks may be there, while another capture follows modules.
        if self.fixed.is_in_place(grad, hooks=False):
            return None
        for holder in self._holders:
            if held_now(holder) is not holder[2]:
                return _named(holder[1])
        return self.find_displaced() or self._replaced()

    def find_displaced(self) -> str | None:
        """The first tensor that lies elsewhere; None if none does."""
        if self.fixed is None or self.fixed.is_in_place(False, hooks=False):
            return None
        addresses = zip(self._names, self._tensors, self._addresses, strict=True)
        return next((name for name, one, at in addresses if one.data_ptr() != at), None)

    @property
    def has_other_hooks(self) -> bool:
        """Whether the user's hooks are others now, and nothing else is."""
        grad = torch.is_grad_enabled()
        if self.fixed is None or self.fixed.is_in_place(grad):
            return False
        return bool(self._hooked and self.fixed.is_in_place(grad, hooks=False))

    @property
    def _hooked(self) -> str | None:
        """What has other hooks of the user's than it had."""
        for name, where, known in self._hooks:
            now = _torch.hooks_of_users(where)
            if now.keys() != known.keys() or any(now[one] is not known[one] for one in known):
                return name
        return None

    def _find(self) -> None:
        """Note where all is now."""
        self.fixed: _core.Fixed | None = None
        if self._owners or self._holders:
            self.fixed = _torch.fixed(
                self._holders,
                self._owners,
                [(*one, known) for _, one, known in self._hooks],
                self._tensors,
                self._addresses,
            )

    def _add(self, path: str, owner: dict[str, Any]) -> None:
        self._owners.append(owner)
        for name, tensor in owner.items():
            if tensor is None or id(tensor) in self.owned:
                continue
            if torch.nn.parameter.is_lazy(tensor):
                self.reason_against = (
                    f"parameters that the first call makes: call {path or 'the module'} once"
                    " before it is graphed"
                )
                continue
            self.needs_grad |= tensor.requires_grad
            self.owned.add(id(tensor))
            if tensor.layout is torch.strided:
                self.storages.add(_torch.storage_id(tensor.untyped_storage()))
                self._tensors.append(tensor)
                self._names.append(f"{path}.{name}" if path else name)

    def _replaced(self) -> str:
        of_leaves = [one for _, name, one in self._holders if name in _torch.HOOKS_OF_LEAVES]
        for owner, known in zip(self._owners, self._items, strict=True):
            if any(owner is one for one in of_leaves) and [*owner.items()] != known:
                return _NAMES["_backward_hooks"]
        names = (
            name
            for owner, known in zip(self._owners, self._items, strict=True)
            for name, now in owner.items()
            if all(now is not one for _, one in known)
        )
        found = next(names, "a parameter")
        # The state of an optimizer is found by its parameters.
        return found if isinstance(found, str) else _NAMES["state"]


def _named(name: object) -> str:
    """What is held under a name, in words."""
    return _NAMES.get(name, name) if isinstance(name, str) else f"item {name!r} of a container"


_NAMES = {
    "cell_contents": "what the function closes over",
    "grad": "a gradient",
    "state": "the state of an optimizer",
    **dict.fromkeys(_torch.HOOKS_OF_LEAVES, "a hook of a tensor"),
}


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

    def __call__(self, tensors: tuple[torch.Tensor, ...]) -> None:
        if self._leaving.is_seen_elsewhere(tensors):
            self._leaving.run_eagerly(tensors)
            return
        self._feed(tensors)
        self._leaving.leave(tensors, self._statics)
