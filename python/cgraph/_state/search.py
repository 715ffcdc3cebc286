"""A search for tensors that a function can find, and for all ways that lead to them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from cgraph._state.code import (
    asks_for_gradients,
    is_looked_into,
    is_users,
    names_in,
    names_in_methods,
)
from cgraph._state.holders import Holder, slots_of, vars_of
from cgraph._state.kept import Before
from cgraph._state.surroundings import LEAVES, PLAIN, STEPPING, held_by, of_kind

__all__ = ["Found", "found_tensors"]

# Longer containers are of data. So many items and attributes are looked at in all, and so many
# steps away.
_LONGEST, _MOST_ITEMS, _MOST_STEPS = 4096, 8192, 6
# Longer lists get no tensors that anybody would look for.
_LONGEST_KEPT = 1 << 16


class Found(NamedTuple):
    """What a search has found.

    Attributes:
        holders: Where tensors, modules and optimizers are, and the tuples that lead to some.
        attributes: The dictionaries of optimizers, and of objects on ways that the function's code
            names.
        dictionaries: The other ones on such ways.
        given: As the holders, behind objects among the arguments.
        lists: The lists on such ways, each with what it has, but for those of data.
        numbers: Where numbers and texts are that the function, or one that it names, closes over or
            names, or that classes have which it names, or slots on such ways.
        slots: The slots there with None.
        stepping: Optimizers, learning rate schedulers and gradient scalers, wherever they are.
        asks_for_gradients: Whether the function, or what it may call, names ``grad`` or what asks
            for gradients.
    """

    holders: list[Holder]
    attributes: list[dict[str, Any]]
    dictionaries: list[dict[Any, Any]]
    lists: list[Before]
    given: list[Holder]
    numbers: list[Holder]
    slots: list[Holder]
    stepping: list[Any]
    asks_for_gradients: bool = False

    @classmethod
    def nothing(cls) -> Found:
        """Where nothing was looked for."""
        return cls([], [], [], [], [], [], [], [])

    @property
    def all_dictionaries(self) -> list[dict[Any, Any]]:
        """Both kinds of them."""
        return [*self.attributes, *self.dictionaries]

    @property
    def followed(self) -> list[Holder]:
        """The holders, with those of modules and optimizers behind arguments.

        Tensors there come with a call, and are not to be kept.
        """
        kinds = torch.nn.Module, *STEPPING
        return [*self.holders, *(one for one in self.given if issubclass(type(one.value), kinds))]

    @property
    def all_holders(self) -> list[Holder]:
        """Those of the function and those behind its arguments."""
        return [*self.holders, *self.given]


class _Argument(dict[str, Any]):
    """Where an object among the arguments is."""


def found_tensors(
    function: object, modules: Iterable[torch.nn.Module], given: Mapping[str, object]
) -> Found:
    """Where a function finds tensors besides its arguments, and in plain attributes of modules.

    Also tensors and modules in lists, tuples, dictionaries and objects there. No code of the user's
    runs: objects may stand for others, and raise.

    Args:
        function: The function.
        modules: Those that it reaches, whose parameters and buffers are left out.
        given: Objects and classes among its arguments, by their names.
    """
    parts = [part for module in modules for part in module.modules()]
    names = names_in(function, parts)
    while True:
        found, kinds = _found(function, parts, given, names)
        # What methods name of objects that it may call them on leads further.
        more = names | names_in_methods(names, kinds)
        if more == names:
            return found._replace(asks_for_gradients=asks_for_gradients(names))
        names = more


def _found(
    function: object,
    parts: Sequence[torch.nn.Module],
    given: Mapping[str, object],
    names: frozenset[str],
) -> tuple[Found, set[type]]:
    """The same by these names, and the classes of objects on ways that have them."""
    # The likely ways first: there may be too many.
    named: deque[_Way] = deque()
    others: deque[_Way] = deque()
    numbers: list[Holder] = []
    for name, one in given.items():
        if issubclass(type(one), type):
            named += [(holder, frozenset()) for holder in _of_class(one, numbers)]
        elif not issubclass(type(one), (*PLAIN, *LEAVES)):
            named.append((Holder(_Argument({name: one}), name, one), frozenset()))
    for root in _roots(function, parts, numbers):
        is_named = root.name in names or not isinstance(root.owner, dict)
        way = root._replace(is_named=is_named), frozenset[int]()
        (named if is_named else others).append(way)
    holders: list[Holder] = []
    behind_given: list[Holder] = []
    attributes: dict[int, dict[str, Any]] = {}
    dictionaries: dict[int, dict[Any, Any]] = {}
    lists: dict[int, Before] = {}
    slots: list[Holder] = []
    kinds: set[type] = set()
    stepping: dict[int, Any] = {}
    left = _MOST_ITEMS
    while named or others:
        holder, around = (named or others).popleft()
        value = holder.value
        known = behind_given if isinstance(holder.owner, _Argument) else holders
        is_module = issubclass(type(value), torch.nn.Module)
        if is_module or issubclass(type(value), (torch.Tensor, torch.optim.Optimizer, tuple)):
            known.append(holder)
        if issubclass(type(value), torch.optim.Optimizer):
            attributes[id(vars(value))] = vars(value)
        if issubclass(type(value), STEPPING):
            stepping[id(value)] = value
        if is_module and holder.path:
            known += _buffers(holder)
        elif is_module or issubclass(type(value), LEAVES):
            continue
        if id(value) in around or len(holder.path) >= _MOST_STEPS:
            continue
        is_object = not issubclass(type(value), (dict, list, tuple))
        items = _attributes_in(value) if is_object else _items(value)
        if len(items) > left:
            continue
        left -= len(items)
        if holder.is_named and is_object and not is_module and is_looked_into(type(value)):
            kinds.add(type(value))
            attributes[id(vars_of(value))] = vars_of(value)
            for slot, one in slots_of(value):
                if issubclass(type(one), PLAIN):
                    there = slots if one is None else numbers
                    there.append(holder._replace(value=one, path=(*holder.path, slot)))
        elif holder.is_named and issubclass(type(value), dict):
            dictionaries[id(value)] = value
        elif holder.is_named and issubclass(type(value), list):
            if list.__len__(value) <= _LONGEST_KEPT:
                lists[id(value)] = value, [*list.__iter__(value)]
        around |= {id(value)}
        for name, one in items:
            step = Holder(
                holder.owner,
                holder.name,
                one,
                (*holder.path, name),
                holder.is_deep or is_object,
                holder.is_named and (not is_object or getattr(name, "__name__", name) in names),
                holder.functions,
            )
            (named if step.is_named else others).append((step, around))
    found = Found(
        holders,
        [*attributes.values()],
        [*dictionaries.values()],
        [*lists.values()],
        behind_given,
        numbers,
        slots,
        [*stepping.values()],
    )
    return found, kinds


_Way = tuple[Holder, frozenset[int]]
"""A way, and what it leads through."""


def _roots(
    function: object, parts: Iterable[torch.nn.Module], numbers: list[Holder]
) -> Iterator[Holder]:
    """Where all ways begin, each once; numbers and texts are added to ``numbers``."""
    roots: dict[tuple[int, str], Holder] = {}
    for holder in held_by(function, None):
        place = id(holder.owner), holder.name
        if place in roots:
            # Another function has it as well.
            functions = *roots[place].functions, *holder.functions
            roots[place] = holder._replace(functions=functions)
        elif issubclass(type(holder.value), type):
            # Once for the class, whoever names it.
            of_class = _of_class(holder.value, numbers)
            roots.update({(id(one.owner), one.name): one for one in of_class})
        elif not issubclass(type(holder.value), PLAIN):
            roots[place] = holder
        elif holder.value is not None:
            numbers.append(holder)
    yield from roots.values()
    kinds: dict[type, list[tuple[str, Any]]] = {}
    for part in parts:
        values = vars(part)
        yield from (Holder(values, name, one) for name, one in _attributes_in(part))
        # A method of a module has them from above.
        if part is not getattr(function, "__self__", None):
            if type(part) not in kinds:
                kinds[type(part)] = of_kind(type(part))
            items = kinds[type(part)]
            yield from (Holder(part, *item) for item in items if item[0] not in values)


def _of_class(one: Any, numbers: list[Holder]) -> list[Holder]:
    """What a class of the user's has, and those that it is derived from."""
    if not is_users(one.__module__):
        return []
    values: dict[str, Any] = {}
    for base in reversed(one.__mro__):
        values.update(vars(base))
    plain = ((name, value) for name, value in values.items() if issubclass(type(value), PLAIN))
    known = ((name, value) for name, value in plain if value is not None and name[:2] != "__")
    numbers += [Holder(one, name, value) for name, value in known]
    return [Holder(one, *item) for item in of_kind(one)]


def _buffers(holder: Holder) -> list[Holder]:
    """Where a module behind something else has its buffers."""
    owners = [(part, part._buffers) for part in holder.value.modules()]
    return [
        Holder(owner, name, one, (), True, holder.is_named)
        for part, owner in owners
        if not type(part).__module__.startswith("torch.nn.")
        for name, one in owner.items()
        if one is not None
    ]


def _items(value: Any) -> list[tuple[Any, Any]]:
    """Those of a container that may have tensors; none of one that is too long."""
    base: Any = next(one for one in (dict, list, tuple) if issubclass(type(value), one))
    if base.__len__(value) > _LONGEST:
        return []
    pairs = list(dict.items(value)) if base is dict else enumerate(base.__iter__(value))
    return [item for item in pairs if _may_lead(item[1])]


def _attributes_in(value: object) -> list[tuple[Any, Any]]:
    """Those of an object, and its slots, that may have tensors; none but of classes of users."""
    kind = type(value)
    if issubclass(kind, torch.nn.Module):
        values = {name: one for name, one in vars(value).items() if name not in _OF_MODULES}
    elif issubclass(kind, (*LEAVES, type)):
        return []
    elif is_looked_into(kind):
        return [item for item in (*slots_of(value), *vars_of(value).items()) if _may_lead(item[1])]
    else:
        return []
    return [item for item in values.items() if _may_lead(item[1])]


def _may_lead(value: object) -> bool:
    """Whether a value may be a tensor, or have some."""
    return not issubclass(type(value), PLAIN)


# What each module keeps its parts and hooks in.
_OF_MODULES = frozenset(vars(torch.nn.Module()))
