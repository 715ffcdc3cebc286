"""Attributes that a function sets while it is captured, which no replay sets."""

from __future__ import annotations

import enum
import itertools
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from numbers import Number
from typing import Any

import torch

from cgraph import _core
from cgraph._state.constants import Constant
from cgraph._state.holders import Holder, slots_of, vars_of
from cgraph._state.surroundings import attributes_of
from cgraph.errors import CaptureError

__all__ = [
    "Attributes",
    "Place",
    "changed_numbers",
    "changes",
    "dictionaries_of",
    "is_alike",
    "is_another",
    "is_number",
    "is_torchs",
    "made_numbers",
    "parts_of",
    "place_of",
    "put_back_whole",
    "registered_in",
]


Place = tuple[Any, ...]
"""What tells a place of a number from others; its name comes last."""


class Attributes:
    """Attributes and buffers, as they are now.

    Args:
        dictionaries: Those that hold them; see :func:`dictionaries_of`.
        others: Dictionaries that are no attributes of objects, likewise.
    """

    def __init__(
        self, dictionaries: Sequence[dict[str, Any]], others: Sequence[dict[Any, Any]] = ()
    ) -> None:
        self._dictionaries, self._others = dictionaries, others
        self._contents = _core.Contents([*dictionaries, *others])
        self._of_objects = set(map(id, dictionaries))

    def again(self) -> Attributes:
        """The same dictionaries, as they are now."""
        return Attributes(self._dictionaries, self._others)

    @property
    def are_others(self) -> bool:
        """Whether one of them is another object now, or gone, or new."""
        return bool(self._contents.changed())

    def require_no_new_tensor(self, but: Collection[Place] = ()) -> None:
        """Refuse a function that keeps a tensor where no replay puts one.

        Args:
            but: Places that do not count.

        Raises:
            CaptureError: An attribute is another tensor now.
        """
        for _, name, _ in (one for one in self._new_tensors() if (id(one[0]), one[1]) not in but):
            raise CaptureError(
                f"the function sets the attribute {name} to a tensor, and replays do not: write to"
                " it in place, or make it an argument and a result"
            )

    def exchanged(self, but: Collection[Place]) -> Iterator[tuple[Any, Any, Any]]:
        """Where other objects are than were: the name, what was there, and what is.

        Args:
            but: Places that do not count.
        """
        for now, before in self._contents.changed():
            for name, there in before.items():
                value = dict.get(now, name)
                if there is not None and value is not there and (id(now), name) not in but:
                    yield name, there, value

    def changed(self, but: Collection[Place] = ()) -> str | None:
        """Why a function is not captured that changes a number or text; None if it changes none.

        Args:
            but: Places that do not count.
        """
        for now, name, before in self._changes():
            value = dict.get(now, name)
            if not isinstance(value, torch.Tensor) and (id(now), name) not in but:
                return changes(name, before[name], value)
        return None

    @property
    def has_new_tensor(self) -> bool:
        """Whether there is a tensor where there was none."""
        new = self._new_tensors()
        return any(not isinstance(before.get(name), torch.Tensor) for _, name, before in new)

    def others(self, has_made: Callable[[Any], bool]) -> set[Place]:
        """The places of numbers and texts that are others now, or gone, and of what calls made.

        Also of new ones, unless other threads may have put them there.

        Args:
            has_made: As for :meth:`put_back_new`.
        """
        numbers = {
            (id(now), name)
            for now, name, before in self._changes(made=True)
            if name in before or id(now) in self._of_objects
        }
        made = {
            (id(now), name)
            for now, before in self._contents.changed()
            for name, value in dict.copy(now).items()
            if value is not before.get(name) and has_made(value)
        }
        return numbers | made

    @property
    def made(self) -> dict[Place, Any]:
        """Numbers and texts that are where there was none, by their places."""
        changes = ((now, name) for now, name, before in self._changes(made=True))
        found = {(id(now), name): dict.get(now, name) for now, name in changes}
        return {place: value for place, value in found.items() if is_number(value)}

    @property
    def made_of_objects(self) -> list[Place]:
        """The places of those that are attributes of objects."""
        return [place for place in self.made if place[0] in self._of_objects]

    @property
    def new(self) -> list[Any]:
        """What is where there was something else, but for tensors in the places of others."""
        # Copies: other threads may add something meanwhile.
        pairs = [(dict.copy(now), before) for now, before in self._contents.changed()]
        items = ((value, before.get(name)) for now, before in pairs for name, value in now.items())
        changed = (pair for pair in items if pair[0] is not pair[1])
        return [value for value, old in changed if not isinstance(old, torch.Tensor)]

    def put_back_others(self, *, numbers: bool, made: Collection[Place] = ()) -> None:
        """Set tensors back that are others now.

        Args:
            numbers: With numbers and texts.
            made: With those in these places, where there was none.
        """
        for now, name, before in self._changes() if numbers else self._new_tensors():
            _put_back(now, name, before)
        for now, before in self._contents.changed() if made else ():
            _take_new(now, before, [one[-1] for one in made if one[0] == id(now)])

    def put_back_new(self, has_made: Callable[[Any], bool], first: Attributes | None) -> None:
        """Take away what is where there was nothing, or None, and what has come for something else.

        From a dictionary to which something was added later than in the first call, only what that
        has made is taken: the others may be other threads'. Where nobody knows, flags as well, and
        from attributes of objects all that came with what was made.

        Args:
            has_made: Tells of a value whether what a call has made is in it.
            first: The dictionaries after the first call; None if it has not come to its end.
        """
        later = {} if first is None else first._new_names()
        for now, before in self._contents.changed():
            there = dict.copy(now)
            names = [name for name in there if before.get(name) is None]
            made = [name for name in names if has_made(there[name])]
            is_objects = id(now) in self._of_objects
            if first is None:
                is_ours = is_objects and bool(made)
                # A flag says that something is there.
                made += [name for name in names if (is_objects or made) and there[name] is True]
            else:
                is_ours = (is_objects or bool(made)) and later.get(id(now), set()) <= {*made}
            _take_new(now, before, names if is_ours else made)
            for name in before.keys() & there.keys():
                if there[name] is not before[name] and has_made(there[name]):
                    _base_of(now).__setitem__(now, name, before[name])

    def _new_names(self) -> dict[int, set[Any]]:
        """The names that dictionaries have got since, by the numbers of these."""
        changed = self._contents.changed()
        return {id(now): dict.copy(now).keys() - before.keys() for now, before in changed}

    def put_back_in(self, places: Collection[Place]) -> None:
        """Let what is in some places be as it was, where it is another one now."""
        for now, before in self._contents.changed() if places else ():
            for name in {**before, **dict.copy(now)}:
                if (id(now), name) in places and dict.get(now, name) is not before.get(name):
                    _put_back(now, name, before)

    def put_back(self) -> None:
        """Let attributes of objects be what they were, after a capture that is made anew.

        What it has made, as a module, nothing has computed.
        """
        for now, before in self._contents.changed():
            if id(now) in self._of_objects:
                put_back_whole(now, before)

    def _new_tensors(self) -> Iterator[tuple[dict[str, Any], str, dict[str, Any]]]:
        """Attributes that are another tensor now: what holds them, the name, what that held."""
        return (one for one in self._changes() if isinstance(dict.get(*one[:2]), torch.Tensor))

    def _changes(
        self, *, made: bool = False
    ) -> Iterator[tuple[dict[str, Any], str, dict[str, Any]]]:
        """The same with those that are another number or text, or gone.

        Args:
            made: With numbers where there was none, which are what a first call computes, for the
                others to use.
        """
        for now, before in self._contents.changed():
            # Modules in another mode have keys of their own.
            is_module = "_parameters" in before
            # A dictionary of the user's may have items of its own making.
            for name in {**before, **dict.copy(now)}:
                if is_module and (name == "training" or _is_computed(name, before)):
                    continue
                there, value = before.get(name), dict.get(now, name)
                if name not in now:
                    is_other = isinstance(there, torch.Tensor) or is_number(there)
                elif isinstance(value, torch.Tensor):
                    is_other = there is not value
                else:
                    is_other = is_number(there) and is_another(value, there)
                    is_other |= made and there is None and is_number(value)
                if is_other:
                    yield now, name, before


def put_back_whole(
    now: dict[str, Any],
    before: dict[str, Any],
    is_ours: Callable[[Any], bool] | None = None,
) -> None:
    """Let a dictionary hold what it held, one by one: other threads may be reading others.

    Args:
        now: The dictionary.
        before: What it held.
        is_ours: Tells of a new value whether it is to go; by default all are.
    """
    for name in {*now} - before.keys():
        if is_ours is None or is_ours(now.get(name)):
            now.pop(name, None)
    for name, value in before.items():
        if now.get(name, now) is not value:
            now[name] = value
    if is_ours is None and [*now] != [*before]:
        now.clear()
        now.update(before)


def _is_computed(name: Any, values: dict[str, Any]) -> bool:
    """Whether a hook of torch's sets an attribute of a module from its parameters in each call."""
    parameters = values["_parameters"]
    return any(f"{name}{suffix}" in parameters for suffix in ("_g", "_orig"))


def _put_back(now: dict[Any, Any], name: Any, before: dict[Any, Any]) -> None:
    """Let a dictionary have by a name what it had, or nothing if it had nothing."""
    base = _base_of(now)
    if name not in before:
        base.pop(now, name, None)
    elif name in now:
        base.__setitem__(now, name, before[name])
    else:
        base.__setitem__(now, name, before[name])
        # In its place: what comes first may be what a call takes. One by one, as other threads may
        # be adding some.
        behind = {*itertools.dropwhile(lambda one: one != name, before)}
        for other in [one for one in [*now] if one in behind or one not in before]:
            if other != name and other in now:
                base.__setitem__(now, other, base.pop(now, other))


def _base_of(one: dict[Any, Any]) -> Any:
    """The class whose methods change a dictionary, by no code of the user's."""
    return OrderedDict if issubclass(type(one), OrderedDict) else dict


def _take_new(now: dict[Any, Any], before: dict[Any, Any], names: Iterable[Any]) -> None:
    """Let a dictionary have nothing by some names where it had nothing, and None where it had."""
    for name in names:
        if name not in before:
            _base_of(now).pop(now, name, None)
        elif before[name] is None:
            _base_of(now).__setitem__(now, name, None)


def is_number(value: Any) -> bool:
    """Whether a value is a number or a text, which a call may change, or consists of some.

    Members of enumerations, ranges and torch's types and devices are such ones, and so are slices,
    tuples, frozen sets and frozen dataclasses of them.
    """
    return value is not None and _numbers_in(value) is not None


def _numbers_in(value: Any) -> list[Any] | None:
    """What a number, a text or something of some consists of; None if it is none."""
    waiting, found = [value], list[Any]()
    for _ in range(_MOST_PARTS):
        if not waiting:
            return found
        one = waiting.pop()
        kind = type(one)
        if issubclass(kind, _NUMBERS) or one is None or _is_numpys_bool(kind):
            found.append(one)
        elif issubclass(kind, tuple) and tuple.__len__(one) <= _MOST_PARTS:
            found.append(kind)
            waiting += tuple.__iter__(one)
        elif kind is slice:
            found.append(kind)
            waiting += (one.start, one.stop, one.step)
        elif issubclass(kind, frozenset) and all(
            issubclass(type(item), _NUMBERS) for item in frozenset.__iter__(one)
        ):
            # As a whole: it has no order.
            found.append(one)
        elif _is_frozen(kind):
            found.append(kind)
            waiting += vars_of(one).values()
            waiting += (value for _, value in slots_of(one))
        else:
            return None
    return None if waiting else found


def _is_frozen(kind: type) -> bool:
    """Whether a class is a dataclass whose objects do not change."""
    parameters = vars(kind).get("__dataclass_params__")
    return parameters is not None and bool(parameters.frozen)


def is_another(now: object, then: object) -> bool:
    """Whether a number or text is another one now."""
    return now is not then and parts_of(now) is not None and not is_alike(now, then)


def is_alike(now: object, then: object) -> bool:
    """Whether a value is the same object, or a number or text that equals it."""
    return now is then or ((parts := parts_of(now)) is not None and parts == parts_of(then))


def parts_of(value: object) -> tuple[Constant, ...] | None:
    """What a number, a text or something of some consists of, to be compared; None for all else."""
    found = _numbers_in(value)
    return None if found is None else tuple(map(Constant, found))


def changes(name: str, before: object, now: object = None) -> str:
    """Why a function is not captured that changes something, or takes it away."""
    does = f"takes {name} away, which was {before!r:.40}"
    if now is not None:
        does = f"changes {name} from {before!r:.40} to {now!r:.40}"
    return (
        f"the function {does}, and replays do not: do it around the call, or let it be a tensor"
        " that is written in place"
    )


def changed_numbers(held: Iterable[Holder], but: Collection[Place] = ()) -> str | None:
    """Why a function is not captured that changes numbers or texts which it finds by name.

    None if they are as they were.

    Args:
        held: Where they were.
        but: Places that do not count.
    """
    for one in held:
        if is_another(one.now, one.value) and place_of(one) not in but:
            return changes(one.title, one.value, one.now)
    return None


def made_numbers(held: Iterable[Holder]) -> dict[Place, Any]:
    """Numbers and texts that are where None was, by the place.

    Args:
        held: Where that was.
    """
    found = ((one, one.now) for one in held)
    return {place_of(one): now for one, now in found if is_number(now)}


def place_of(one: Holder) -> Place:
    """What tells a place from others, with its name."""
    return id(one.owner), one.path, one.title


def _is_numpys_bool(kind: type) -> bool:
    """Whether a class is that of NumPy's truth values, which are no numbers for Python."""
    return kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_")


# What has more parts is of data.
_MOST_PARTS = 64
# With those of NumPy.
_NUMBERS = (
    *(int, float, complex, str, bytes, Number, enum.Enum, range),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


def registered_in(parts: Iterable[torch.nn.Module]) -> list[dict[str, Any]]:
    """What holds the modules and parameters of modules."""
    return [one for part in parts for one in (part._modules, part._parameters)]


def dictionaries_of(
    function: Callable[..., Any], parts: Iterable[torch.nn.Module]
) -> list[dict[str, Any]]:
    """What holds the attributes and buffers of a function's object and of modules, each once.

    Args:
        function: The function, a method or a callable object.
        parts: The modules, with those that they consist of.
    """
    attributes = attributes_of(function)
    found = {id(attributes): attributes}
    for part in parts:
        # Users and their hooks set attributes of torch's own as well. Those that spread work over
        # devices have flags of their own.
        if not type(part).__module__.startswith("torch.nn.parallel."):
            found[id(vars(part))] = vars(part)
        if part._buffers or not is_torchs(part):
            found[id(part._buffers)] = part._buffers
    return list(found.values())


def is_torchs(module: torch.nn.Module) -> bool:
    """Whether a module is one of torch's own, which sets none of its attributes when it is called.

    Others may: hooks of torch's, as of weight norm, set what is no parameter any more.
    """
    return type(module).__module__.startswith("torch.nn.")
