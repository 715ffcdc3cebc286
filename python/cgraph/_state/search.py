"""A search for tensors that a function can find, and for all ways that lead to them."""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from cgraph import _torch
from cgraph._state.attributes import is_number, is_torchs
from cgraph._state.called import come_to_parts
from cgraph._state.code import (
    Reached,
    asks_for_gradients,
    imported_in,
    is_looked_into,
    is_users,
    named_of_module,
    names_of,
)
from cgraph._state.constants import is_array
from cgraph._state.drawing import is_drained, is_drawn_from
from cgraph._state.holders import HOLDING, OF_PARTIAL, Holder, slots_of, vars_of
from cgraph._state.inside import CONTAINERS, WRAPPERS, attributes_in, is_of_module, items_in
from cgraph._state.kept import Before, items_of, len_of
from cgraph._state.reads import Reads
from cgraph._state.stepping import HOOKS_OF_STEPS
from cgraph._state.surroundings import (
    FUNCTIONS,
    LEAVES,
    PLAIN,
    STEPPING,
    Lasting,
    held_by,
    of_kind,
    places_of,
)

__all__ = ["Found", "found_tensors"]

# So many items and attributes are looked at in all, and so many steps away.
_MOST_ITEMS, _MOST_STEPS = 8192, 6
# Longer lists get no tensors that anybody would look for.
_LONGEST_KEPT = 1 << 16
# Larger arrays are of data, which other threads may write.
_MOST_COUNTS = 64
# Numbers of libraries.
_MOST_FAR = 4096


class Found(NamedTuple):
    """What a search has found.

    Attributes:
        holders: Where tensors, modules and optimizers are, and the tuples that lead to some.
        attributes: The dictionaries of optimizers, and of objects on ways that the function's code
            names.
        dictionaries: The other ones on such ways.
        given: As the holders, behind objects among the arguments.
        lists: Lists, deques and sets on such ways, each with what it has, but for those of data.
        numbers: Where numbers and texts are that the function, or one that it names, closes over or
            names, or that classes have which it names or calls, or slots on such ways.
        empty: The same places where None is.
        stepping: Optimizers, learning rate schedulers and gradient scalers, wherever they are.
        far: Where other numbers are, that only functions name which it may call.
        draws: Whether code names the random numbers that all of Python or NumPy share.
        generators: Other generators of random numbers of Python or NumPy, on such ways.
        arrays: Arrays of NumPy's with a few numbers likewise, each with a copy.
        reads: The places of numbers, texts and functions that the code reads; see :class:`Reads`.
        drained: Where iterators and queues are, likewise, unless breaks may take from them.
        asks_for_gradients: Whether the function, or what it may call, names ``grad`` or what asks
            for gradients.
        takes_items: Whether likewise what takes items from lists.
    """

    holders: list[Holder]
    attributes: list[dict[str, Any]]
    dictionaries: list[dict[Any, Any]]
    lists: list[Before]
    given: list[Holder]
    numbers: list[Holder]
    empty: list[Holder]
    stepping: list[Any]
    far: Sequence[Holder] = ()
    draws: bool = False
    generators: Sequence[Any] = ()
    drained: Sequence[Holder] = ()
    arrays: Sequence[tuple[Any, Any]] = ()
    reads: Sequence[Holder] = ()
    asks_for_gradients: bool = False
    takes_items: bool = False

    @classmethod
    def nothing(cls) -> Found:
        """Where nothing was looked for."""
        return cls([], [], [], [], [], [], [], [])

    @property
    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that are found, with those of modules, and what they are called."""
        for one in self.all_holders:
            if isinstance(one.value, torch.Tensor):
                yield one.words, one.value
            elif isinstance(one.value, torch.nn.Module):
                for name, parameter in one.value.named_parameters():
                    yield f"{one.words}.{name}", parameter

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
    function: object, modules: Sequence[torch.nn.Module], given: Sequence[tuple[str, object]]
) -> Found:
    """Where a function finds tensors besides its arguments, and in plain attributes of modules.

    Also tensors and modules in lists, tuples, dictionaries and objects there. No code of the user's
    runs: objects may stand for others, and raise.

    Args:
        function: The function.
        modules: Those that it reaches, whose parameters and buffers are left out.
        given: Objects and classes among its arguments, with their names.
    """
    parts = [part for module in modules for part in module.modules()]
    reached = Reached(function, parts)
    come_to_parts(function, modules, reached)
    reached.call_hooks()
    while True:
        found, functions, kinds = _found(function, parts, given, reached)
        # What methods name of objects that it may call them on leads further.
        before = reached.size
        reached.go_on(functions, kinds | reached.handed_on)
        come_to_parts(function, modules, reached)
        if reached.size == before:
            asks, takes = asks_for_gradients(reached.names), not _ITEMS.isdisjoint(reached.names)
            return found._replace(asks_for_gradients=asks, takes_items=takes)


def _found(
    function: object,
    parts: Sequence[torch.nn.Module],
    given: Sequence[tuple[str, object]],
    reached: Reached,
) -> tuple[Found, list[object], set[type]]:
    """The same from what its code comes to, with functions and classes of objects on named ways."""
    has_name = reached.has_name
    # The likely ways first: there may be too many.
    named: deque[_Way] = deque()
    others: deque[_Way] = deque()
    plain = _Plain([], [], [])
    reads = Reads(reached)
    called: list[object] = []
    for name, one in given:
        if issubclass(type(one), type):
            named += [(holder, frozenset()) for holder in _of_class(one, plain.add)]
        elif not issubclass(type(one), (*PLAIN, *LEAVES)):
            named.append((Holder(_Argument({name: one}), name, one), frozenset()))
    for root in _roots(function, parts, reached, plain):
        is_attribute = isinstance(root.owner, dict) and not isinstance(root.owner, Lasting)
        is_named = has_name(root.name) or not is_attribute
        way = root._replace(is_named=is_named), frozenset[int]()
        (named if is_named else others).append(way)
    holders: list[Holder] = []
    behind_given: list[Holder] = []
    methods = (one for one in reached.functions.values() if type(one) is types.MethodType)
    owners = [one.__self__ for one in methods]
    callables = [] if issubclass(type(function), FUNCTIONS) else [function]
    for one in (*owners, *callables, *parts):
        reads.add_object(one)
    for one in reached.functions.values():
        reads.add_function(one)
    attributes = {id(values): values for values in map(vars_of, owners)}
    attributes |= {id(values): values for values in _set_on_tensors_of(parts)}
    dictionaries: dict[int, dict[Any, Any]] = {}
    lists: dict[int, Before] = {}
    # Of whose objects code may call methods, and those whose attributes were looked for.
    kinds, looked_into = set[type](), set[type]()
    stepping: dict[int, Any] = {}
    generators: dict[int, Any] = {}
    drained: list[Holder] = []
    arrays: dict[int, tuple[Any, Any]] = {}
    own_parts = set(map(id, parts))
    left = _MOST_ITEMS
    while named or others:
        holder, around = (named or others).popleft()
        value = holder.value
        known = behind_given if isinstance(holder.owner, _Argument) else holders
        is_module = issubclass(type(value), torch.nn.Module)
        if holder.is_named and _has_methods(type(value), has_name):
            # Also tuples, dictionaries and tensors of classes of the user's.
            kinds.add(type(value))
        if issubclass(type(value), torch.Tensor):
            values = _set_on(value)
            attributes[id(values)] = values
            reads.add_set_on(value)
            called += _hooks_of_leaf(value)
            around_it = around | {id(value)}
            named += [(Holder(values, *item), around_it) for item in values.items()]
        if is_module or issubclass(type(value), _KNOWN):
            known.append(holder)
        if issubclass(type(value), torch.optim.Optimizer):
            attributes[id(vars(value))] = vars(value)
            called += _hooks_of_steps(value)
        if issubclass(type(value), STEPPING):
            stepping[id(value)] = value
            kinds.add(type(value))
            if holder.is_named:
                reads.add_stepping(value)
        if is_module:
            if holder.is_named:
                kinds.update(map(type, value.modules()))
            if id(value) in own_parts:
                # It is followed as a part.
                continue
            if holder.is_named and not isinstance(holder.owner, _Argument):
                for part in value.modules():
                    reads.add_object(part)
        if issubclass(type(value), FUNCTIONS):
            # A module's forward may be one of its own.
            called += [value] if holder.is_named or holder.name == "forward" else []
            if not (issubclass(type(value), functools.partial) or is_of_module(value)):
                continue
        if is_module:
            known += _tensors_of(holder)
        elif issubclass(type(value), LEAVES):
            continue
        if holder.is_named and is_drawn_from(value):
            generators[id(value)] = value
        if holder.is_named and is_array(value) and value.size <= _MOST_COUNTS:
            arrays[id(value)] = value, value.copy()
        # What a partial function was given may be a library's, as pytest's fixtures are.
        is_given = any(step is slot for step in holder.path for slot in OF_PARTIAL)
        if holder.is_named and not is_given and not reached.has_breaks:
            # Those of libraries are none that a function of the user's goes through.
            is_near = not holder.path and reads.begins(holder)
            is_whole = is_near and reached.uses.is_whole(holder.names_back)
            is_got = reached.uses.is_got_from(holder.names_back)
            if is_drained(value, reached.names, is_whole=is_whole, is_got=is_got):
                drained.append(holder)
        if id(value) in around or len(holder.path) >= _MOST_STEPS:
            continue
        is_object = not issubclass(type(value), (*CONTAINERS, *HOLDING, set))
        items = attributes_in(value) if is_object else items_in(value)
        if len(items) > left:
            continue
        left -= len(items)
        if holder.is_named and not isinstance(holder.owner, _Argument):
            reads.add_inside(holder, value)
        if holder.is_named and is_object and not is_module and is_looked_into(type(value)):
            kinds.add(type(value))
            if type(value) not in looked_into:
                looked_into.add(type(value))
                of_class = _of_class(type(value), plain.add_far)
                named += [(one, frozenset()) for one in of_class if has_name(one.name)]
            attributes[id(vars_of(value))] = vars_of(value)
            for slot, one in slots_of(value):
                if is_number(one) or one is None:
                    plain.add(holder._replace(value=one, path=(*holder.path, slot)))
        elif holder.is_named and issubclass(type(value), dict):
            dictionaries[id(value)] = value
        elif holder.is_named and issubclass(type(value), list | deque | set):
            if len_of(value) <= _LONGEST_KEPT:
                lists[id(value)] = value, items_of(value)
        around |= {id(value)}
        # Whose attribute no code of the user's names.
        is_wrapper = issubclass(type(value), WRAPPERS)
        for name, one in items:
            word = name.__name__ if isinstance(name, types.MemberDescriptorType) else name
            is_next_named = not is_object or is_wrapper or has_name(word)
            step = Holder(
                holder.owner,
                holder.name,
                one,
                (*holder.path, name),
                holder.is_deep or is_object,
                holder.is_named and is_next_named,
                holder.functions,
                holder.variable,
            )
            (named if step.is_named else others).append((step, around))
    reads.add((*plain.numbers, *plain.empty, *plain.far))
    numbers = {type(one.value) for one in (*plain.numbers, *plain.far)}
    kinds.update(kind for kind in numbers if _has_methods(kind, has_name))
    found = Found(
        holders,
        [*attributes.values()],
        [*dictionaries.values()],
        [*lists.values()],
        behind_given,
        plain.numbers,
        plain.empty,
        [*stepping.values()],
        plain.far[:_MOST_FAR],
        reached.draws,
        [*generators.values()],
        drained,
        [*arrays.values()],
        reads.found,
    )
    return found, called, kinds


_Way = tuple[Holder, frozenset[int]]
"""A way, and what it leads through."""


class _Plain(NamedTuple):
    """Where numbers and texts are, where None is, and where others are that are farther away."""

    numbers: list[Holder]
    empty: list[Holder]
    far: list[Holder]

    def add(self, holder: Holder) -> None:
        """Add where a value of a plain class is."""
        (self.empty if holder.value is None else self.numbers).append(holder)

    def add_far(self, holder: Holder) -> None:
        """Add one that the function itself does not name."""
        (self.empty if holder.value is None else self.far).append(holder)


class _Roots:
    """Where all ways begin, each once.

    Args:
        plain: What is plain there is added to it.

    Attributes:
        found: The others, by their places.
        kinds: The classes that are among them.
    """

    def __init__(self, plain: _Plain) -> None:
        self.found: dict[tuple[int, str], Holder] = {}
        self.kinds: set[type] = set()
        self._plain = plain
        self._seen: set[tuple[int, str]] = set()

    def add(self, holder: Holder, add_plain: Callable[[Holder], None]) -> None:
        """Add one."""
        place, value = (id(holder.owner), holder.name), holder.value
        if place in self.found:
            # Another function has it as well.
            functions = *self.found[place].functions, *holder.functions
            self.found[place] = holder._replace(functions=functions)
        elif issubclass(type(value), type):
            self.add_class(value, add_plain)
        elif not issubclass(type(value), (*PLAIN, types.ModuleType)):
            self.found[place] = holder
        if (is_number(value) or value is None) and place not in self._seen:
            self._seen.add(place)
            add_plain(holder)

    def has(self, holder: Holder) -> bool:
        """Whether it is there, with the functions that lead to it."""
        return (id(holder.owner), holder.name) in self.found

    def add_class(self, kind: type, add_plain: Callable[[Holder], None]) -> None:
        """Add what a class has, once for the class, whoever names it."""
        if kind not in self.kinds:
            self.kinds.add(kind)
            of_class = _of_class(kind, add_plain)
            self.found.update({(id(one.owner), one.name): one for one in of_class})

    def add_module(self, module: types.ModuleType, names: frozenset[str]) -> None:
        """Add what code with these names may use of a module of Python's."""
        for values, name, one in named_of_module(module, names):
            if not issubclass(type(one), FUNCTIONS):
                self.add(Holder(values, name, one), self._plain.add_far)


def _roots(
    function: object, parts: Iterable[torch.nn.Module], reached: Reached, plain: _Plain
) -> Iterator[Holder]:
    """Where all ways begin, each once; what is plain there is added to ``plain``."""
    roots = _Roots(plain)
    for holder in held_by(function, None):
        roots.add(holder, plain.add)
    for other in reached.functions.values():
        code = other.__code__ if isinstance(other, types.FunctionType) else None
        if code is not None:
            for module in imported_in(code):
                roots.add_module(module, names_of(code))
        for holder in places_of(other):
            if issubclass(type(holder.value), types.ModuleType) and code is not None:
                roots.add_module(holder.value, names_of(code))
            elif not issubclass(type(holder.value), FUNCTIONS) and not roots.has(holder):
                roots.add(holder, plain.add_far)
    for kind in reached.kinds:
        roots.add_class(kind, plain.add_far)
    yield from roots.found.values()
    for values in _set_on_tensors_of(parts):
        yield from (Holder(values, name, one) for name, one in values.items())
    kinds: dict[type, list[tuple[str, Any]]] = {}
    for part in parts:
        values = vars(part)
        yield from (Holder(values, name, one) for name, one in attributes_in(part))
        # Those of the user's are looked at with all that they have.
        for name in reached.names.intersection(values) - {"training"} if is_torchs(part) else ():
            if is_number(values[name]) or values[name] is None:
                plain.add_far(Holder(values, name, values[name]))
        # A method of a module has them from above.
        if part is not getattr(function, "__self__", None):
            if type(part) not in kinds:
                kinds[type(part)] = of_kind(type(part))
            items = kinds[type(part)]
            yield from (Holder(part, *item) for item in items if item[0] not in values)


def _of_class(one: Any, add_plain: Callable[[Holder], None]) -> list[Holder]:
    """What a class of the user's has, and those that it is derived from."""
    if not is_users(one.__module__):
        return []
    values: dict[str, Any] = {}
    for base in reversed(one.__mro__):
        if is_users(vars(base).get("__module__")):
            values.update(vars(base))
    for name, value in values.items():
        if (is_number(value) or value is None) and name[:2] != "__":
            add_plain(Holder(one, name, value))
    return [Holder(one, *item) for item in of_kind(one)]


def _set_on(value: object) -> dict[str, Any]:
    """The attributes that somebody has set on a tensor of torch's own classes."""
    return vars(value) if type(value) in (torch.Tensor, torch.nn.Parameter) else {}


def _set_on_tensors_of(parts: Iterable[torch.nn.Module]) -> list[dict[str, Any]]:
    """Those of the parameters and buffers of modules that have some."""
    owners = (owner for part in parts for owner in (part._parameters, part._buffers))
    # Also where there are none yet.
    return [_set_on(one) for owner in owners for one in owner.values() if one is not None]


def _hooks_of_leaf(tensor: torch.Tensor) -> list[Any]:
    """What a backward pass calls for a tensor, if that is a leaf."""
    found = [hooks for *_, hooks in _torch.hooks_of_leaf(tensor)] if tensor.is_leaf else []
    return [hook for hooks in found if isinstance(hooks, dict) for hook in hooks.values()]


def _hooks_of_steps(optimizer: torch.optim.Optimizer) -> list[Any]:
    """What a step of an optimizer calls."""
    found = (getattr(optimizer, name, None) for name in HOOKS_OF_STEPS)
    return [hook for hooks in found if isinstance(hooks, dict) for hook in hooks.values()]


def _has_methods(kind: type, has_name: Callable[[str], bool]) -> bool:
    """Whether a class is one of the user's, and code names something that its objects do."""
    bases = (one for one in kind.__mro__ if is_users(vars(one).get("__module__")))
    members = (item for one in bases for item in vars(one).items())
    # Of named tuples there may be hundreds, whose methods are Python's.
    return any(has_name(name) and not is_number(one) for name, one in members if name[:1] != "_")


def _tensors_of(holder: Holder) -> list[Holder]:
    """Where a module has its buffers, and its parts have other tensors that are no parameters."""
    parts = [*holder.value.modules()]
    owners = [*(part._buffers for part in parts), *map(vars, parts[1:])]
    return [
        Holder(owner, name, one, (), True, holder.is_named)
        for owner in owners
        for name, one in owner.items()
        if isinstance(one, torch.Tensor)
    ]


# What code names that takes items from lists and deques.
_ITEMS = {"pop", "popleft", "remove", "clear"}
_KNOWN = (torch.Tensor, torch.optim.Optimizer, torch.Generator, tuple)
