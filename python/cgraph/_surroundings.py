"""What a function can reach: tensors, modules and optimisers in closures, globals and objects."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from cgraph._torch import tree_iter

__all__ = [
    "Holder",
    "holders_of",
    "modules_of",
    "optimizers_put_back",
    "tensors_held_by",
    "tensors_of",
    "vars_of",
]

Holder = tuple[Any, str, Any]
"""A dictionary or an object, the name of an item or attribute, and what is there."""


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
        else:
            groups = [group["params"] for group in leaf.param_groups]
            yield from (one for one in _leaves_of(groups, seen) if isinstance(one, torch.Tensor))


def modules_of(objects: object) -> list[torch.nn.Module]:
    """Modules in containers, closures and objects, each once; not those that a module has."""
    return [one for one in _leaves_of(objects, set()) if isinstance(one, torch.nn.Module)]


def holders_of(function: object) -> list[Holder]:
    """Where a function finds modules: in what it closes over or names, or in a method's object."""
    return _held_by(function, torch.nn.Module)


def tensors_held_by(function: object, modules: Iterable[torch.nn.Module]) -> list[Holder]:
    """Where a function finds tensors likewise, and those that modules have as plain attributes."""
    found = _held_by(function, torch.Tensor)
    for module in modules:
        for part in module.modules():
            found += _in_dictionary(vars(part), torch.Tensor)
    return found


def _held_by(function: object, kind: type) -> list[Holder]:
    if isinstance(function, functools.partial):
        return _held_by(function.func, kind)
    if isinstance(function, types.MethodType):
        own = _in_dictionary(vars_of(function.__self__), kind)
        return [*_held_by(function.__func__, kind), *own]
    if isinstance(function, types.FunctionType):
        cells = [
            (cell, "cell_contents", cell.cell_contents)
            for cell in function.__closure__ or ()
            if cell != _UNASSIGNED and isinstance(cell.cell_contents, kind)
        ]
        return [*cells, *_in_dictionary(function.__globals__, kind, function.__code__.co_names)]
    return []


def vars_of(one: object) -> dict[str, Any]:
    """The attributes of an object that keeps them in a dictionary; modules have their own way."""
    found = {} if isinstance(one, torch.nn.Module | type) else getattr(one, "__dict__", {})
    return found if isinstance(found, dict) else {}


def _in_dictionary(
    values: dict[str, Any], kind: type, names: Iterable[str] | None = None
) -> list[Holder]:
    found = ((name, values.get(name)) for name in (values if names is None else names))
    return [(values, name, one) for name, one in found if isinstance(one, kind)]


@contextmanager
def optimizers_put_back() -> Iterator[Callable[[], bool]]:
    """Put the states of optimisers back that step inside the ``with`` block.

    Yields what tells whether one of them has made some of its state in the block.
    """
    before: dict[int, tuple[torch.optim.Optimizer, dict[Any, Any]]] = {}

    def note(optimizer: torch.optim.Optimizer, *_: object) -> None:
        entries = {key: dict(state) for key, state in optimizer.state.items()}
        before.setdefault(id(optimizer), (optimizer, entries))

    def has_made_state() -> bool:
        return any(
            not state.keys() <= entries.get(key, {}).keys()
            for optimizer, entries in before.values()
            for key, state in optimizer.state.items()
        )

    hook = register_optimizer_step_pre_hook(note)
    try:
        yield has_made_state
    finally:
        hook.remove()
        for optimizer, state in before.values():
            optimizer.state.clear()
            optimizer.state.update(state)


def _leaves_of(objects: object, seen: set[int]) -> Iterator[Any]:
    for leaf in tree_iter(objects):
        if id(leaf) in seen:
            continue
        seen.add(id(leaf))
        if isinstance(leaf, torch.Tensor | torch.nn.Module | torch.optim.Optimizer):
            yield leaf
        else:
            yield from _leaves_of(_surroundings(leaf), seen)


def _surroundings(leaf: Any) -> list[object]:
    """What a function closes over or names, or what an object has."""
    if isinstance(leaf, functools.partial):
        return [leaf.func, leaf.args, leaf.keywords]
    if isinstance(leaf, types.MethodType):
        return [leaf.__self__, leaf.__func__]
    if isinstance(leaf, types.FunctionType):
        cells = leaf.__closure__ or ()
        found = [cell.cell_contents for cell in cells if cell != _UNASSIGNED]
        found += [leaf.__globals__.get(name) for name in leaf.__code__.co_names]
    elif isinstance(leaf, type | types.ModuleType):
        return []
    else:
        found = list(getattr(leaf, "__dict__", {}).values())
    return [one for one in found if isinstance(one, _WITH_LEAVES)]


_UNASSIGNED = types.CellType()
# Other objects are not looked into: there is no end to them.
_WITH_LEAVES = (
    torch.Tensor,
    torch.nn.Module,
    torch.optim.Optimizer,
    list,
    tuple,
    dict,
    functools.partial,
    types.FunctionType,
    types.MethodType,
)
