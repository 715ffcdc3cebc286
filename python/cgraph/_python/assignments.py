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

from cgraph import _torch
from cgraph._python.guards import Change, Guards, Way
from cgraph._python.steps import NOTHING, found_at, items_of, name_of_item, put_at, slots_of
from cgraph._python.values import as_key, attributes_of, is_plain, is_same
from cgraph._torch import tree_flatten, tree_map

__all__ = [
    "Assigned",
    "Assigning",
    "Assignments",
    "assignable_in",
    "is_alike",
    "returning_assigned",
    "signature_of",
    "unlike",
]

Step = tuple[Any, ...]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Assigned(NamedTuple):
    """A value that a call has assigned.

    Attributes:
        target: The way to the place, with the value before the call.
        value: The value.
    """

    target: Way
    value: Any


@dataclass(frozen=True)
class Assigning:
    """The assignments of a replay.

    Attributes:
        targets: The places; the values follow the function's result.
        returns: The steps to the dictionary among the arguments that is returned; None for another
            result.
    """

    targets: Sequence[Way] = ()
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
        # An assignment may exchange what holds the place of a later one.
        holders = [one.find_holder(objects, (args, kwargs)) for one in self.targets]
        for holder, target, value in zip(holders, self.targets, values, strict=True):
            put_at(holder, target.path[-1], value)
        if self.returns is not None:
            return functools.reduce(found_at, self.returns, (args, kwargs))
        return result


# The values that something holds: for each kind of step by its key.
_Parts = dict[str, dict[Any, Any]]


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
        self._addresses = guards.addresses
        # The ways to places with the values before, and the tensors that lie there instead.
        self._placed: list[tuple[Way, torch.Tensor]] = []
        # What holds values, and these as they were.
        self._holders: list[tuple[Way, _Parts]] = []
        # The items of containers that are not assigned to.
        self._whole: list[tuple[Any, list[Any]]] = []
        of_arguments = assignable_in(arguments, places)
        ways = (Way(name, ("arguments",), path, None, one) for path, name, one in of_arguments)
        for way in (*guards.holders(objects), *ways):
            if isinstance(way.value, list | deque | set):
                self._whole.append((way.value, [*way.value]))
            self._holders.append((way, _parts(way.value)))

    def place(self, ways: Sequence[Way], tensors: Sequence[torch.Tensor]) -> None:
        """Put tensors at places, for the function to find them there."""
        for way, tensor in zip(ways, tensors, strict=True):
            self._placed.append((way, tensor))
            put_at(way.holder, way.path[-1], tensor)

    def unplace(self) -> None:
        """Put back what was at these places, where nothing else was assigned."""
        for way, tensor in self._placed:
            if found_at(way.holder, way.path[-1]) is tensor:
                put_at(way.holder, way.path[-1], way.value)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Leave out what a block assigns, as a break does."""
        at_begin = [_parts(way.value) for way, _ in self._holders]
        try:
            yield
        finally:
            for (way, before), parts in zip(self._holders, at_begin, strict=True):
                for kind, key, _, _, now in _differences(parts, _parts(way.value)):
                    of_kind = before.setdefault(kind, {})
                    of_kind.pop(key, None)
                    if now is not NOTHING:
                        of_kind[key] = now

    def changed(self) -> list[Assigned]:
        """Return what has been assigned since, deletions included."""
        found = []
        for (name, root, path, _, value), parts in self._holders:
            is_of_code = isinstance(value, dict) and "__builtins__" in value
            for kind, key, place, before, now in _differences(parts, _parts(value)):
                # Attributes and globals that no code names are not guarded.
                if (kind in ("attr", "class") or is_of_code) and key not in self._names:
                    continue
                if not (is_plain(now) and is_same(before, now)):
                    step = (kind,) if kind == "cell" else (kind, key)
                    its_name = _name(name, step, place, self._addresses)
                    found.append(Assigned(Way(its_name, root, (*path, step), value, before), now))
        return found

    def taken_out(
        self, can_return: Callable[[torch.Tensor], bool]
    ) -> tuple[list[Assigned], list[Assigned]]:
        """Put back the values before of what a replay can assign; return that, and the rest."""
        self.unplace()
        there = {id(way.value) for way, _ in self._holders}
        found: tuple[list[Assigned], list[Assigned]] = [], []
        for one in self.changed():
            can_assign = (
                not isinstance(one.target.holder, list | deque)
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
        for way, _ in changed:
            if not isinstance(way.holder, list | deque):
                put_at(way.holder, way.path[-1], way.value)
        # What is put back behind other items comes to its own place.
        changed_there = {id(one.target.holder) for one in changed}
        for way, before in self._holders:
            if id(way.value) in changed_there and isinstance(way.value, dict):
                items = before.get("item", {})
                if items.keys() == way.value.keys() and [*items] != [*dict.keys(way.value)]:
                    dict.clear(way.value)
                    dict.update(way.value, items)

    def at_break(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a break so that in each replay it finds what was assigned before it."""
        placed = {id(one) for _, one in self._placed}
        made = [one for one in self.changed() if id(one.value) not in placed]
        if not made:
            return fn

        def copied(leaf: Any) -> Any:
            return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf

        @functools.wraps(fn, updated=())
        def call(*args: Any, **kwargs: Any) -> Any:
            for way, value in made:
                # What belongs to a call is what the break got in the capture.
                is_of_call, step = way.root[0] != "root", way.path[-1]
                holder = way.holder if is_of_call else way.find_holder(anew=True)
                # In the capture itself it is there.
                if found_at(holder, step) is not value:
                    put_at(holder, step, tree_map(copied, value))
            return fn(*args, **kwargs)

        return call


def returning_assigned(
    function: Callable[..., Any],
    guards: Guards,
    names: Collection[str],
    targets: Sequence[Way],
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
            holders = [(one.find_holder(objects, (args, kwargs)), one.path[-1]) for one in targets]
            return result, [found_at(*one) for one in holders]
        finally:
            state.unplace()
            state.put_back()

    return call


def signature_of(value: Any) -> tuple[Any, tuple[Hashable, ...]]:
    """Return the structure of an assigned value, and its plain parts; None for each tensor."""
    leaves, spec = tree_flatten(value)
    return spec, tuple(None if isinstance(one, torch.Tensor) else as_key(one) for one in leaves)


def is_alike(before: Any, value: Any, reals: Mapping[int, Any]) -> bool:
    """Return whether two values are put together alike, of the same objects."""
    leaves, spec = tree_flatten(value)
    others, its_spec = tree_flatten(before)
    pairs = zip(leaves, others, strict=False)
    return spec == its_spec and all(
        reals.get(id(one), one) is other or (is_plain(one) and is_same(one, other))
        for one, other in pairs
    )


def unlike(assigned: Sequence[Assigned], known: Mapping[str, Any] | None) -> Change | None:
    """Find a value that the previous call has not assigned so; None if there is none.

    Args:
        assigned: What a call has assigned.
        known: The signatures of what the previous call has assigned, by name. Where they are not
            known, the operators tell of tensors.
    """
    for way, value in assigned:
        now = signature_of(value)
        is_known = not any(now[1]) if known is None else known.get(way.name) == now
        if not is_known:
            return Change(way.name, True, way.value, value)
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


def _differences(before: _Parts, now: _Parts) -> Iterator[tuple[str, Any, int, Any, Any]]:
    """Yield the kind, key and place of each value that is another object, with both objects."""
    for kind in {**before, **now} if before or now else ():
        old, parts = before.get(kind, {}), now.get(kind, {})
        is_like = len(old) == len(parts) and all(map(operator.is_, old, parts))
        if is_like and all(map(operator.is_, old.values(), parts.values())):
            continue
        for place, key in enumerate((*parts, *(key for key in old if key not in parts))):
            was, one = old.get(key, NOTHING), parts.get(key, NOTHING)
            if was is not one:
                yield kind, key, place, was, one


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


def assignable_in(
    arguments: Arguments, places: Sequence[str]
) -> Iterator[tuple[tuple[Step, ...], str, Any]]:
    """Yield the dictionaries and dataclasses of tensors among arguments, with ways and names."""
    args, kwargs = arguments
    waiting: list[tuple[tuple[Step, ...], str, Any]] = [
        ((("item", 0), ("item", place)), name, one)
        for place, (name, one) in enumerate(zip(places, args, strict=False))
    ]
    waiting += [((("item", 1), ("item", name)), name, one) for name, one in kwargs.items()]
    while waiting:
        path, name, value = waiting.pop()
        is_record = _torch.is_record(value)
        if type(value) is dict or is_record:
            yield path, name, value
        if is_record:
            waiting += [((*path, ("attr", k)), f"{name}.{k}", v) for k, v in vars(value).items()]
        elif isinstance(value, list | tuple) or type(value) is dict:
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for place, (key, one) in enumerate(items):
                waiting.append(((*path, ("item", key)), name_of_item(name, key, place, {}), one))


def _name(holder: str, step: Step, place: int, addresses: Mapping[int, str]) -> str:
    """Return the name of a place in what has this one, as walks give it."""
    kind, *rest = step
    if kind == "cell":
        return holder
    if kind == "item" and holder == "globals":
        return str(rest[0])
    if kind == "item":
        return name_of_item(holder, rest[0], place, addresses)
    return f"{holder}.{getattr(rest[0], '__name__', rest[0])}"
