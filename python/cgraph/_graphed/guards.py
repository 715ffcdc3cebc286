"""``Guards``: the values that a key's function reads, compared before each replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from cgraph import _core, _torch
from cgraph._python.places import NOTHING, Place, Places, found_at
from cgraph._python.values import form_in_words, is_plain
from cgraph._text import shown

__all__ = ["Change", "Guards"]


class Change(NamedTuple):
    """A guarded place that holds something else.

    Attributes:
        name: The name of the place, for people.
        makes_key: True if calls with the present value have another key.
        before: The previous value.
        now: The present value; ``NOTHING`` if there is none.
        is_gradient: True if it is the gradient of a leaf.
    """

    name: str
    makes_key: bool
    before: Any
    now: Any
    is_gradient: bool = False

    def __str__(self) -> str:
        """Return the change as text."""
        return f"{self.name} {self.verb}"

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


class Guards:
    """The places that one key guards.

    Args:
        places: The places that a walk has found.

    Attributes:
        native: The native guards, which compare them.
        names: The names of all places.
        unread: Places of tensors that no operator took.
        taken_names: The names of the places of tensors that operators took.
        taken: The addresses of the storages of tensors that operators took.
        requiring: For each tensor that operators took, True if it requires a gradient.
    """

    def __init__(self, places: Places) -> None:
        found = places.found
        self._places: Sequence[Place] = found
        specs = [(one.parent, one.step, one.check) for one in found]
        self.native = _core.Guards(specs, _torch.tensor_reader())
        self.names = {one.name for one in found}
        self.unread = places.tensors
        self.taken_names = {one.name for one in found if one.check[0] == "tensor"}
        self.taken = {
            memory.data_ptr()
            for one in found
            if one.check[0] == "tensor" and (memory := _torch.memory_of(one.check[1])) is not None
        }
        self.requiring = [one.value.requires_grad for one in found if one.check[0] == "tensor"]
        self.modules = places.modules
        self.leaves = places.leaves
        self.addresses = places.addresses
        self.stopped = places.stopped
        self.refused = places.refused

    @property
    def plain(self) -> list[tuple[str, Any]]:
        """The plain values that belong to the key, with the names of their places."""
        return [(one.name, one.value) for one in self._places if one.is_of_key]

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

    @property
    def steps(self) -> Iterator[tuple[Any, tuple[Any, ...]]]:
        """The holder of each value, and the step from it to the value."""
        for place in self._places:
            if place.parent >= 0:
                yield self._places[place.parent].value, place.step

    @property
    def containers(self) -> list[Any]:
        """The lists, dictionaries and sets that are guarded, except those of modules."""
        kinds = ("list", "dict", "set")
        return [one.value for one in self._places if one.check[0] in kinds and one.is_changing]

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
            found.append(Change(place.name, makes_key, place.value, now, is_gradient))
        return found
