"""The assignments of a call at guarded places and in its arguments' containers."""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch

from cgraph._python.guards import Change, Guards, Way, name_of_last, way_of
from cgraph._python.steps import NOTHING, found_at, items_of, name_of_item, put_at, slots_of
from cgraph._python.values import as_key, attributes_of, is_plain, is_same
from cgraph._torch import tree_flatten, tree_map

__all__ = [
    "Assigned",
    "Assignments",
    "Target",
    "dictionaries",
    "returning_assigned",
    "signature_of",
    "unlike",
]

Step = tuple[Any, ...]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Target(NamedTuple):
    """A place that a call assigns to.

    Attributes:
        root: Where the way to it begins: ``("root", object)``, ``("object", number)`` among the
            arguments, or ``("arguments",)`` for their containers.
        path: The steps to what holds it.
        step: The last step.
        name: Its name.
    """

    root: Step
    path: tuple[Step, ...]
    step: Step
    name: str

    @property
    def is_of_call(self) -> bool:
        """True if each call has another one."""
        return bool(self.root[0] != "root")

    @property
    def way(self) -> Hashable:
        """An identity of the way to it."""
        return way_of(self.root, (*self.path, self.step))

    @property
    def key(self) -> str | None:
        """The name in code that assigns to it; None for an item."""
        return name_of_last((*self.path, self.step), self.name)

    def holder(self, objects: Sequence[Any] = (), arguments: Arguments = ((), {})) -> Any:
        """Return what holds it, given the objects and the arguments of a call."""
        kind, *rest = self.root
        found = (
            arguments if kind == "arguments" else objects[rest[0]] if kind == "object" else rest[0]
        )
        return functools.reduce(found_at, self.path, found)


class Assigned(NamedTuple):
    """A value that a call has assigned.

    Attributes:
        target: The place.
        holder: What holds it in this call.
        before: The value before the call.
        value: The value.
    """

    target: Target
    holder: Any
    before: Any
    value: Any


class _Holder(NamedTuple):
    """Something that holds values, and these as they were, by the steps to them."""

    root: Step
    path: tuple[Step, ...]
    name: str
    value: Any
    parts: dict[Step, Any]


class Assignments:
    """The values at guarded places, and in containers of arguments, when a call begins.

    Args:
        guards: The guards of the places, all of which hold.
        names: The names in the code that runs.
        objects: The objects among the arguments.
        arguments: The arguments.
        places: The names of the positional ones.
        is_left: Tells by its name whether a replay does not assign to a place.
    """

    def __init__(
        self,
        guards: Guards,
        names: Collection[str],
        objects: Sequence[Any] = (),
        arguments: Arguments = ((), {}),
        places: Sequence[str] = (),
        is_left: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._names = frozenset(names)
        self._is_left = is_left
        # Tensors that lie at places in place of others, with these: holder, step, both.
        self._placed: list[tuple[Any, Step, Any, Any]] = []
        self._holders: list[_Holder] = []
        # The items of containers that are not assigned to.
        self._whole: list[tuple[Any, list[Any]]] = []
        for root, path, name, value in guards.holders(objects):
            self._add(root, path, name, value)
        for path, name, value in dictionaries(arguments, places):
            self._add(("arguments",), path, name, value)

    def _add(self, root: Step, path: tuple[Step, ...], name: str, value: Any) -> None:
        if isinstance(value, list | deque | set):
            self._whole.append((value, [*value]))
        parts = self._parts(value)
        self._holders.append(_Holder(root, path, name, value, parts))

    def _parts(self, value: Any) -> dict[Step, Any]:
        if isinstance(value, types.CellType):
            with suppress(ValueError):  # it is empty
                return {("cell",): value.cell_contents}
            return {}
        if isinstance(value, type):
            return {
                ("class", key): vars(value)[key] for key in self._names.intersection(vars(value))
            }
        found: dict[Step, Any] = {}
        if isinstance(value, list | tuple | deque):
            found.update({("item", place): one for place, one in enumerate(items_of(value))})
        if isinstance(value, dict):
            items = [*dict.items(value)]
            if "__builtins__" in value:  # the globals of code
                items = [(key, one) for key, one in items if key in self._names]
            found.update({("item", key): one for key, one in items})
        attributes = attributes_of(value)
        found.update(
            {("attr", key): attributes[key] for key in self._names.intersection(attributes)}
        )
        for slot in slots_of(type(value)):
            if (one := found_at(value, ("slot", slot))) is not NOTHING:
                found["slot", slot] = one
        return found

    def place(self, ways: Sequence[Way], tensors: Sequence[torch.Tensor]) -> None:
        """Put tensors at places, for the function to find them there."""
        for way, tensor in zip(ways, tensors, strict=True):
            self._placed.append((way.holder, way.path[-1], way.value, tensor))
            put_at(way.holder, way.path[-1], tensor)

    def unplace(self) -> None:
        """Put back what was at these places, where nothing else was assigned."""
        for holder, step, before, tensor in self._placed:
            if found_at(holder, step) is tensor:
                put_at(holder, step, before)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Leave out what a block assigns, as a break does."""
        before = [self._parts(one.value) for one in self._holders]
        try:
            yield
        finally:
            for holder, parts in zip(self._holders, before, strict=True):
                now = self._parts(holder.value)
                for step in now.keys() | parts.keys():
                    if now.get(step, NOTHING) is not parts.get(step, NOTHING):
                        holder.parts.pop(step, None)
                        if step in now:
                            holder.parts[step] = now[step]

    def changed(self) -> list[Assigned]:
        """Return what has been assigned since, deletions included."""
        found = []
        for root, path, name, value, parts in self._holders:
            now = self._parts(value)
            for step in (*now, *(step for step in parts if step not in now)):
                before, one = parts.get(step, NOTHING), now.get(step, NOTHING)
                if before is not one and not (is_plain(one) and is_same(before, one)):
                    target = Target(root, path, step, _name(name, step))
                    found.append(Assigned(target, value, before, one))
        return found

    def taken_out(self, can_return: Callable[[torch.Tensor], bool]) -> list[Assigned]:
        """Put back the values before of what a replay can assign, and return that.

        Args:
            can_return: Tells whether a replay could return a tensor.
        """
        self.unplace()
        there = {id(one.value) for one in self._holders}
        found = [
            one
            for one in self.changed()
            if not isinstance(one.holder, list | deque)
            and not self._is_left(one.target.name)
            and _can_assign(one.value, can_return, there)
        ]
        self.undo(found)
        return found

    def put_back(self) -> None:
        """Put back all values."""
        self.undo(self.changed())
        for container, items in self._whole:
            if len(container) != len(items) or any(
                one is not other for one, other in zip(container, items, strict=True)
            ):
                container.clear()
                container.update(items) if isinstance(container, set) else container.extend(items)

    def undo(self, changed: Sequence[Assigned]) -> None:
        """Put back the values before some changes; those of lists stay."""
        for target, holder, before, _ in changed:
            put_at(holder, target.step, before)
        # What is put back behind other items comes to its own place.
        for one in self._holders:
            if isinstance(one.value, dict):
                items = {step[1]: part for step, part in one.parts.items() if step[0] == "item"}
                if items.keys() == one.value.keys() and [*items] != [*dict.keys(one.value)]:
                    dict.clear(one.value)
                    dict.update(one.value, items)

    @staticmethod
    def redo(changed: Sequence[Assigned]) -> None:
        """Assign again what was undone."""
        for target, holder, _, value in changed:
            put_at(holder, target.step, value)

    def at_break(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a break so that in each replay it finds what was assigned before it."""
        placed = {id(one) for *_, one in self._placed}
        made = [one for one in self.changed() if not one.target.is_of_call]
        made = [one for one in made if id(one.value) not in placed]
        if not made:
            return fn

        @functools.wraps(fn, updated=())
        def call(*args: Any, **kwargs: Any) -> Any:
            for target, *_, value in made:
                holder = target.holder()
                # In the capture itself it is there.
                if found_at(holder, target.step) is not value:
                    put_at(holder, target.step, tree_map(_copied, value))
            return fn(*args, **kwargs)

        return call


def returning_assigned(
    function: Callable[..., Any],
    guards: Guards,
    names: Collection[str],
    targets: Sequence[Target],
    objects: Sequence[Any],
    places: Sequence[str],
) -> Callable[..., Any]:
    """Return a function that leaves places as they were, and returns what was assigned as well.

    Its first argument is a tuple of the tensors to be at places that replays copy.

    Args:
        function: The function.
        guards: The guards of the places.
        names: The names in its code.
        targets: The places that it assigns to; without any, it returns just its result.
        objects: The objects among the arguments.
        places: The names of the positional arguments.
    """

    def call(placed: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        state = Assignments(guards, names, objects, (args, kwargs), places)
        try:
            state.place(guards.inputs(objects), placed)
            result = function(*args, **kwargs)
            if not targets:
                return result
            holders = [(one.holder(objects, (args, kwargs)), one.step) for one in targets]
            return result, [found_at(*one) for one in holders]
        finally:
            state.unplace()
            state.put_back()

    return call


def signature_of(value: Any) -> tuple[Any, tuple[Hashable, ...]]:
    """Return the structure of an assigned value, and its plain parts; None for each tensor."""
    leaves, spec = tree_flatten(value)
    return spec, tuple(None if isinstance(one, torch.Tensor) else as_key(one) for one in leaves)


def unlike(assigned: Sequence[Assigned], known: Mapping[str, Any] | None) -> Change | None:
    """Find a value that the previous call has not assigned so; None if there is none.

    Args:
        assigned: What a call has assigned.
        known: The signatures of what the previous call has assigned, by name. Where they are not
            known, the operators tell of tensors.
    """
    for target, _, before, value in assigned:
        now = signature_of(value)
        is_known = not any(now[1]) if known is None else known.get(target.name) == now
        if not is_known:
            return Change(target.name, True, before, value)
    missing = (known or {}).keys() - {one.target.name for one in assigned}
    return Change(min(missing), True, None, NOTHING) if missing else None


def _can_assign(value: Any, can_return: Callable[[torch.Tensor], bool], there: set[int]) -> bool:
    if isinstance(value, torch.Tensor):
        return not isinstance(value, torch.nn.Parameter) and can_return(value)
    if value is not NOTHING and is_plain(value):
        return True
    # A list or a dictionary that the call made is made anew.
    if type(value) in (list, tuple, dict) and id(value) not in there:
        parts = value.values() if isinstance(value, dict) else value
        keys = value if isinstance(value, dict) else ()
        return all(map(is_plain, keys)) and all(
            _can_assign(one, can_return, there) for one in parts
        )
    return False


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _name(holder: str, step: Step) -> str:
    """Return the name of a place in what has this one, as walks give it."""
    kind, *rest = step
    if kind == "cell":
        return holder
    if kind == "item" and holder == "globals":
        return str(rest[0])
    if kind == "item":
        return name_of_item(holder, rest[0])
    return f"{holder}.{getattr(rest[0], '__name__', rest[0])}"


def dictionaries(
    arguments: Arguments, places: Sequence[str]
) -> Iterator[tuple[tuple[Step, ...], str, Any]]:
    """Yield the dictionaries among arguments, each with the way to it and its name."""
    args, kwargs = arguments
    waiting: list[tuple[tuple[Step, ...], str, Any]] = [
        ((("item", 0), ("item", place)), name, one)
        for place, (name, one) in enumerate(zip(places, args, strict=False))
    ]
    waiting += [((("item", 1), ("item", name)), name, one) for name, one in kwargs.items()]
    while waiting:
        path, name, value = waiting.pop()
        if type(value) is dict:
            yield path, name, value
        items: Iterator[tuple[Any, Any]] = iter(())
        if type(value) in (tuple, list):
            items = iter(enumerate(value))
        elif type(value) is dict:
            items = iter(value.items())
        for key, one in items:
            waiting.append(((*path, ("item", key)), name_of_item(name, key), one))
