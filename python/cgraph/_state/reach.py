"""What a function reaches besides its arguments, as far as it was looked for."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cgraph import _core, _torch
from cgraph._state.attributes import dictionaries_of, is_alike, is_torchs
from cgraph._state.holders import Aspect, Holder, is_same_function, is_view
from cgraph._state.stepping import HOOKS_OF_STEPS
from cgraph._state.surroundings import holders_of, modules_of, tensors_of

__all__ = ["Reach", "Surroundings"]

# For so many modules among the arguments it is remembered what they have.
_REMEMBERED = 16


class Reach:
    """What one function reaches.

    Args:
        function: The function.
        turn: What lets one thread at a time replay it.
    """

    def __init__(self, function: Callable[..., Any], turn: _core.Turn) -> None:
        self._function = function
        self._turn = turn
        # By the modules among the arguments, which they keep alive.
        self._known: dict[tuple[int, ...], Surroundings] = {}

    def known(self, given: Sequence[torch.nn.Module] = ()) -> Surroundings:
        """What was there when somebody looked, or what is there now if something has moved.

        Args:
            given: The modules among the arguments.
        """
        known = self._known.get(tuple(map(id, given)))
        return self.now(given) if known is None or known.moved is not None else known

    def now(
        self, given: Sequence[torch.nn.Module], known: Surroundings | None = None
    ) -> Surroundings:
        """What is there now, which takes time to find.

        Args:
            given: The modules among the arguments.
            known: What is returned if there are no other modules; nothing of it has moved.
        """
        modules = [*modules_of(self._function), *given]
        if known is None or not known.is_of(modules):
            known = Surroundings(self._function, modules, self._turn)
            self._known[tuple(map(id, given))] = known
            if len(self._known) > _REMEMBERED:
                del self._known[next(iter(self._known))]
        return known

    def after_call(self, given: Sequence[torch.nn.Module], known: Surroundings) -> Surroundings:
        """What is there after a first call: it may have made modules, and some libraries add hooks.

        Args:
            given: The modules among the arguments.
            known: What was there before. It stays if anything else of it has moved.
        """
        if known.moved is None:
            return self.now(given, known)
        return self.now(given) if known.has_other_hooks else known

    def clear(self) -> None:
        """Forget all."""
        self._known.clear()


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
        requires_grad: Whether each of the modules' parameters requires a gradient, and each buffer
            that does.
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
        # The ``id`` of those that are settings of optimizers.
        self._groups: set[int] = set()
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
                if owner or _may_get_more(part):
                    self._add(path, owner)
            # One that is replaced has other tensors.
            self._owners.append(part._modules)
            hooks += [(path or "the module", one) for one in _torch.hooks_of(part)]
        self._with_flags, self._flags = with_flags, _core.Flags(with_flags)
        self._hooks = [(name, one, _torch.hooks_of_users(one)) for name, one in hooks]
        self._items = [list(owner.items()) for owner in self._owners]
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        self._layouts = [_torch.layout_of(tensor) for tensor in self._tensors]
        self.requires_grad = tuple(
            tensor.requires_grad
            for tensor in self._tensors
            # The first call may register buffers.
            if tensor.requires_grad or isinstance(tensor, torch.nn.Parameter)
        )
        self._find()
        others = tensors_of(function, modules=False)
        memories = [_torch.memory_of(one) for one in others if id(one) not in self.owned]
        self.storages.update(_torch.storage_id(one) for one in memories if one is not None)

    def with_holders(self, holders: Sequence[Holder], full: Sequence[Holder]) -> Surroundings:
        """The same, with what must still be there, and tensors where they are.

        Nothing may have moved: all else is as it is now, too.

        Args:
            holders: Where it is.
            full: Likewise, with all that is in dictionaries there.
        """
        other = copy.copy(self)
        known = {id(part) for module in self.modules for part in module.modules()}
        modules = [one.value for one in holders if isinstance(one.value, torch.nn.Module)]
        # Those that are found behind objects; the others are followed anyway.
        parts = [part for module in modules for part in module.modules() if id(part) not in known]
        holders = [*holders, *full, *(one for part in parts for one in _inside(part))]
        other._holders = [*self._holders, *holders]
        hooks = [one for part in parts for one in _torch.hooks_of(part)]
        known_hooks = [("a module", one, _torch.hooks_of_users(one)) for one in hooks]
        other._hooks = [*self._hooks, *known_hooks]
        tensors = (one for one in holders if isinstance(one.value, torch.Tensor))
        strided = [one for one in tensors if one.value.layout is torch.strided]
        memories = filter(None, (_torch.memory_of(one.value) for one in strided))
        other.storages = self.storages.union(map(_torch.storage_id, memories))
        other._names = [*self._names, *(_words(one) for one in strided)]
        other._tensors = [*self._tensors, *(one.value for one in strided)]
        other._addresses = [*self._addresses, *(one.value.data_ptr() for one in strided)]
        layouts = (_torch.layout_of(one.value) for one in strided)
        other._layouts = [*self._layouts, *layouts]
        # With what is in these, as the state of an optimizer is.
        other._groups = {id(one.value) for one in full if one.name == "param_groups"}
        held = [one.value for one in full if isinstance(one.value, dict)]
        inner = (value for one in held for value in one.values())
        dictionaries = [*held, *(one for one in inner if isinstance(one, dict))]
        # Which may get more parts.
        dictionaries += [part._modules for part in parts]
        dictionaries += [
            owner
            for part in filter(_may_get_more, parts)
            for owner in (part._parameters, part._buffers)
        ]
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
        others = [(one, now) for one in self._holders if (now := one.now) is not one.value]
        for holder, now in others:
            if not any(same(now, holder.value) for same in (is_alike, is_same_function, is_view)):
                return _words(holder)
        # What cannot be named is a parameter, unless functions, views or the content of arrays were
        # made anew and nothing else.
        is_anew = (others or self._has_others) and not (grad and self._has_other_flags)
        return self.find_displaced() or self._replaced() or (None if is_anew else "a parameter")

    def find_displaced(self) -> str | None:
        """The first tensor that lies elsewhere, or in another layout; None if none does."""
        if self.fixed is None or self.fixed.is_in_place(False, hooks=False):
            return None
        known = zip(self._names, self._tensors, self._addresses, self._layouts, strict=True)
        for name, one, at, layout in known:
            if one.data_ptr() != at or _torch.layout_of(one) != layout:
                return name
        return None

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

    @property
    def _has_other_flags(self) -> bool:
        """Whether a tensor requires a gradient that did not, or does not any more."""
        return [one.requires_grad for one in self._tensors] != self._requires_grad

    @property
    def _has_others(self) -> bool:
        """Whether something else is where a module has a tensor or a part."""
        pairs = zip(self._owners, self._items, strict=True)
        return any(owner.get(name) is not one for owner, known in pairs for name, one in known)

    def _find(self) -> None:
        """Note where all is now."""
        self._requires_grad = [one.requires_grad for one in self._tensors]
        self.fixed: _core.Fixed | None = None
        if self._owners or self._holders:
            self.fixed = _torch.fixed(
                ((one.owner, one.name, one.value, one.path) for one in self._holders),
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

    def _replaced(self) -> str | None:
        hooks = [one for one in self._holders if one.name in _HOOKS]
        for owner, known in zip(self._owners, self._items, strict=True):
            name = next((one.name for one in hooks if one.value is owner), None)
            if name is not None and [*owner.items()] != known:
                return _NAMES[name]
        names = (
            f"the setting {name} of an optimizer"
            if id(owner) in self._groups
            else f"the module {name}"
            if isinstance(known.get(name, owner.get(name)), torch.nn.Module)
            else name
            for owner, known in zip(self._owners, map(dict, self._items), strict=True)
            for name in {**owner, **known}
            if name not in known or name not in owner or not _are_same(owner[name], known[name])
        )
        found: Any = next(names, None)
        # The state of an optimizer is found by its parameters.
        return found if isinstance(found, str | None) else _NAMES["state"]


def _may_get_more(part: torch.nn.Module) -> bool:
    """Whether somebody may give a module parameters and buffers later, as few of torch's own."""
    containers = torch.nn.ParameterDict, torch.nn.ParameterList
    return isinstance(part, containers) or not is_torchs(part)


def _inside(part: torch.nn.Module) -> list[Holder]:
    """What a module has, and whether it is training."""
    owners = part._parameters, part._buffers, part._modules
    found = [Holder(owner, name, one) for owner in owners for name, one in owner.items()]
    return [*found, Holder(vars(part), "training", part.training)]


def _are_same(now: object, then: object) -> bool:
    """Whether a value is the same object, or a number or a tuple of them that equals it."""
    plain = (int, float, str, tuple)
    is_equal = isinstance(now, plain) and type(now) is type(then) and now == then
    return now is then or is_equal or is_view(now, then)


def _words(holder: Holder) -> str:
    """What is found there, in words."""
    if holder.variable is not None and any(type(step) is not Aspect for step in holder.path):
        return f"{holder.dotted}, which the function closes over"
    if holder.variable is not None:
        return f"the variable {holder.variable} that the function closes over"
    if holder.name == "state" and not isinstance(holder.value, dict):
        return "state"
    return _NAMES.get(holder.name, holder.title)


_NAMES = {
    "cell_contents": "what the function closes over",
    "grad": "a gradient",
    "state": "the state of an optimizer",
    "param_groups": "a group of an optimizer",
    "training": "whether a module trains",
    **dict.fromkeys(_torch.HOOKS_OF_LEAVES, "a hook of a tensor"),
    **dict.fromkeys(HOOKS_OF_STEPS, "a hook of an optimizer"),
}
_HOOKS = {*_torch.HOOKS_OF_LEAVES, *HOOKS_OF_STEPS}
