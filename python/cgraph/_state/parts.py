"""What modules consist of, and whether they train."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from cgraph import _torch
from cgraph._state.attributes import is_number, is_torchs, put_back_whole
from cgraph._state.holders import is_same_function

__all__ = ["Parts"]


class Parts:
    """Classes, parts, parameters, buffers, hooks and flags of modules, as they are now.

    Args:
        parts: The modules, with those that they consist of.

    Attributes:
        flags: Each module, and whether it trains.
    """

    def __init__(self, parts: Iterable[torch.nn.Module]) -> None:
        self._known = [_Known.now(part) for part in {id(part): part for part in parts}.values()]
        self.flags = [(one.part, one.part.training) for one in self._known]
        self._hooks = [pair for one in self._known for pair in one.hooks]

    @property
    def exchanged(self) -> str | None:
        """Why a function is not captured that puts a module where another one was; or None."""
        for one in self._known:
            now = one.part._modules
            for name, there in one.inner["_modules"][1].items():
                value = now.get(name)
                if value is not there and not (value is None or is_same_function(value, there)):
                    return (
                        f"the function puts another module into {name}, and replays do not:"
                        " exchange modules around the call"
                    )
        return None

    def put_back(self, has_made: Callable[[Any], bool]) -> None:
        """Let all be as it was; attributes alone of modules of torch's own, which only they set.

        Args:
            has_made: Tells of a value whether what a call has made is in it. Other attributes and
                buffers that are new may be another thread's.
        """
        for one in self._known:
            one.put_back(has_made)

    def note_hooks(self) -> None:
        """Note which hooks of the user's there are now, for :meth:`put_back_hooks`."""
        self._hooks = [(place, _torch.hooks_of_users(place)) for place, _ in self._hooks]

    def put_back_hooks(self) -> None:
        """Let these be those that there were."""
        for place, hooks in self._hooks:
            _put_back_hooks(place, hooks)


class _Known(NamedTuple):
    """One module.

    Attributes:
        part: The module.
        kind: Its class, which parametrizations change.
        values: Its attributes, if it is one of torch's own.
        inner: Its dictionaries of parts, parameters and buffers, and what they hold.
        hooks: Where its hooks are, and those of the user's.
        containers: What its own other dictionaries and lists hold, if it is one of torch's.
    """

    part: torch.nn.Module
    kind: type[torch.nn.Module]
    values: dict[str, Any] | None
    inner: dict[str, tuple[dict[str, Any], dict[str, Any]]]
    hooks: list[tuple[Any, dict[int, Any]]]
    containers: dict[str, Any]

    @classmethod
    def now(cls, part: torch.nn.Module) -> _Known:
        """As it is now."""
        values = vars(part)
        inner = {name: (values[name], dict(values[name])) for name in _INNER}
        hooks = [(one, _torch.hooks_of_users(one)) for one in _torch.hooks_of(part)]
        own = dict(values) if is_torchs(part) else None
        others = {name: one for name, one in (own or {}).items() if name not in _OF_MODULES}
        held = {
            name: found for name, one in others.items() if (found := _items_of(one)) is not None
        }
        return cls(part, type(part), own, inner, hooks, held)

    def put_back(self, has_made: Callable[[Any], bool]) -> None:
        """Let it be as it was."""
        if type(self.part) is not self.kind:
            with suppress(TypeError):  # of another layout
                self.part.__class__ = self.kind
        values = vars(self.part)
        if self.values is not None:
            put_back_whole(values, self.values, lambda one: has_made(one) or not is_number(one))
            for name, items in self.containers.items():
                _fill(values[name], items)
        for name, (known, before) in self.inner.items():
            values[name] = known
            put_back_whole(known, before, has_made if name == "_buffers" else None)
        for place, hooks in self.hooks:
            _put_back_hooks(place, hooks)


def _put_back_hooks(place: Any, hooks: dict[int, Any]) -> None:
    """Let the hooks of the user's in a place be these."""
    now = _torch.hooks_of_users(place)
    there: dict[int, Any] = place[0][place[1]]
    for number in now.keys() - hooks.keys():
        there.pop(number, None)
    there.update({number: hooks[number] for number in hooks.keys() - now.keys()})


def _fill(one: Any, items: Any) -> None:
    """Let a dictionary or a list hold what it held."""
    now, before = ([*each.items()] if isinstance(each, dict) else [*each] for each in (one, items))
    # By identity: tensors and arrays compare by their elements.
    if len(now) != len(before) or not all(map(_is_same_item, now, before)):
        one.clear()
        (one.update if isinstance(one, dict) else one.extend)(items)


def _items_of(one: Any) -> Any:
    """What a dictionary or a list of a module's holds, if that is little."""
    bases: tuple[Any, ...] = (dict, list)
    base = next((base for base in bases if issubclass(type(one), base)), None)
    return base.copy(one) if base is not None and base.__len__(one) <= _LONGEST else None


def _is_same_item(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, tuple) and all(map(operator.is_, one, other)))


_OF_MODULES = frozenset(vars(torch.nn.Module()))
# Longer ones are of data.
_LONGEST = 4096
_INNER = ("_modules", "_parameters", "_buffers")
