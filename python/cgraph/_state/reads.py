"""What a function reads of Python, which somebody may change between its calls."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import torch
from torch.optim.lr_scheduler import LRScheduler

from cgraph import _core, _torch
from cgraph._state.attributes import Place, is_alike, is_number, is_torchs, parts_of, place_of
from cgraph._state.code import Reached, is_installed, is_looked_into, is_users, loads_in
from cgraph._state.constants import is_array
from cgraph._state.holders import (
    HOLDING,
    KEYWORDS,
    Aspect,
    Holder,
    Way,
    held_in,
    slots_of,
    vars_of,
)
from cgraph._state.surroundings import FUNCTIONS, Lasting, places_of

__all__ = ["Reads", "Values", "key_of", "still_there"]

# No more are compared at each call, and longer containers are of data.
_MOST, _LONGEST = 4096, 64
# Of these it matters which one it is.
_CALLED = (*FUNCTIONS, types.BuiltinFunctionType, types.MethodDescriptorType, type)
# Ways go on by these, by members of enumerations, by modules and by tuples of all these: no code of
# the user's compares them.
_KEYS = (
    *(str, int, float, bool, bytes, type(None), type, torch.dtype, torch.device),
    *(types.MemberDescriptorType, Aspect),
)
# By these, code takes objects apart, and by some of them only those of dataclasses.
_APART = frozenset({"__dict__", "asdict", "astuple", "fields", "vars"})
_OF_DATACLASSES = frozenset({"asdict", "astuple", "fields"})
# What classes have for their objects; other attributes may get others, of the objects' own.
_OF_CLASSES = (types.FunctionType, property, types.MemberDescriptorType)
# What code loads by these names from anything but ``self``, it loads from tensors.
_OF_TENSORS = {"shape", "ndim", "data", "grad"}


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
        self._others = self._loads.others - _OF_TENSORS
        # The likely ones first: there may be too many.
        self._near: dict[Way, Holder] = {}
        self._inside: dict[Way, Holder] = {}
        self._of_parts: dict[Way, Holder] = {}
        # Where nothing is that may come.
        self._absent: dict[Way, Holder] = {}
        # The dictionaries of objects that were added, and containers that were looked into.
        self._objects: set[int] = set()
        self._seen: set[int] = set()
        self._of_kinds: dict[type, list[tuple[str, Any]]] = {}
        self._absent_of: dict[type, frozenset[str]] = {}

    @property
    def found(self) -> list[Holder]:
        """The places."""
        found = self._near, self._of_parts, self._inside, self._absent
        return [holder for holders in found for holder in holders.values()][:_MOST]

    def add_function(self, function: object) -> None:
        """Add functions and classes that a function finds in variables."""
        for one in places_of(function):
            is_variable = isinstance(one.owner, types.CellType) or _is_scope(one.owner)
            if is_variable and issubclass(type(one.value), _CALLED) and self.begins(one):
                self._add(self._near, one)
                self._add_class(one.value)

    def add(self, found: Iterable[Holder]) -> None:
        """Add numbers and texts in variables and classes, if the code reads these."""
        for one in found:
            if id(one.owner) not in self._objects and self.begins(one):
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
            for tensor in (*one._parameters.values(), *one._buffers.values()):
                self.add_set_on(tensor)
                if tensor is not None and "requires_grad" in self._others:
                    flag = Holder(tensor, "requires_grad", tensor.requires_grad)
                    self._add(self._of_parts, flag)
        is_of_torch = is_part and is_torchs(one)
        for name, value in [*own.items()]:
            is_read = name in self._others if is_of_torch else self._is_read(name, value)
            # Modules that train, or do not, have keys of their own.
            if is_read and not (is_part and name == "training"):
                self._add(found, Holder(own, name, value))
                self._add_class(value)
        for name, value in [] if is_of_torch else self._of_class(type(one)):
            if name not in own and _is_own(type(one)):
                self._add(found, Holder(type(one), name, value))
        # It may get some of its own.
        inner = (one._parameters, one._buffers, one._modules) if is_part else ()
        for name in self._absent_in(type(one), is_part):
            if name not in own and not any(name in values for values in inner):
                self._add(self._absent, Holder(own, name, None))
                for values in inner[:2] if name in self._loads.asked else ():
                    self._add(self._absent, Holder(values, name, None))

    def add_stepping(self, one: Any) -> None:
        """Add what is read of an optimizer or scheduler besides its steps, and of a user's own."""
        if _is_own(type(one)):
            self.add_object(one)
        if isinstance(one, torch.optim.Optimizer) and self._is_read("param_groups", None):
            for place, group in enumerate(vars(one).get("param_groups", ())):
                for name, value in [*group.items()]:
                    if is_number(value):
                        self._add(self._near, Holder(one, "param_groups", value, (place, name)))
        if isinstance(one, LRScheduler):
            if self._is_read("last_epoch", None):
                number = vars(one).get("last_epoch")
                self._add(self._near, Holder(vars(one), "last_epoch", number))
            rates = vars(one).get("_last_lr")
            if isinstance(rates, list) and "get_last_lr" in self._reached.names:
                for place, rate in enumerate(rates):
                    self._add(self._near, Holder(one, "_last_lr", rate, (place,)))

    def add_set_on(self, tensor: torch.Tensor | None) -> None:
        """Add what somebody has set on a tensor of torch's own classes."""
        if type(tensor) in (torch.Tensor, torch.nn.Parameter):
            for name, value in [*vars(tensor).items()]:
                if self._is_read(name, value):
                    self._add(self._of_parts, Holder(vars(tensor), name, value))

    def add_inside(self, way: Holder, value: Any) -> None:
        """Add what an object or a container has, at the end of a way that the code names."""
        if is_number(value) or not self.begins(way):
            return
        uses = self._reached.uses
        for aspect, is_asked in ((Aspect.LENGTH, uses.is_whole), (Aspect.EMPTY, uses.is_tested)):
            # Also of data, which others may have put there.
            if (found := aspect.of(value)) is not None and is_asked(way.names_back):
                self._add_behind(way, [(aspect, found)])
                break
        if id(value) in self._seen:
            # On this way, too, there may be another one.
            self._inside.setdefault(way.way, way)
            return
        self._seen.add(id(value))
        items = self._items_of(way, value)
        if items is not None and len(items) <= _LONGEST:
            self._add_behind(way, items)
        elif items is not None or is_array(value):
            # What is in it is data, and there may be another one.
            self._inside.setdefault(way.way, way)
        if issubclass(type(value), dict) and not self._has_length(way):
            for word in self._reached.uses.sought:
                if not dict.__contains__(value, word):
                    self._add(self._absent, way._replace(value=None, path=(*way.path, word)))

    def _has_length(self, way: Holder) -> bool:
        """Whether the length of a container is among the places."""
        return way._replace(path=(*way.path, Aspect.LENGTH)).way in self._inside

    def begins(self, way: Holder) -> bool:
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

    def _add_behind(self, way: Holder, items: Iterable[tuple[Any, Any]]) -> None:
        """Add what is one step behind the end of a way."""
        for name, one in items:
            if _leads_on(name):
                self._add(self._inside, way._replace(value=one, path=(*way.path, name)))
                self._add_class(one)

    def _items_of(self, way: Holder, value: Any) -> list[tuple[Any, Any]] | None:
        """What is read of an object or a container; None if that is nothing."""
        kind = type(value)
        if issubclass(kind, dict):
            items = [*dict.items(dict.copy(value))]
            if all(_is_watched(one) for _, one in items):
                # One that is empty may be for tables, which calls make, or for a log.
                has_length = kind is dict and bool(items)
                return [*items, *_whole(kind, len(items) if has_length else None)]
            # It has things of many kinds, of which code names those that it wants; of a class of
            # the user's maybe as attributes.
            words, is_plain = self._loads.words, kind is dict
            is_given = bool(way.path) and way.path[-1] is KEYWORDS
            if not is_given and not self._reached.uses.is_any_read(way.names_back):
                items = [
                    (name, one)
                    for name, one in items
                    if type(name) is not str
                    or name in words
                    or (not is_plain and self._is_read(name, one))
                ]
            return [*items, *_whole(kind, None)]
        if issubclass(kind, list | tuple | deque):
            base: Any = next(one for one in (list, tuple, deque) if issubclass(kind, one))
            items = [*enumerate([*base.__iter__(value)])]
            # Lists of tensors, and of what has some, are data that calls make.
            has_length = kind in (list, tuple) and not any(_is_data(one) for _, one in items)
            return [*items, *_whole(kind, len(items) if has_length else None)]
        if kind in HOLDING:
            return [*held_in(value)]
        if kind is set:
            kinds = set(map(type, set.copy(value))) if len(value) <= _LONGEST else {object}
            # There is no way to an item.
            is_plain = kinds <= {str} or kinds <= {int}
            return [(Aspect.CONTENT, frozenset(value))] if is_plain else None
        if is_array(value):
            content = Aspect.CONTENT.of(value)
            return None if content is None else [(Aspect.CONTENT, content)]
        if not is_looked_into(kind) or issubclass(kind, torch.nn.Module):
            return None
        own = vars_of(value)
        items = [*slots_of(value), *dict.copy(own).items()]
        if not self._takes_apart(kind):
            items = [one for one in items if self._is_read(_name(one[0]), one[1])]
        for name, one in self._of_class(kind):
            if name not in own and _is_own(kind):
                self._add(self._near, Holder(kind, name, one))
        items += [(name, None) for name in self._absent_in(kind, False) if name not in own]
        return [*items, *_whole(kind, None)]

    def _takes_apart(self, kind: type) -> bool:
        """Whether code may read all attributes of objects of a class, whatever their names."""
        attributes, variables = self._reached.uses.named, self._loads.variables
        apart = _APART if dataclasses.is_dataclass(kind) else _APART - _OF_DATACLASSES
        is_matched = "__match_args__" in self._others and hasattr(kind, "__match_args__")
        return is_matched or any(one in variables or f".{one}" in attributes for one in apart)

    def _add_class(self, value: Any) -> None:
        """Add what a class has that is found somewhere."""
        if issubclass(type(value), type) and _is_own(value):
            for name, one in self._of_class(value):
                self._add(self._near, Holder(value, name, one))

    def _absent_in(self, kind: type, is_part: bool) -> frozenset[str]:
        """Names that code reads of the objects of a class, if they have no attributes of these.

        Its methods, its constants, and what its methods, or who asks by a text, look for in vain.

        Args:
            kind: The class.
            is_part: Whether it is one of modules. Of libraries' there are hundreds, of which
                somebody may exchange the forward.
        """
        if is_part and not _is_own(kind):
            return frozenset({"forward"})
        if kind not in self._absent_of:
            found = set[str]() if is_part else {*self._loads.asked}
            bases = (one for one in kind.__mro__ if is_users(vars(one).get("__module__")))
            items = [item for base in bases for item in vars(base).items()]
            methods = {name: one for name, one in items if isinstance(one, types.FunctionType)}
            getters = (one.fget for _, one in items if isinstance(one, property))
            properties = (one for one in getters if isinstance(one, types.FunctionType))
            for one in (*methods.values(), *properties):
                loads = loads_in(one.__code__)
                found |= loads.asked | (loads.own & self._loads.own)
            found.difference_update(*(vars(base) for base in kind.__mro__))
            # Of modules there may be hundreds.
            called = {"forward"} if is_part else set(filter(self._reached.has_name, methods))
            # Not what properties have, which objects cannot have of their own.
            own = (name for name, one in items if not isinstance(one, _OF_CLASSES))
            called.update(filter(self._reached.has_name, own))
            found |= {name for name in called if name[:2] != "__"}
            found |= {name for name, _ in self._of_class(kind)}
            self._absent_of[kind] = frozenset(found)
        return self._absent_of[kind]

    def _of_class(self, kind: type) -> list[tuple[str, Any]]:
        """What a class has that code reads, but for what binds to its objects."""
        if kind not in self._of_kinds:
            found: dict[str, Any] = {}
            for base in reversed(kind.__mro__):
                found.update(vars(base))
            self._of_kinds[kind] = [
                (name, value)
                for name, value in found.items()
                if (value is None or is_number(value))
                and not name.startswith("__")
                and self._is_read(name, value)
            ]
        return self._of_kinds[kind]

    def _is_read(self, name: Any, value: Any) -> bool:
        """Whether code loads an attribute."""
        loads = self._loads
        if self._reached.has_breaks and name in self._reached.stores:
            # What breaks assign is theirs.
            return False
        is_called = not is_value(value) and name in self._reached.called
        is_loaded = name in loads.own or name in self._others or name in loads.asked
        return is_loaded or is_called or self._reached.uses.composes(name)

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


def _is_own(kind: Any) -> bool:
    """Whether a class is one of the user's, and of no library."""
    module = vars(kind).get("__module__")
    return is_users(module) and not is_installed(module)


def _leads_on(name: object) -> bool:
    """Whether a way may go on by a key: by one that is compared without code of the user's."""
    kind: type = type(name)
    if kind is tuple:
        return all(map(_leads_on, name))  # type: ignore[call-overload]
    is_member = issubclass(kind, enum.Enum) and kind.__hash__ is enum.Enum.__hash__
    base: Any = object
    # A way keeps its keys.
    is_part = issubclass(kind, torch.nn.Module)
    is_itself = is_part and kind.__hash__ is base.__hash__ and kind.__eq__ is base.__eq__
    return kind in _KEYS or is_itself or (is_member and "__eq__" not in vars(kind))


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
