"""What a function can reach: tensors, modules and optimisers in closures, globals and objects."""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler

from cgraph import _core
from cgraph._torch import tree_iter

__all__ = [
    "Holder",
    "attributes_of",
    "holders_of",
    "holders_of_tensors",
    "modules_of",
    "objects_of",
    "tensors_of",
    "used_of",
]

# So many items of lists and dictionaries are looked at behind one name: longer ones are of data.
_MOST_ITEMS = 4096
# So many attributes of objects are looked at in all, and so many steps away.
_MOST_ATTRIBUTES, _MOST_STEPS = 4096, 6


class Holder(NamedTuple):
    """Where something is found.

    Attributes:
        owner: A dictionary or an object.
        name: The name of an item or attribute.
        value: What is there, or at the end of the path.
        path: Keys of dictionaries, places in lists and tuples, and attributes of objects that lead
            on from there.
        is_deep: Whether there are attributes of objects among them.
    """

    owner: Any
    name: str
    value: Any
    path: tuple[Any, ...] = ()
    is_deep: bool = False

    @property
    def now(self) -> Any:
        """What is there now; None if nothing is."""
        try:
            value = _item(self.owner, self.name)
            for name in self.path:
                value = _item(value, name)
        except (AttributeError, LookupError, TypeError, ValueError):  # the last: an empty cell
            return None
        return value

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        """What is there, or the parameters and buffers of a module that is."""
        if isinstance(self.value, torch.nn.Module):
            yield from self.value.parameters()
            yield from self.value.buffers()
        elif isinstance(self.value, torch.Tensor):
            yield self.value


def tensors_of(objects: object, *, modules: bool = True) -> Iterator[torch.Tensor]:
    """Tensors and the parameters of modules and optimisers in containers, closures and objects.

    Args:
        objects: What is looked into.
        modules: Whether the parameters of modules are asked for.
    """
    seen: set[int] = set()
    for leaf in _leaves_of(objects, seen):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, torch.nn.Module):
            yield from leaf.parameters() if modules else ()
        elif isinstance(leaf, torch.optim.Optimizer):
            groups = [group["params"] for group in leaf.param_groups]
            yield from (one for one in _leaves_of(groups, seen) if isinstance(one, torch.Tensor))


def modules_of(objects: object) -> list[torch.nn.Module]:
    """Modules in containers, closures and objects, each once; not those that a module has."""
    if isinstance(objects, torch.nn.Module):
        return [objects]
    return [one for one in _leaves_of(objects, set()) if isinstance(one, torch.nn.Module)]


def objects_of(objects: object, kinds: tuple[type, ...]) -> list[Any]:
    """Optimizers, their schedulers or gradient scalers in containers, closures and objects."""
    return [one for one in _leaves_of(objects, set()) if isinstance(one, kinds)]


def holders_of(function: object) -> list[Holder]:
    """Where a function finds modules besides its arguments, or one that it has or names does.

    Not those in lists and dictionaries, of which it may use one.
    """
    return list(_held_by(function, (torch.nn.Module,), set()))


def holders_of_tensors(function: object, modules: Iterable[torch.nn.Module]) -> list[Holder]:
    """Where a function finds tensors likewise, and those that modules have as plain attributes.

    Also tensors and modules in lists, tuples, dictionaries and objects there.
    """
    found = list(_held_by(function, (object,), set()))
    for module in modules:
        for part in module.modules():
            found += [one for one in _items(vars(part)) if one.name not in _OF_MODULES]
            found += _of_class(part)
    # The object of a method is where its attributes are found, not another one.
    objects = _Objects()
    return [item for holder in found for item in _inside(holder, objects)]


def used_of(held: Iterable[Holder], uses: Callable[[torch.Tensor], bool]) -> list[Holder]:
    """Where what a capture uses is found, and stays: calls to come find what they put there.

    Args:
        held: Where tensors were found before it.
        uses: Whether it uses one.
    """
    there = (one for one in held if one.now is one.value)
    used = [one for one in there if any(map(uses, one.tensors))]
    # An object may be one of many that lead to a tensor, and another one the next time.
    near = {id(tensor) for one in used if not one.is_deep for tensor in one.tensors}
    return [one for one in used if not one.is_deep or any(id(t) not in near for t in one.tensors)]


def _held_by(function: object, kinds: tuple[type, ...], seen: set[int]) -> Iterator[Holder]:
    """Where a function, or one that it has or names, finds objects of some kinds."""
    if id(function) in seen:
        return
    seen.add(id(function))
    for holder in _places_of(function):
        if isinstance(holder.value, _FUNCTIONS):
            yield from _held_by(holder.value, kinds, seen)
        elif isinstance(holder.value, kinds):
            yield holder


class _Objects:
    """The objects that were looked into, each once, until there are too many attributes."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._left = _MOST_ATTRIBUTES

    def enter(self, value: object) -> dict[str, Any]:
        """The attributes of an object; none if it is of no class of the user's."""
        kind = type(value)
        root = kind.__module__.partition(".")[0]
        is_users = kind is types.SimpleNamespace or root not in _NOT_USERS
        if not is_users or isinstance(value, (*_LEAVES, type)) or id(value) in self._seen:
            return {}
        self._seen.add(id(value))
        found = vars_of(value)
        self._left -= len(found)
        return found if self._left >= 0 else {}


def _inside(root: Holder, objects: _Objects) -> Iterator[Holder]:
    """What a holder has, or the tensors and modules in a container or an object that it has."""
    containers = (dict, list, tuple)
    left = _MOST_ITEMS
    waiting = deque([(root, frozenset[int]())])
    while waiting:
        holder, around = waiting.popleft()
        value = holder.value
        if isinstance(value, torch.Tensor | torch.nn.Module):
            yield holder
        elif isinstance(value, containers) and id(value) not in around and len(value) <= left:
            left -= len(value)
            items = list(value.items() if isinstance(value, dict) else enumerate(value))
            around |= {id(value)}
            waiting += [
                (holder._replace(value=one, path=(*holder.path, name)), around)
                for name, one in items
                if not isinstance(one, _PLAIN)
            ]
        elif not isinstance(value, containers) and len(holder.path) < _MOST_STEPS:
            waiting += [
                (Holder(holder.owner, holder.name, one, (*holder.path, name), True), around)
                for name, one in objects.enter(value).items()
                if not isinstance(one, _PLAIN)
            ]


def _item(owner: Any, name: Any) -> Any:
    return owner[name] if isinstance(owner, dict | list | tuple) else getattr(owner, name)


def _places_of(function: object) -> Iterator[Holder]:
    """What a function finds besides its arguments, and where."""
    if isinstance(function, functools.partial):
        yield from _constants((f"args[{place}]", one) for place, one in enumerate(function.args))
        yield from _items(function.keywords)
        yield from _constants([("func", function.func)])
    elif isinstance(function, _core.Dispatcher):
        yield from _constants([("__wrapped__", function.__wrapped__)])  # type: ignore[attr-defined]
    elif isinstance(function, types.MethodType):
        yield from _items(vars_of(function.__self__))
        yield from _of_class(function.__self__)
        yield from _constants([("__func__", function.__func__)])
    elif isinstance(function, types.FunctionType):
        for cell in function.__closure__ or ():
            if cell != _UNASSIGNED:
                yield Holder(cell, "cell_contents", cell.cell_contents)
        code, scope = function.__code__, function.__globals__
        # Torch's own name nothing of the user's, and a great many functions.
        if str(scope.get("__name__")).partition(".")[0] not in ("torch", "cgraph"):
            known = (name for name in _names_in(code) if name in scope)
            yield from (Holder(scope, name, scope[name]) for name in known)
        defaults = reversed(function.__defaults__ or ())
        names = reversed(code.co_varnames[: code.co_argcount])
        yield from _constants(zip(names, defaults, strict=False))
        yield from _items(function.__kwdefaults__ or {})
    elif not isinstance(function, torch.nn.Module):
        yield from _items(vars_of(function))
        yield from _of_class(function)
        if callable(function):
            yield from _constants([("__call__", type(function).__call__)])


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    """The globals that code names, with that of the functions defined in it; each once."""
    loads = (one for one in dis.get_instructions(code) if one.opname in _LOADS)
    found = {one.argval: None for one in loads}
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            found.update(dict.fromkeys(_names_in(inner)))
    return tuple(found)


def _items(values: dict[str, Any]) -> list[Holder]:
    return [Holder(values, name, one) for name, one in values.items()]


def _of_class(one: object) -> list[Holder]:
    """What an object, or a class itself, has as attributes of its class and is no function."""
    kind = one if isinstance(one, type) else type(one)
    own = {} if one is kind else getattr(one, "__dict__", {})
    found: dict[str, Any] = {}
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] not in _NOT_USERS:
            found = {**vars(base), **found}
    kinds = (torch.Tensor, dict, list, tuple)
    return [
        Holder(one, name, value)
        for name, value in found.items()
        if isinstance(value, kinds) and name not in own and not name.startswith("__")
    ]


def _constants(values: Iterable[tuple[str, Any]]) -> list[Holder]:
    """Places whose values stay, as long as nobody assigns a function's defaults: each has a
    dictionary of its own.
    """  # noqa: D205
    return [Holder({name: one}, name, one) for name, one in values]


def attributes_of(function: object) -> dict[str, Any]:
    """Those of a method's object or of a callable object, which the function may set."""
    while isinstance(function, functools.partial):
        function = function.func
    return vars_of(function.__self__ if isinstance(function, types.MethodType) else function)


def vars_of(one: object) -> dict[str, Any]:
    """The attributes of an object that keeps them in a dictionary; modules have their own way."""
    found = {} if isinstance(one, torch.nn.Module | type) else getattr(one, "__dict__", {})
    return found if isinstance(found, dict) else {}


def _leaves_of(objects: object, seen: set[int]) -> Iterator[Any]:
    for leaf in tree_iter(objects):
        if id(leaf) in seen:
            continue
        seen.add(id(leaf))
        if isinstance(leaf, _LEAVES):
            yield leaf
        else:
            yield from _leaves_of(_surroundings(leaf), seen)


def _surroundings(leaf: Any) -> list[object]:
    """What a function closes over or names, or what an object has."""
    if isinstance(leaf, functools.partial):
        return [leaf.func, leaf.args, leaf.keywords]
    if isinstance(leaf, types.MethodType):
        return [leaf.__self__, leaf.__func__]
    if isinstance(leaf, types.FunctionType | _core.Dispatcher):
        found = [holder.value for holder in _places_of(leaf)]
    elif isinstance(leaf, type | types.ModuleType):
        return []
    else:
        found = list(getattr(leaf, "__dict__", {}).values())
        found += [type(leaf).__call__] if callable(leaf) else []
    return [one for one in found if isinstance(one, _WITH_LEAVES)]


_UNASSIGNED = types.CellType()
# Values that have no tensors, of which there are many.
_PLAIN = (int, float, str, bytes, type(None), type)
# Classes of these are not looked into: there is no end to what their objects refer to.
_NOT_USERS = frozenset({*sys.stdlib_module_names, "torch", "cgraph"}) - {"__main__"}
# What each module keeps its parts and hooks in.
_OF_MODULES = frozenset(vars(torch.nn.Module()))
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME")
_FUNCTIONS = (functools.partial, types.FunctionType, types.MethodType, _core.Dispatcher)
_LEAVES = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer, LRScheduler, GradScaler)
# Other objects are not looked into: there is no end to them.
_WITH_LEAVES = (
    *_LEAVES,
    list,
    tuple,
    dict,
    *_FUNCTIONS,
)
