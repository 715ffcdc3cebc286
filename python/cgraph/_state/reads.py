"""What a function reads of Python, which somebody may change between its calls."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from typing import Any

import torch

from cgraph import _torch
from cgraph._state.attributes import Place, is_another, is_number, is_torchs, place_of
from cgraph._state.code import Reached, is_installed
from cgraph._state.constants import Constant
from cgraph._state.holders import Holder, slots_of, vars_of
from cgraph._state.surroundings import FUNCTIONS
from cgraph._state.surroundings import Constant as Stays

__all__ = ["Reads", "Values", "is_alike", "still_there"]

# No more are compared at each call, and longer lists are of data.
_MOST, _LONGEST = 512, 64
_CALLED = (*FUNCTIONS, types.BuiltinFunctionType)
_KEYS = (str, int, types.MemberDescriptorType)
_IN_SETS = (int, float, str, type(None))


class Reads:
    """The places of numbers, texts and functions that the code of a function reads.

    Also those where None is. Not those of torch's own modules, but for how much these drop.

    Args:
        reached: What its code comes to.

    Attributes:
        found: The places.
    """

    def __init__(self, reached: Reached) -> None:
        self.found: list[Holder] = []
        self._reached = reached
        self._known: set[Place] = set()
        # The dictionaries of those objects that were added.
        self._objects: set[int] = set()

    def add(self, found: Iterable[Holder]) -> None:
        """Add places of variables, or of attributes, if the code reads these."""
        for one in found:
            if id(one.owner) not in self._objects and self._begins(one):
                self._add(one, one.owner, one.name)

    def add_object(self, one: Any) -> None:
        """Add what a module, or the object of a method, has of itself and by its class."""
        own = vars(one) if isinstance(one, torch.nn.Module) else vars_of(one)
        if id(own) in self._objects:
            return
        self._objects.add(id(own))
        if is_torchs(one):
            if _torch.drops(one) and one.training:
                self._add(Holder(own, "p", own.get("p")), own, "p")
            return
        for name, value in [*own.items()]:
            # Modules that train, or do not, have keys of their own.
            if name != "training" and self._is_read(name, value):
                self._add(Holder(own, name, value), own, name)
        kind = type(one)
        for name, value in _of_classes(kind):
            if name not in own and self._is_read(name, value):
                # It may get one of its own.
                self._add(Holder(own, name, None), own, name)
                if not _is_of_library(kind):
                    self._add(Holder(kind, name, value), kind, name)

    def add_inside(self, way: Holder, value: Any, is_object: bool) -> None:
        """Add what an object or a container has, at the end of a way that the code names."""
        kind = type(value)
        if not self._begins(way) or (kind is tuple and is_number(value)):
            return
        if is_object:
            items = [*slots_of(value), *vars_of(value).items()]
            items = [one for one in items if self._is_read(_name(one[0]), one[1])]
        elif issubclass(kind, dict):
            items = [*dict.copy(value).items()]
            if not all(_counts(one) for _, one in items):
                # It has things of many kinds, of which code names those that it wants.
                items = [one for one in items if one[0] in self._reached.reads]
        elif issubclass(kind, list | tuple):
            items = [*enumerate([*value])]
        elif kind is set and all(issubclass(type(one), _IN_SETS) for one in set.copy(value)):
            # There is no way to an item.
            items = [(frozenset, frozenset(value))]
        else:
            return
        # One that is empty may be for tables, which calls make.
        has_length = bool(items) if kind is dict else kind is list
        has_end = _counts if kind is dict else _counts_or_is_part
        if has_length and all(has_end(one) for _, one in items):
            items.append((len, len(value)))
        if len(items) > _LONGEST:
            return
        for name, one in items:
            if isinstance(name, _KEYS) or name is len or name is frozenset:
                self._add(way._replace(value=one, path=(*way.path, name)), value, name)

    def _begins(self, way: Holder) -> bool:
        """Whether the code reads what a way begins with."""
        if isinstance(way.owner, types.CellType):
            return id(way.owner) in self._reached.cells
        if isinstance(way.owner, Stays) or _is_of_library(way.owner):
            return False
        return self._is_read(way.name, way.value)

    def _is_read(self, name: Any, value: Any) -> bool:
        names = self._reached.names if isinstance(value, _CALLED) else self._reached.reads
        # What breaks assign is theirs.
        return name in names and not (self._reached.has_breaks and name in self._reached.stores)

    def _add(self, one: Holder, container: Any, name: Any) -> None:
        place = id(container), _name(name)
        if len(self.found) < _MOST and place not in self._known and _counts(one.value):
            self._known.add(place)
            self.found.append(one)


class Values:
    """The numbers and texts that graphs have read, as they were when they were read first.

    Nothing is kept for graphs that are gone.
    """

    def __init__(self) -> None:
        # Replaced as a whole: graphs may go at any time, on any thread.
        self._first: dict[Place, Holder] = {}
        self._readers: dict[weakref.ref[Any], frozenset[Place]] = {}
        self._fixed: Any = None

    def note(self, reader: Any) -> None:
        """Note the places that a graph reads, those that are known by what was there first.

        Args:
            reader: What has the graph; as its ``reads``, where they are.
        """
        found = {place_of(one): one for one in reader.reads if not isinstance(one.value, _CALLED)}
        if found:
            forget = functools.partial(Values._forget, weakref.ref(self))
            self._readers[weakref.ref(reader, forget)] = frozenset(found)
            self._first = {**found, **self._first}
            self._fixed = None

    @property
    def others(self) -> Iterator[tuple[Place, Holder, Any]]:
        """The places of those that are others now, where they are and what is there."""
        first = self._first
        if self._fixed is None:
            places = ((one.owner, one.name, one.value, one.path) for one in first.values())
            self._fixed = _torch.fixed(places, [], [], [], [])
        if self._fixed.is_in_place(False, hooks=False):
            return
        for place, one in first.items():
            now = one.now
            if (now is None or is_number(now)) and not is_alike(now, one.value):
                yield place, one, now

    @staticmethod
    def _forget(values: weakref.ref[Values], reader: weakref.ref[Any]) -> None:
        """Let go of what only a graph has read that is gone."""
        if (one := values()) is not None and reader in one._readers:
            del one._readers[reader]
            used = frozenset[Place]().union(*one._readers.values())
            one._first = {place: held for place, held in one._first.items() if place in used}
            one._fixed = None

    def key(self) -> frozenset[tuple[Place, Constant]]:
        """What calls have in common that find the same ones."""
        return frozenset((place, Constant(now)) for place, _, now in self.others)

    def words(self) -> list[str]:
        """Those that are others now, in words."""
        words = (f"{_in_words(one)} = {_text_of(now):.40}" for _, one, now in self.others)
        # A class has what its objects have.
        return [*dict.fromkeys(words)]

    def clear(self) -> None:
        """Forget all."""
        self._first, self._fixed = {}, None
        self._readers.clear()


def still_there(found: Iterable[Holder], but: AbstractSet[Place]) -> list[Holder]:
    """The places where what was found is still there after a capture.

    Args:
        found: The places before it.
        but: Places that breaks change.
    """
    there = (one for one in found if is_alike(one.now, one.value))
    return [one for one in there if not but or but.isdisjoint(_places_of(one))]


def is_alike(now: object, then: object) -> bool:
    """Whether a value is the same object, or a number or text that equals it."""
    return now is then or (is_number(now) and is_number(then) and not is_another(now, then))


def _is_of_library(owner: Any) -> bool:
    """Whether something is a class, or the names of a module, of an installed library.

    Hundreds of its constants may be named, which nobody changes.
    """
    name = owner.__module__ if isinstance(owner, type) else None
    if type(owner) is dict and "__file__" in owner:
        name = owner.get("__name__")
    return is_installed(name) if isinstance(name, str) else False


def _places_of(one: Holder) -> Iterator[Place]:
    """The place by all ways to tell it from others."""
    yield place_of(one)
    if one.path:
        container = one._replace(path=one.path[:-1]).now
        yield id(container), "list"
        yield id(container), one.path[-1]
        yield id(vars_of(container)), one.path[-1]


def _in_words(one: Holder) -> str:
    last = one.path[-1] if one.path else None
    return f"len({one.title})" if last is len else one.title


def _text_of(value: object) -> str:
    try:
        return repr(value)
    except Exception:  # whatever a class of the user's raises
        return object.__repr__(value)


def _counts(value: object) -> bool:
    return value is None or isinstance(value, _CALLED) or is_number(value)


def _counts_or_is_part(value: object) -> bool:
    return _counts(value) or isinstance(value, torch.nn.Module)


def _name(name: Any) -> Any:
    return name.__name__ if isinstance(name, types.MemberDescriptorType) else name


def _of_classes(kind: type) -> list[tuple[str, Any]]:
    """What classes of the user's have that counts, but for what binds to their objects."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        found.update(vars(base))
    return [
        (name, value)
        for name, value in found.items()
        if (value is None or is_number(value)) and not name.startswith("__")
    ]
