"""The schemas of operators: the tensors that an operator takes and writes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from cgraph import _torch
from cgraph._torch import tree_iter

__all__ = [
    "name_of",
    "tensors_in",
    "tensors_of",
    "touches_memory",
    "writes_nothing",
    "written_by",
]

# Operators without a view in their schema that return their input's memory.
_RETURN_INPUT = {
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.unsafe_split.Tensor,
    torch.ops.aten.unsafe_split_with_sizes.default,
    torch.ops.aten.lift_fresh.default,
}
# Arguments that kernels write although no schema says so: the statistics of a batch norm in
# training, cuDNN's random state of a recurrent network.
_UNDECLARED = {"running_mean", "running_var", "dropout_state"}


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Return the tensors among the arguments or results of an operator."""
    return (leaf for leaf in tree_iter(tree) if isinstance(leaf, torch.Tensor))


def tensors_of(arguments: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among arguments or results in tuples, lists and dictionaries alone."""
    for one in arguments.values() if isinstance(arguments, dict) else arguments:
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, tuple | list | dict):
            yield from tensors_of(one)


def written_by(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that an operator writes; all, if it does not say which."""
    arguments = _written_arguments(func)
    if arguments == []:
        return
    values: list[Any] = [args, kwargs]
    if arguments is not None:
        values = [kwargs.get(n, args[i] if i < len(args) else None) for i, n in arguments]
    for tensor in tensors_of(values):
        yield from _torch.wrapped(tensor)


@functools.cache
def touches_memory(func: Any) -> bool:
    """Return whether an operator reads or writes tensors, beyond making views of them."""
    if not hasattr(func, "_schema"):
        return True
    if func.is_view or func in _RETURN_INPUT or torch.Tag.inplace_view in func.tags:
        return False
    schema = func._schema
    return any("Tensor" in str(part.type) for part in (*schema.arguments, *schema.returns))


def writes_nothing(func: Any) -> bool:
    """Return whether an operator says that it writes none of its arguments."""
    return _written_arguments(func) == []


@functools.cache
def name_of(func: Any) -> str:
    """Return the operator's name without its overload, as ``aten.item``."""
    name = ".".join(str(func).split(".")[:2])
    return "aten.item" if name == "aten._local_scalar_dense" else name


@functools.cache
def _written_arguments(func: Any) -> list[tuple[int, str]] | None:
    """Return places and names of the arguments that an operator writes; None without a schema."""
    if not hasattr(func, "_schema"):
        return None
    return [
        (place, argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.name in _UNDECLARED
        or (argument.alias_info is not None and argument.alias_info.is_write)
    ]
