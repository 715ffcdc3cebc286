"""``Guards``: the values that a key's function reads, compared before each replay."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from cgraph import _core, _torch
from cgraph._python.places import Place, Places
from cgraph._python.steps import NOTHING, found_at
from cgraph._python.values import form_in_words, is_plain
from cgraph._text import shown

__all__ = ["Change", "Guards", "Way"]


class Change(NamedTuple):
    """A guarded place that holds something else.

    Attributes:
        name: The name of the place, for people.
        makes_key: True if calls with the present value have another key.
        before: The previous value.
        now: The present value; ``NOTHING`` if there is none.
        is_gradient: True if it is the gradient of a leaf.
        is_in_tuple: True if nothing else can be put there.
    """

    name: str
    makes_key: bool
    before: Any
    now: Any
    is_gradient: bool = False
    is_in_tuple: bool = False

    def __str__(self) -> str:
        """Return the change as text."""
        return f"{self.name} {self.verb}"

    @property
    def is_move(self) -> bool:
        """True if another tensor is there, of those that replays may copy."""
        tensors = isinstance(self.before, torch.Tensor) and isinstance(self.now, torch.Tensor)
        is_parameter = isinstance(self.before, torch.nn.Parameter)
        return tensors and not (is_parameter or self.is_gradient or self.is_in_tuple)

    @property
    def value_in_words(self) -> str:
        """The place and its present value, as text."""
        if self.is_gradient:
            return f"{self.name} {'is there' if self.now is not None else 'is not there'}"
        return f"{self.name}={shown(self.now):.40}"

    @property
    def verb(self) -> str:
        """The change as a verb phrase to follow the name."""
        if self.now is NOTHING:
            return "is gone"
        if is_plain(self.before) and is_plain(self.now) and self.before != self.now:
            return f"is {shown(self.now):.40} and was {shown(self.before):.40}"
        if self.now is not self.before:
            return "is another object"
        if isinstance(self.now, torch.Tensor):
            return "lies elsewhere, or has another layout"
        return "has other items or attributes"


class Way(NamedTuple):
    """The way to a place in a call.

    Attributes:
        name: The name of the place.
        root: The step that it begins with: ``("root", object)``, ``("object", number)`` among the
            arguments, or ``("arguments",)`` for their containers.
        path: The other steps.
        holder: What holds the value; None for a root, or if it is to be found.
        value: The value; ``NOTHING`` if there is none.
    """

    name: str
    root: tuple[Any, ...]
    path: tuple[tuple[Any, ...], ...]
    holder: Any = None
    value: Any = None

    @property
    def way(self) -> Hashable:
        """An identity of the way."""
        kind, *rest = self.root
        return kind, id(rest[0]) if kind == "root" else tuple(rest), self.path

    @property
    def key(self) -> str | None:
        """The name in code that assigns to the place; None for an item or a root."""
        if not self.path or (self.path[-1][0] == "item" and len(self.path) > 1):
            return None
        rest = self.path[-1][1:]
        return str(getattr(rest[0], "__name__", rest[0])) if rest else self.name

    def find_holder(
        self, objects: Sequence[Any] = (), arguments: Any = (), *, anew: bool = False
    ) -> Any:
        """Return what holds the value, given the objects and the arguments of a call."""
        kind, *rest = self.root
        if self.holder is not None and kind != "arguments" and not anew:
            return self.holder
        if kind == "arguments":
            found = arguments
        else:
            found = objects[rest[0]] if kind == "object" else rest[0]
        return functools.reduce(found_at, self.path[:-1], found)


_HOLDING = ("object", "dict", "list", "set", "class")
_ROOTS = (types.CellType, types.FunctionType, types.ModuleType)


class Guards:
    """The places that one key guards.

    Args:
        places: The places that a walk has found.
        compares: False for guards that only tell what there is.

    Attributes:
        native: The native guards, which compare them.
        unread: Places of tensors that no operator took.
        taken_names: The names of the places of tensors that operators took.
        taken: The addresses of the storages of tensors that operators took.
        requiring: For the place of each tensor that operators took, true if it requires a gradient.
    """

    def __init__(self, places: Places, *, compares: bool = True) -> None:
        self.unread = places.tensors
        self.modules = places.modules
        self.leaves = places.leaves
        self.addresses = places.addresses
        self.stopped = places.stopped
        self.refused = places.refused
        self._places: Sequence[Place] = places.found
        self._has_inputs = any(one.check[0] == "input" for one in places.found)
        if compares:
            self._take(places.found)

    def _take(self, found: Sequence[Place]) -> None:
        self._places = found
        self.native = _core.Guards(
            [(one.parent, one.step, one.check) for one in found], _torch.tensor_reader()
        )
        taken = [(one.name, one.value) for one in found if one.check[0] == "tensor"]
        self.taken_names = {name for name, _ in taken}
        memories = _torch.memories_of(tensor for _, tensor in taken)
        self.taken = {memory.data_ptr() for memory in memories}
        self.requiring = {name: tensor.requires_grad for name, tensor in taken}

    def without(self, ways: Collection[Hashable]) -> Guards:
        """Return guards without the places at some ways, and without what is in these."""
        new = copy.copy(self)
        kept: list[Place] = []
        numbers: dict[int, int] = {-1: -1}
        for number, (way, place) in enumerate(zip(self._ways(), self._places, strict=True)):
            if place.parent in numbers and way.way not in ways:
                numbers[number] = len(kept)
                kept.append(place._replace(parent=numbers[place.parent]))
        new._take(kept)
        return new

    def memories_at(self, matches: Callable[[str], bool]) -> list[int]:
        """Return the numbers of the storages that no operator took, at places of matching names."""
        found = [found_at(holder, step) for holder, step, name in self.unread if matches(name)]
        memories = _torch.memories_of(one for one in found if isinstance(one, torch.Tensor))
        return [_torch.storage_id(one) for one in memories]

    def name_beside(self, tensor: torch.Tensor) -> str | None:
        """Return the place of a guarded tensor in the same memory; None if there is none."""
        memory = _torch.memory_of(tensor)
        return None if memory is None else self.addresses.get(memory.data_ptr())

    @property
    def named_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """The tensors at guarded places, and those that no operator took, with their names."""
        found = [(one.name, one.value) for one in self._places if one.check[0] == "tensor"]
        unread = ((name, found_at(holder, step)) for holder, step, name in self.unread)
        return [*found, *((name, one) for name, one in unread if isinstance(one, torch.Tensor))]

    def holders(self, objects: Sequence[Any] = ()) -> Iterator[Way]:
        """Yield the ways to what has other places in it, given the objects among arguments."""
        for place, way in zip(self._places, self._ways(objects), strict=True):
            is_root = place.parent < 0 and isinstance(way.value, _ROOTS)
            if place.check[0] in _HOLDING or is_root:
                yield way

    def copy(self, names: Collection[str]) -> bool:
        """Return whether replays copy all tensors at places of these names."""
        places = (one for one in self._places if one.check[0] in ("tensor", "form"))
        return not any(one.name in names for one in places)

    def made(self, is_made: Callable[[torch.Tensor], bool], objects: Sequence[Any]) -> list[Way]:
        """Return the ways to the tensors that a call has made."""
        ways = self._ways(objects)
        return [one for one in ways if isinstance(one.value, torch.Tensor) and is_made(one.value)]

    def inputs(self, objects: Sequence[Any] = ()) -> list[Way]:
        """Return the ways to the tensors that replays copy, in their order."""
        if not self._has_inputs:
            return []
        ways = zip(self._places, self._ways(objects), strict=True)
        return [way for place, way in ways if place.check[0] == "input"]

    def _ways(self, objects: Sequence[Any] = ()) -> Iterator[Way]:
        """Iterate over the ways to all places."""
        ways: list[Way] = []
        for place in self._places:
            if place.parent >= 0:
                before = ways[place.parent]
                value = found_at(before.value, place.step)
                path = *before.path, place.step
                way = Way(place.name, before.root, path, before.value, value)
            else:
                is_given = place.step[0] == "object"
                given = objects[place.step[1]] if is_given and objects else NOTHING
                value = given if is_given else place.step[1]
                way = Way(place.name, place.step, (), None, value)
            ways.append(way)
            yield way

    def fit(self, objects: Sequence[Any]) -> bool:
        """Return whether every guard still holds."""
        return self.native.fits(objects)

    def changes(self, objects: Sequence[Any]) -> list[Change]:
        """Return all places that hold something else now."""
        found = []
        for number, now, is_there in self.native.changed(objects, all=True):
            place = self._places[number]
            now = now if is_there else NOTHING
            if place.check[0] in ("form", "input") and isinstance(now, torch.Tensor):
                now = form_in_words(now)
            makes_key = place.is_of_key and is_there
            is_gradient = place.step[0] == "grad"
            if is_gradient:
                makes_key = (now is None) != (place.value is None)
            elif makes_key:
                makes_key = is_plain(now)
            parent = self._places[place.parent].value if place.parent >= 0 else ()
            is_in_tuple = isinstance(parent, tuple)
            change = place.name, makes_key, place.value, now, is_gradient, is_in_tuple
            found.append(Change(*change))
        return found
