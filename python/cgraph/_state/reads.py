"""What a function reads of Python, which somebody may change between its calls."""

from __future__ import annotations

import functools
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import torch

from cgraph import _core, _torch
from cgraph._state.attributes import Place, is_alike, is_number, is_torchs, parts_of, place_of
from cgraph._state.code import Reached, is_installed, is_looked_into, is_users
from cgraph._state.holders import Aspect, Holder, Way, slots_of, vars_of
from cgraph._state.surroundings import FUNCTIONS, Lasting, places_of

__all__ = ["Reads", "Values", "key_of", "still_there"]

# No more are compared at each call, and longer containers are of data.
_MOST, _LONGEST = 4096, 64
# Of these it matters which one it is.
_CALLED = (*FUNCTIONS, types.BuiltinFunctionType, types.MethodDescriptorType, type)
_OF_TENSORS = frozenset(
    name for name in dir(torch.Tensor) if not callable(getattr(torch.Tensor, name, None))
)


class Reads:
    """The places of numbers, texts and functions that the code of a function reads.

    Also those where None is. Of torch's own modules only what the user's code reads of them, and
    what :func:`cgraph._torch.settings_of` names.

    Args:
        reached: What its code comes to.
    """

    def __init__(self, reached: Reached) -> None:
        self._reached = reached
        self._loads = reached.reads
        # Whoever loads these from anything but ``self`` has a tensor.
        self._of_objects = self._loads.others - _OF_TENSORS
        # The likely ones first: there may be too many.
        self._near: dict[Way, Holder] = {}
        self._inside: dict[Way, Holder] = {}
        self._of_parts: dict[Way, Holder] = {}
        # The dictionaries of objects that were added, and containers that were looked into.
        self._objects: set[int] = set()
        self._seen: set[int] = set()
        self._of_kinds: dict[type, list[tuple[str, Any]]] = {}

    @property
    def found(self) -> list[Holder]:
        """The places."""
        return [*self._near.values(), *self._inside.values(), *self._of_parts.values()][:_MOST]

    def add_function(self, function: object) -> None:
        """Add functions and classes that a function finds in variables."""
        for one in places_of(function):
            is_variable = isinstance(one.owner, types.CellType) or _is_scope(one.owner)
            if is_variable and issubclass(type(one.value), _CALLED) and self._begins(one):
                self._add(self._near, one)
                self._add_class(one.value)

    def add(self, found: Iterable[Holder]) -> None:
        """Add numbers and texts in variables and classes, if the code reads these."""
        for one in found:
            if id(one.owner) not in self._objects and self._begins(one):
                self._add(self._near, one)

    def add_object(self, one: Any) -> None:
        """Add what a module, or the object of a method, has of itself and by its class."""
        is_part = issubclass(type(one), torch.nn.Module)
        own = vars(one) if is_part else vars_of(one)
        if id(own) in self._objects:
            return
        self._objects.add(id(own))
        found = self._of_parts if is_part else self._near
        if is_part:
            for name in _torch.settings_of(one):
                self._add(found, Holder(own, name, own.get(name)))
        is_of_torch = is_part and is_torchs(one)
        for name, value in [*own.items()]:
            # Modules that train, or do not, have keys of their own.
            is_read = name in self._of_objects if is_of_torch else self._is_read(name, value)
            if is_read and name != "training":
                self._add(found, Holder(own, name, value))
                self._add_class(value)
        for name, value in [] if is_of_torch else self._of_class(type(one)):
            if name not in own:
                # It may get one of its own.
                self._add(found, Holder(own, name, None))
                self._add(found, Holder(type(one), name, value))

    def add_inside(self, way: Holder, value: Any) -> None:
        """Add what an object or a container has, at the end of a way that the code names."""
        if is_number(value) or not self._begins(way):
            return
        if id(value) in self._seen:
            # On this way, too, there may be another one.
            self._inside.setdefault(way.way, way)
            return
        self._seen.add(id(value))
        items = self._items_of(value)
        if items is not None and len(items) <= _LONGEST:
            for name, one in items:
                if type(name) in (str, int, types.MemberDescriptorType, Aspect):
                    self._add(self._inside, way._replace(value=one, path=(*way.path, name)))
                    self._add_class(one)

    def _items_of(self, value: Any) -> list[tuple[Any, Any]] | None:
        """What is read of an object or a container; None if that is nothing."""
        kind = type(value)
        if issubclass(kind, dict):
            items = [*dict.items(dict.copy(value))]
            if all(_is_watched(one) for _, one in items):
                # One that is empty may be for tables, which calls make.
                has_length = kind is dict and bool(items)
                return [*items, *_whole(kind, len(items) if has_length else None)]
            # It has things of many kinds, of which code names those that it wants.
            words = self._loads.words
            items = [one for one in items if type(one[0]) is str and one[0] in words]
            return [*items, *_whole(kind, None)]
        if issubclass(kind, list | tuple | deque):
            base: Any = next(one for one in (list, tuple, deque) if issubclass(kind, one))
            items = [*enumerate([*base.__iter__(value)])]
            # Lists of tensors, and of what has some, are data that calls make.
            has_length = kind in (list, tuple) and not any(_is_data(one) for _, one in items)
            return [*items, *_whole(kind, len(items) if has_length else None)]
        if kind is set:
            kinds = set(map(type, set.copy(value))) if len(value) <= _LONGEST else {object}
            # There is no way to an item.
            is_plain = kinds <= {str} or kinds <= {int}
            return [(Aspect.CONTENT, frozenset(value))] if is_plain else None
        if not is_looked_into(kind) or issubclass(kind, torch.nn.Module):
            return None
        own = vars_of(value)
        items = [*slots_of(value), *dict.copy(own).items()]
        items = [one for one in items if self._is_read(_name(one[0]), one[1], is_behind=True)]
        for name, one in self._of_class(kind):
            if name not in own:
                items.append((name, None))
                self._add(self._near, Holder(kind, name, one))
        return [*items, *_whole(kind, None)]

    def _add_class(self, value: object) -> None:
        """Add what a class has that is found somewhere."""
        if issubclass(type(value), type) and is_users(vars(value).get("__module__")):
            for name, one in self._of_class(value):  # type: ignore[arg-type]
                self._add(self._near, Holder(value, name, one))

    def _of_class(self, kind: type) -> list[tuple[str, Any]]:
        """What a class has that code reads, but for what binds to its objects."""
        if kind not in self._of_kinds:
            found: dict[str, Any] = {}
            for base in reversed(kind.__mro__):
                found.update(vars(base))
            is_of_library = is_installed(vars(kind).get("__module__"))
            self._of_kinds[kind] = [
                (name, value)
                for name, value in found.items()
                if not is_of_library
                and (value is None or is_number(value))
                and not name.startswith("__")
                and self._is_read(name, value)
            ]
        return self._of_kinds[kind]

    def _begins(self, way: Holder) -> bool:
        """Whether the code reads what a way begins with."""
        owner, name = way.owner, way.name
        if isinstance(owner, types.CellType):
            return id(owner) in self._reached.cells
        if _is_scope(owner):
            named = name in self._loads.variables or self._is_read(name, way.value)
            return named and not is_installed(owner.get("__name__"))
        if issubclass(type(owner), type):
            is_of_library = is_installed(vars(owner).get("__module__"))
            return not is_of_library and self._is_read(name, way.value)
        # Defaults and given arguments stay, and what is behind them may not.
        if isinstance(owner, Lasting):
            return bool(way.path) or not _is_watched(way.value)
        is_attribute = id(owner) in self._objects or name.startswith("__")
        return not is_attribute or self._is_read(name, way.value)

    def _is_read(self, name: Any, value: Any, *, is_behind: bool = False) -> bool:
        """Whether code loads an attribute; one that is behind others by any name."""
        loads = self._loads
        if self._reached.has_breaks and name in self._reached.stores:
            # What breaks assign is theirs.
            return False
        is_called = not is_value(value) and name in self._reached.names
        others = loads.others if is_behind else self._of_objects
        return name in loads.own or name in others or name in loads.asked or is_called

    def _add(self, found: dict[Way, Holder], one: Holder) -> None:
        if _is_watched(one.value):
            found.setdefault(one.way, one)


class Values:
    """The numbers and texts that graphs have read, as they were when they were read first.

    Nothing is kept for graphs that are gone.
    """

    def __init__(self) -> None:
        # Graphs may go at any time, on any thread: it is replaced as a whole.
        self._known = _Known({}, None)
        self._readers: dict[weakref.ref[Any], frozenset[Way]] = {}

    @property
    def are_any(self) -> bool:
        """Whether a graph has read some."""
        return bool(self._known.first)

    def note(self, reader: Any) -> None:
        """Note the places that a graph reads, those that are known by what was there first.

        Args:
            reader: What has the graph; as its ``reads``, where they are.
        """
        found = {one.way: one for one in reader.reads if is_value(one.value)}
        if found:
            forget = functools.partial(Values._forget, weakref.ref(self))
            self._readers[weakref.ref(reader, forget)] = frozenset(found)
            self._known = _Known({**found, **self._known.first}, None)

    def changed(self) -> list[tuple[Holder, Any]]:
        """Where those are that are others now, and what is there."""
        known = self._known
        if not known.first:
            return []
        if known.fixed is None:
            places = ((one.owner, one.name, one.value, one.path) for one in known.first.values())
            before, known = known, known._replace(fixed=_torch.fixed(places, [], [], [], []))
            if self._known is before:
                self._known = known
        assert known.fixed is not None
        moved = known.fixed.moved_holders()
        held = [*known.first.values()] if moved else []
        changed = [(one, one.now) for one in map(held.__getitem__, moved)]
        return [one for one in changed if is_value(one[1]) and not is_alike(one[1], one[0].value)]

    def clear(self) -> None:
        """Forget all."""
        self._known = _Known({}, None)
        self._readers.clear()

    @staticmethod
    def _forget(values: weakref.ref[Values], reader: weakref.ref[Any]) -> None:
        """Let go of what only a graph has read that is gone."""
        if (one := values()) is not None and reader in one._readers:
            del one._readers[reader]
            used = frozenset[Way]().union(*one._readers.values())
            first = {place: held for place, held in one._known.first.items() if place in used}
            one._known = _Known(first, None)


class _Known(NamedTuple):
    """What is known of values: where they were first, and the same for the native comparison."""

    first: dict[Way, Holder]
    fixed: _core.Fixed | None


def key_of(changed: Iterable[tuple[Holder, Any]]) -> frozenset[tuple[Way, Any]]:
    """What calls have in common that find the same values."""
    return frozenset((one.way, parts_of(now)) for one, now in changed)


def still_there(found: Iterable[Holder], but: AbstractSet[Place]) -> list[Holder]:
    """The places where what was found is still there after a capture.

    Also where another thread has put another number meanwhile: the next call captures anew.

    Args:
        found: The places before it.
        but: Places that breaks change.
    """

    def is_kept(one: Holder) -> bool:
        now = one.now
        is_aspect = bool(one.path) and type(one.path[-1]) is Aspect
        return is_alike(now, one.value) or (
            is_number(now) and is_number(one.value) and not is_aspect
        )

    there = (one for one in found if is_kept(one))
    return [one for one in there if not but or but.isdisjoint(_places_of(one))]


def is_value(value: object) -> bool:
    """Whether a value is a number, a text or None."""
    return value is None or is_number(value)


def _whole(kind: type, length: int | None) -> list[tuple[Aspect, Any]]:
    """What something is known by besides its items."""
    return [(Aspect.KIND, kind), *([] if length is None else [(Aspect.LENGTH, length)])]


def _is_data(value: object) -> bool:
    """Whether something is a tensor, or a container of more than numbers, texts and functions."""
    kind = type(value)
    if not issubclass(kind, dict | list | tuple | set):
        return issubclass(kind, torch.Tensor)
    base: Any = next(one for one in (dict, list, tuple, set) if issubclass(kind, one))
    items = dict.values(value) if base is dict else base.__iter__(value)  # type: ignore[arg-type]
    return base.__len__(value) > _LONGEST or not all(map(_is_watched, [*items]))


def _is_watched(value: object) -> bool:
    return is_value(value) or issubclass(type(value), _CALLED)


def _is_scope(owner: object) -> bool:
    """Whether something has the globals of a module of Python's."""
    return type(owner) is dict and "__name__" in owner and "__builtins__" in owner


def _places_of(one: Holder) -> Iterator[Place]:
    """The place by all ways to tell it from others."""
    yield place_of(one)
    if one.path:
        container = one._replace(path=one.path[:-1]).now
        yield id(container), "list"
        yield id(container), one.path[-1]
        yield id(vars_of(container)), one.path[-1]


def _name(name: Any) -> Any:
    return name.__name__ if isinstance(name, types.MemberDescriptorType) else name
