"""What a function can reach: tensors, modules and optimisers in closures, globals and objects."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler

from cgraph import _core
from cgraph._state.code import globals_in, is_users
from cgraph._state.holders import Holder, slots_of, vars_of, with_functions
from cgraph._torch import tree_iter_once

__all__ = [
    "FUNCTIONS",
    "LEAVES",
    "PLAIN",
    "STEPPING",
    "Lasting",
    "attributes_of",
    "held_by",
    "holders_of",
    "modules_of",
    "objects_of",
    "of_kind",
    "places_of",
    "tensors_of",
]

PLAIN = (int, float, str, bytes, type(None), type)
"""Classes of values that have no tensors, of which there are many."""
STEPPING = (GradScaler, LRScheduler, torch.optim.Optimizer)
"""Classes of what changes its own settings when it steps."""
LEAVES = (torch.Tensor, torch.nn.Module, *STEPPING)
"""Classes of what is looked for."""
FUNCTIONS = (functools.partial, types.FunctionType, types.MethodType, _core.Dispatcher)
"""Classes of what is called, and has what it finds."""


def tensors_of(objects: object, *, modules: bool = True) -> Iterator[torch.Tensor]:
    """Tensors and the parameters of modules and optimisers in containers, closures and objects.

    Args:
        objects: What is looked into.
        modules: Whether the parameters of modules are asked for.
    """
    seen: dict[int, Any] = {}
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
    return [one for one in _leaves_of(objects, {}) if isinstance(one, torch.nn.Module)]


def objects_of(objects: object, kinds: tuple[type, ...]) -> list[Any]:
    """Optimizers, their schedulers or gradient scalers in containers, closures and objects."""
    return [one for one in _leaves_of(objects, {}) if isinstance(one, kinds)]


def holders_of(function: object) -> list[Holder]:
    """Where a function finds modules besides its arguments, or one that it has or names does.

    Not those in lists and dictionaries, of which it may use one.
    """
    return with_functions(held_by(function, (torch.nn.Module,)))


def held_by(function: object, kinds: tuple[type, ...] | None) -> Iterator[Holder]:
    """Where a function, or one that it has or names, finds objects, or those of some kinds.

    With the places of all functions on all ways that lead there.
    """
    found: list[tuple[Holder, int]] = []
    # Where each function is that was found, and the functions that have it there.
    places: dict[int, list[tuple[Holder, int]]] = {id(function): []}
    waiting = [function]
    while waiting:
        owner = waiting.pop()
        for holder in places_of(owner):
            value = holder.value
            if isinstance(value, FUNCTIONS):
                if id(value) not in places:
                    places[id(value)] = []
                    waiting.append(value)
                places[id(value)].append((holder, id(owner)))
            elif kinds is None or isinstance(value, kinds):
                found.append((holder, id(owner)))
    known: dict[int, tuple[Holder, ...]] = {}
    for holder, owner in found:
        if owner not in known:
            known[owner] = _leading_to(owner, places)
        yield holder._replace(functions=known[owner])


def _leading_to(function: int, places: dict[int, list[tuple[Holder, int]]]) -> tuple[Holder, ...]:
    """The places of functions on all ways to one of them, but for those whose values stay."""
    leading: list[Holder] = []
    seen, waiting = {function}, [function]
    while waiting:
        for holder, owner in places[waiting.pop()]:
            leading += [] if isinstance(holder.owner, Lasting) else [holder]
            if owner not in seen:
                seen.add(owner)
                waiting.append(owner)
    return tuple(leading)


def of_kind(kind: type) -> list[tuple[str, Any]]:
    """What classes of the user's have, by their names."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if is_users(vars(base).get("__module__")):
            found.update(vars(base))
    return [
        (name, value)
        for name, value in found.items()
        if not issubclass(type(value), PLAIN)
        and not hasattr(type(value), "__get__")
        and not name.startswith("__")
    ]


def places_of(function: object) -> Iterator[Holder]:
    """What a function finds besides its arguments, and where."""
    if isinstance(function, functools.partial):
        yield from _constants((f"args[{place}]", one) for place, one in enumerate(function.args))
        # Code has its own names for what it is given.
        keywords = [*function.keywords.items()]
        yield from _constants(item for item in keywords if not isinstance(item[1], LEAVES))
        leaves = (item for item in keywords if isinstance(item[1], LEAVES))
        yield from (Holder(function.keywords, *item) for item in leaves)
        yield from _constants([("func", function.func)])
    elif isinstance(function, _core.Dispatcher):
        yield from _constants([("__wrapped__", function.__wrapped__)])  # type: ignore[attr-defined]
    elif isinstance(function, types.MethodType):
        yield from _items(vars_of(function.__self__))
        yield from _slots(function.__self__)
        yield from _of_class(function.__self__)
        yield from _constants([("__func__", function.__func__)])
    elif isinstance(function, types.FunctionType):
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for variable, cell in cells:
            if cell != _UNASSIGNED:
                yield Holder(cell, "cell_contents", cell.cell_contents, variable=variable)
        code, scope = function.__code__, function.__globals__
        # Torch's own name nothing of the user's, and a great many functions.
        if str(scope.get("__name__")).partition(".")[0] not in ("torch", "cgraph"):
            known = (name for name in globals_in(code) if name in scope)
            yield from (Holder(scope, name, scope[name]) for name in known)
        defaults = reversed(function.__defaults__ or ())
        names = reversed(code.co_varnames[: code.co_argcount])
        yield from _constants(zip(names, defaults, strict=False))
        yield from _constants((function.__kwdefaults__ or {}).items())
        yield from _items(vars(function))
    elif not isinstance(function, torch.nn.Module):
        yield from _items(vars_of(function))
        yield from _slots(function)
        yield from _of_class(function)
        if callable(function):
            yield from _constants([("__call__", type(function).__call__)])


def _items(values: dict[str, Any]) -> list[Holder]:
    return [Holder(values, name, one) for name, one in values.items()]


def _slots(one: object) -> list[Holder]:
    return [Holder(one, slot.__name__, value) for slot, value in slots_of(one)]


def _of_class(one: object) -> list[Holder]:
    """What an object, or a class itself, finds in its class, but for what binds to it."""
    if isinstance(one, type):
        return [Holder(one, *item) for item in of_kind(one)]
    own = vars_of(one)
    return [Holder(one, *item) for item in of_kind(type(one)) if item[0] not in own]


class Lasting(dict[str, Any]):
    """A place whose value stays, as long as nobody assigns a function's defaults."""


def _constants(values: Iterable[tuple[str, Any]]) -> list[Holder]:
    """Such places."""
    return [Holder(Lasting({name: one}), name, one) for name, one in values]


def attributes_of(function: object) -> dict[str, Any]:
    """Those of a method's object or of a callable object, which the function may set."""
    while isinstance(function, functools.partial):
        function = function.func
    return vars_of(function.__self__ if isinstance(function, types.MethodType) else function)


def _leaves_of(objects: object, seen: dict[int, Any]) -> Iterator[Any]:
    for leaf in tree_iter_once(objects, seen):
        if isinstance(leaf, LEAVES):
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
        found = [holder.value for holder in places_of(leaf)]
    elif isinstance(leaf, type | types.ModuleType):
        return []
    else:
        found = list(getattr(leaf, "__dict__", {}).values())
        found += [value for _, value in slots_of(leaf)]
        found += [type(leaf).__call__] if callable(leaf) else []
    return [one for one in found if isinstance(one, _WITH_LEAVES)]


_UNASSIGNED = types.CellType()
# Other objects are not looked into: there is no end to them.
_WITH_LEAVES = (
    *LEAVES,
    list,
    tuple,
    dict,
    *FUNCTIONS,
)
