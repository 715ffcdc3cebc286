"""Where a function finds tensors, and whether they are still there."""

from __future__ import annotations

import contextvars
import enum
import functools
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from cgraph import _torch
from cgraph._state.code import is_users
from cgraph._state.constants import Constant, is_array
from cgraph.errors import CaptureError

__all__ = [
    "HOLDING",
    "KEYWORDS",
    "OF_PARTIAL",
    "Aspect",
    "Holder",
    "Way",
    "held_in",
    "is_same_function",
    "is_view",
    "put_back_numbers",
    "put_back_tensors",
    "require_none_replaced",
    "slots_of",
    "used_of",
    "vars_of",
    "with_functions",
]


HOLDING = (contextvars.ContextVar, weakref.ref)
"""Classes of what holds one other object."""
KEYWORDS: Any = vars(functools.partial)["keywords"]
"""The slot of a partial function that has its keywords."""
OF_PARTIAL: Any = (*map(vars(functools.partial).get, ("func", "args")), KEYWORDS)
"""All slots of a partial function."""
_OBJECT: Any = vars(types.MethodType)["__self__"]
_MOST_ITEMS = 64

Way = tuple[int, str, tuple[Any, ...]]
"""An owner by its number, a name, and what leads on from there."""


class Aspect(enum.Enum):
    """What a container or an object is known by as a whole, or what is behind it."""

    KIND = "kind"
    LENGTH = "length"
    CONTENT = "content"
    EMPTY = "empty"
    HELD = "held"

    def of(self, value: object) -> object:
        """The class, how many items there are, whether there are none, all of a set or an array.

        Or what a context variable or a weak reference holds. None for others.
        """
        kind = type(value)
        if self is Aspect.KIND:
            return kind
        if self is Aspect.HELD:
            if kind is contextvars.ContextVar:
                with suppress(LookupError):  # it has no value here, and no default
                    return value.get()  # type: ignore[attr-defined]
                return None
            return value() if kind is weakref.ref else None  # type: ignore[operator]
        if self in (Aspect.LENGTH, Aspect.EMPTY):
            bases = (one for one in (dict, list, tuple) if issubclass(kind, one))
            base: Any = next(bases, deque if kind is deque else None)
            length = None if base is None else base.__len__(value)
            return length if length is None or self is Aspect.LENGTH else length == 0
        if kind is set:
            return frozenset(value)  # type: ignore[call-overload]
        # Those of derived classes have ways of their own.
        if not is_array(value) or kind.__module__ != "numpy":
            return None
        # Larger ones are of data.
        array: Any = value
        is_small = array.size <= _MOST_ITEMS and not array.dtype.hasobject
        return (array.dtype.str, array.shape, array.tobytes()) if is_small else None


class Holder(NamedTuple):
    """Where something is found.

    Attributes:
        owner: A dictionary or an object.
        name: The name of an item or attribute.
        value: What is there, or at the end of the path.
        path: Keys of dictionaries, places in lists and tuples, and attributes and slots of objects
            that lead on from there; at the end maybe an :class:`Aspect` of what is there.
        is_deep: Whether there are attributes of objects among them.
        is_named: Whether code of the function, or of what it calls, has the names on the way.
        functions: Where the functions are, one in the other, that have the owner.
        variable: The name of what the owner is, if that is a cell.
    """

    owner: Any
    name: str
    value: Any
    path: tuple[Any, ...] = ()
    is_deep: bool = False
    is_named: bool = True
    functions: tuple[Holder, ...] = ()
    variable: str | None = None

    @property
    def way(self) -> Way:
        """What tells it from others, as long as the owner is alive."""
        return id(self.owner), self.name, self.path

    @property
    def now(self) -> Any:
        """What is there now; None if nothing is."""
        try:
            return self._lead(self.path)
        except Exception:  # an empty cell, or whatever a property of the user's raises
            return None

    def put_back(self) -> None:
        """Let the value be there again, unless a tuple has it."""
        with suppress(Exception):  # what led there may be gone
            if self.path:
                _put(self._lead(self.path[:-1]), self.path[-1], self.value)
            else:
                _put(self.owner, self.name, self.value)

    def _lead(self, path: Iterable[Any]) -> Any:
        if isinstance(self.owner, dict):
            value = _item(self.owner, self.name)
        elif isinstance(self.owner, type):
            # A metaclass may answer by code of the user's.
            value = next(
                vars(one)[self.name] for one in self.owner.__mro__ if self.name in vars(one)
            )
        else:
            value = getattr(self.owner, self.name)
        for name in path:
            value = _item(value, name)
        return value

    @property
    def names_back(self) -> Iterator[str | None]:
        """What leads there, the last step first, as code names it; None for what has no name.

        Attributes, and keys that are texts, have a dot before them; what the way begins with may be
        a variable or an attribute.
        """
        for step in reversed(self.path):
            name = step.__name__ if isinstance(step, types.MemberDescriptorType) else step
            yield f".{name}" if isinstance(name, str) else None
        yield self.variable or self.name

    @property
    def title(self) -> str:
        """The name of the slot, variable, item or attribute that it is in."""
        path = [one for one in self.path if type(one) is not Aspect]
        last = path[-1] if path else None
        name = last if isinstance(last, str) else getattr(last, "__name__", None)
        return str(name or self.variable or self.name)

    @property
    def dotted(self) -> str:
        """The way to it, as ``config.scale``, or ``len(config.layers)``."""
        steps = [one for one in self.path if type(one) is not Aspect]
        text = ".".join([self.variable or self.name, *map(_shown, steps)])
        last = self.path[-1] if self.path else None
        if last is Aspect.EMPTY:
            return f"not {text}"
        return f"len({text})" if last is Aspect.LENGTH else text

    @property
    def words(self) -> str:
        """The same with the class or module of Python that has it."""
        if isinstance(self.owner, type):
            return f"{self.owner.__module__}.{self.owner.__qualname__}.{self.title}"
        scope = self.owner.get("__name__") if isinstance(self.owner, dict) else None
        return f"{scope}.{self.title}" if isinstance(scope, str) else self.title

    @property
    def rank(self) -> tuple[bool, int]:
        """What is smaller is the likelier way of the function."""
        return not self.is_named, 0 if self.is_named else len(self.path)

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        """What is there, or the parameters and buffers of a module or an optimizer that is."""
        if isinstance(self.value, torch.nn.Module):
            yield from self.value.parameters()
            yield from self.value.buffers()
        elif isinstance(self.value, torch.optim.Optimizer):
            yield from (one for group in self.value.param_groups for one in group["params"])
        elif isinstance(self.value, torch.Tensor):
            yield self.value


def used_of(held: Iterable[Holder], uses: Callable[[torch.Tensor], bool]) -> list[Holder]:
    """Where what a capture uses is found, and stays: calls to come find what they put there.

    To one tensor there may be many ways through objects, which come and go. Those count whose names
    the function's code has; if it has the names of none, the shortest.

    Args:
        held: Where tensors were found before it.
        uses: Whether it uses one.
    """
    there = (one for one in held if one.now is one.value)
    used = [one for one in there if any(map(uses, one.tensors)) or _is_followed_anyway(one)]
    best: dict[int, tuple[bool, int]] = {}
    for one in used:
        for tensor in one.tensors:
            best[id(tensor)] = min(one.rank, best.get(id(tensor), one.rank))
    return with_functions(
        one
        for one in used
        if not one.is_deep
        or _is_followed_anyway(one)
        or any(one.rank == best[id(tensor)] for tensor in one.tensors)
    )


def _is_followed_anyway(one: Holder) -> bool:
    """Whether a capture does something by what has no tensor: an activation, a generator."""
    is_bare = isinstance(one.value, torch.nn.Module) and not any(True for _ in one.tensors)
    return one.is_named and (is_bare or isinstance(one.value, torch.Generator))


def with_functions(found: Iterable[Holder]) -> list[Holder]:
    """The same with the places of the functions that lead to some, each once."""
    found = list(found)
    functions = {one.way: one for holder in found for one in holder.functions}
    return [*found, *functions.values()]


def require_none_replaced(held: Iterable[Holder], uses: Callable[[torch.Tensor], bool]) -> None:
    """Refuse a function that lets the next call find another tensor than it has used itself.

    Raises:
        CaptureError: It does.
    """
    for one in held:
        if (now := one.now) is one.value:
            continue
        name = one.variable or one.name
        pair = one.value, now
        if any(isinstance(value, torch.Tensor) and uses(value) for value in pair):
            raise CaptureError(
                f"the function assigns {name}, or what is in it, from which it has read a tensor,"
                " and replays do not: write to that in place, or make it an argument and a result"
            )
        modules = (value for value in pair if isinstance(value, torch.nn.Module))
        if any(uses(tensor) for module in modules for tensor in module.parameters()):
            raise CaptureError(
                f"the function puts something else where it has found a module, in {name}, and"
                " replays do not: exchange modules around the call"
            )


def put_back_tensors(held: Iterable[Holder]) -> None:
    """Let tensors and modules be where they were that are others now."""
    for one in held:
        # A tuple has what it had once it is there again.
        is_kept = isinstance(one.value, torch.Tensor | tuple | torch.nn.Module)
        if is_kept and one.now is not one.value:
            one.put_back()


def put_back_numbers(held: Iterable[Holder]) -> None:
    """Let numbers and texts be what they were."""
    for one in held:
        if one.now is not one.value:
            one.put_back()


Pairs = frozenset[tuple[int, int]]
"""Objects that are being compared already: functions may close over one another."""


def is_same_function(now: object, then: object, around: Pairs = frozenset()) -> bool:
    """Whether something is the same object, or a function of the same code and contents.

    Some are made anew before each call, as closures and those of ``functools.partial``.
    """
    if now is then or (id(now), id(then)) in around:
        return True
    around |= {(id(now), id(then))}
    if isinstance(now, types.FunctionType) and isinstance(then, types.FunctionType):
        contents = _contents_of(now), _contents_of(then)
        return now.__code__ is then.__code__ and _are_same(*contents, around)
    if isinstance(now, types.MethodType) and isinstance(then, types.MethodType):
        functions = now.__func__, then.__func__
        return now.__self__ is then.__self__ and is_same_function(*functions, around)
    if isinstance(now, torch.nn.Module) and isinstance(then, torch.nn.Module):
        return _are_same_without_tensors(now, then)
    if isinstance(now, functools.partial) and isinstance(then, functools.partial):
        contents = _parts_of(now), _parts_of(then)
        return [*now.keywords] == [*then.keywords] and _are_same(*contents, around)
    return False


def is_view(now: object, then: object) -> bool:
    """Whether something is another tensor of the same elements, as a view that is made anew."""
    if type(now) is not torch.Tensor or type(then) is not torch.Tensor:
        return False
    # Of others it matters which one they are: somebody has set something on them, or they get
    # gradients.
    if any(one.requires_grad or vars(one) for one in (now, then)):
        return False
    return _torch.place_of(now) == _torch.place_of(then)


def _are_same_without_tensors(now: torch.nn.Module, then: torch.nn.Module) -> bool:
    """Whether two modules without parameters and parts are of one class, with the same settings."""
    mine, other = vars(now), vars(then)
    return (
        type(now) is type(then)
        and mine.keys() == other.keys()
        and all(
            not value and not other[name]
            if isinstance(value, dict)
            else value is other[name] or Constant(value) == Constant(other[name])
            for name, value in mine.items()
        )
    )


def _parts_of(partial: functools.partial[Any]) -> list[object]:
    """What it calls, and with what."""
    return [partial.func, *partial.args, *partial.keywords.values()]


def _contents_of(function: types.FunctionType) -> list[object]:
    """What a function closes over, and its defaults; cells that are empty are themselves."""
    contents: list[object] = [function.__globals__]
    for cell in function.__closure__ or ():
        try:
            contents.append(cell.cell_contents)
        except ValueError:
            contents.append(cell)
    return [*contents, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


def _are_same(now: list[object], then: list[object], around: Pairs) -> bool:
    pairs = zip(now, then, strict=False)
    return len(now) == len(then) and all(is_same_function(*pair, around) for pair in pairs)


def vars_of(one: object) -> dict[str, Any]:
    """The attributes of an object that keeps them in a dictionary; modules have their own way."""
    if issubclass(type(one), torch.nn.Module | type):
        return {}
    # Those of the thread have a way of their own.
    base = threading.local if issubclass(type(one), threading.local) else object
    try:
        found = base.__getattribute__(one, "__dict__")
    except Exception:  # there is none, or it is a property of the user's
        return {}
    return found if isinstance(found, dict) else {}


def held_in(value: object) -> list[tuple[Aspect, Any]]:
    """What a context variable or a weak reference holds, with how a way leads there.

    A weak reference keeps no tensor, module or optimizer, and nor does a graph for it.
    """
    held = Aspect.HELD.of(value)
    is_weak = not isinstance(value, contextvars.ContextVar)
    stays = isinstance(held, torch.Tensor | torch.nn.Module | torch.optim.Optimizer)
    return [] if is_weak and stays else [(Aspect.HELD, held)]


def slots_of(one: object) -> list[tuple[types.MemberDescriptorType, Any]]:
    """The slots of an object of a user's class, a partial function or a method, that are filled."""
    if issubclass(type(one), types.MethodType):
        return [(_OBJECT, _OBJECT.__get__(one))]
    if issubclass(type(one), functools.partial):
        return [(slot, slot.__get__(one)) for slot in OF_PARTIAL]
    found: list[tuple[types.MemberDescriptorType, Any]] = []
    for base in type(one).__mro__[:-1]:
        for slot in vars(base).values():
            if isinstance(slot, types.MemberDescriptorType) and is_users(base.__module__):
                with suppress(AttributeError):  # it is empty
                    found.append((slot, slot.__get__(one)))
    return found


def _put(owner: Any, name: Any, value: object) -> None:
    if name is Aspect.HELD and isinstance(owner, contextvars.ContextVar):
        owner.set(value)
    elif isinstance(name, types.MemberDescriptorType):
        name.__set__(owner, value)
    elif isinstance(owner, dict | list | deque):
        owner[name] = value
    elif isinstance(owner, types.CellType):
        owner.cell_contents = value
    elif name in (attributes := _own_attributes(owner)):
        attributes[name] = value
    elif not isinstance(owner, tuple):
        # Of the class that it is found in.
        kind = owner if isinstance(owner, type) else type(owner)
        base = next(base for base in kind.__mro__ if name in vars(base))
        slot = vars(base)[name]
        if isinstance(slot, types.MemberDescriptorType) and kind is not owner:
            slot.__set__(owner, value)
        else:
            setattr(base, name, value)


def _own_attributes(owner: object) -> dict[str, Any]:
    """Those of an object or a module."""
    return vars(owner) if issubclass(type(owner), torch.nn.Module) else vars_of(owner)


def _shown(step: Any) -> str:
    """A step of a way; of an object that is a key, its class."""
    is_plain = isinstance(step, str | int | float | bytes | tuple | torch.dtype | torch.device)
    return str(step if is_plain else getattr(step, "__name__", type(step).__name__))


def _item(owner: Any, name: Any) -> Any:
    """What a container or an object has, by no code of the user's."""
    if type(name) is Aspect:
        return name.of(owner)
    if isinstance(owner, dict):
        # Not by the operator, for which a dictionary with defaults makes what is missing.
        return dict.get(owner, name)
    if isinstance(owner, list):
        return list.__getitem__(owner, name)
    if isinstance(owner, tuple):
        return tuple.__getitem__(owner, name)
    if isinstance(owner, deque):
        return deque.__getitem__(owner, name)
    if isinstance(name, types.MemberDescriptorType):
        return name.__get__(owner)
    return _own_attributes(owner)[name]
