"""The assignments of a call at guarded places and in its arguments' containers."""

from __future__ import annotations

import functools
import operator
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from cgraph._python.guards import Change, Guards, Way, name_of_last, way_of
from cgraph._python.steps import NOTHING, found_at, items_of, name_of_item, put_at, slots_of
from cgraph._python.values import as_key, attributes_of, is_plain, is_same
from cgraph._torch import tree_flatten, tree_map

__all__ = [
    "Assigned",
    "Assigning",
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


@dataclass(frozen=True)
class Assigning:
    """The assignments of a replay.

    Attributes:
        targets: The places; the values follow the function's result.
        returns: The steps to the dictionary among the arguments that is returned; None for another
            result.
    """

    targets: Sequence[Target] = ()
    returns: Sequence[Step] | None = None

    def __call__(
        self, returned: Any, objects: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Assign as the function does; return its result.

        Args:
            returned: The result and the values to assign; just the result if there are none.
            objects: The objects among the arguments of the call.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
        """
        if not self.targets:
            return returned
        result, values = returned
        for target, value in zip(self.targets, values, strict=True):
            put_at(target.holder(objects, (args, kwargs)), target.step, value)
        if self.returns is not None:
            return functools.reduce(found_at, self.returns, (args, kwargs))
        return result


# The values that something holds: for each kind of step by its key.
_Parts = dict[str, dict[Any, Any]]


class _Holder(NamedTuple):
    """Something that holds values, and these as they were."""

    root: Step
    path: tuple[Step, ...]
    name: str
    value: Any
    before: _Parts


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
        self._holders.append(_Holder(root, path, name, value, _parts(value)))

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
        at_begin = [_parts(one.value) for one in self._holders]
        try:
            yield
        finally:
            for holder, parts in zip(self._holders, at_begin, strict=True):
                for kind, key, _, now in _differences(parts, _parts(holder.value)):
                    of_kind = holder.before.setdefault(kind, {})
                    of_kind.pop(key, None)
                    if now is not NOTHING:
                        of_kind[key] = now

    def changed(self) -> list[Assigned]:
        """Return what has been assigned since, deletions included."""
        found = []
        for root, path, name, value, parts in self._holders:
            is_of_code = isinstance(value, dict) and "__builtins__" in value
            for kind, key, before, now in _differences(parts, _parts(value)):
                # Attributes and globals that no code names are not guarded.
                if (kind in ("attr", "class") or is_of_code) and key not in self._names:
                    continue
                if not (is_plain(now) and is_same(before, now)):
                    step = (kind,) if kind == "cell" else (kind, key)
                    target = Target(root, path, step, _name(name, step))
                    found.append(Assigned(target, value, before, now))
        return found

    def taken_out(
        self, can_return: Callable[[torch.Tensor], bool]
    ) -> tuple[list[Assigned], list[Assigned]]:
        """Put back the values before of what a replay can assign; return that, and the rest.

        Args:
            can_return: Tells whether a replay could return a tensor.
        """
        self.unplace()
        there = {id(one.value) for one in self._holders}
        found: tuple[list[Assigned], list[Assigned]] = [], []
        for one in self.changed():
            can_assign = (
                not isinstance(one.holder, list | deque)
                and not self._is_left(one.target.name)
                and _can_assign(one.value, can_return, there)
            )
            found[not can_assign].append(one)
        self.undo(found[0])
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
        dictionaries = {id(one.holder) for one in changed if isinstance(one.holder, dict)}
        for one in self._holders:
            if id(one.value) in dictionaries:
                items = one.before.get("item", {})
                if items.keys() == one.value.keys() and [*items] != [*dict.keys(one.value)]:
                    dict.clear(one.value)
                    dict.update(one.value, items)

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


def _parts(value: Any) -> _Parts:
    """Return what something holds now, without running user code."""
    kind = type(value)
    if kind is dict or kind is OrderedDict:  # most are
        return {"item": dict.copy(value)} if value else {}
    if kind is types.CellType:
        one = found_at(value, ("cell",))
        return {} if one is NOTHING else {"cell": {"": one}}
    if isinstance(value, type):
        return {"class": dict(vars(value))}
    parts: _Parts = {"attr": dict.copy(attributes_of(value))}
    if isinstance(value, list | tuple | deque):
        parts["item"] = dict(enumerate(items_of(value)))
    elif isinstance(value, dict):
        parts["item"] = dict.copy(value)
    if slots := slots_of(kind):
        values = ((one, found_at(value, ("slot", one))) for one in slots)
        parts["slot"] = {slot: one for slot, one in values if one is not NOTHING}
    return parts


def _differences(before: _Parts, now: _Parts) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield the kind and the key of each value that is another object, with both objects."""
    for kind in {**before, **now} if before or now else ():
        old, parts = before.get(kind, {}), now.get(kind, {})
        is_like = len(old) == len(parts) and all(map(operator.is_, old, parts))
        if is_like and all(map(operator.is_, old.values(), parts.values())):
            continue
        for key in (*parts, *(key for key in old if key not in parts)):
            was, one = old.get(key, NOTHING), parts.get(key, NOTHING)
            if was is not one:
                yield kind, key, was, one


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
            waiting += [((*path, ("item", k)), name_of_item(name, k), v) for k, v in value.items()]
        elif type(value) in (tuple, list):
            items = enumerate(value)
            waiting += [((*path, ("item", k)), name_of_item(name, k), v) for k, v in items]
