"""``facts_of``: the facts about an operator before its call, found once for each operator."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from cgraph._operators.refused import may_be_refused
from cgraph._operators.schemas import touches_memory, writes_nothing

__all__ = ["Facts", "facts_of", "taken_apart"]


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts about an operator.

    Attributes:
        func: The operator, kept so that its ``id`` stays its own.
        name: Its name with the overload.
        touches_memory: True if it reads or writes tensors, beyond making views of them.
        decomposes: True if inference mode leaves it whole; a capture takes its parts.
        may_be_refused: True if a capture refuses some calls of it.
        draws: True if it draws random numbers.
        takes_generator: True if it may take a generator to draw from.
        writes_nothing: True if it writes none of its arguments.
    """

    func: Any
    name: str
    touches_memory: bool
    decomposes: bool
    may_be_refused: bool
    draws: bool
    takes_generator: bool
    writes_nothing: bool


def facts_of(func: Any) -> Facts:
    """Return the facts about an operator."""
    # By ``id``: torch hashes operators in Python.
    known = _known.get(id(func))
    if known is None:
        schema = getattr(func, "_schema", None)
        known = _known[id(func)] = Facts(
            func,
            str(func),
            touches_memory(func),
            schema is not None and bool(func._can_decompose()),
            may_be_refused(func),
            torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()),
            schema is None or any("Generator" in str(one.type) for one in schema.arguments),
            writes_nothing(func),
        )
    return known


_known: dict[int, Facts] = {}


def taken_apart(
    args: Iterable[Any], kwargs: dict[str, Any], device_type: str
) -> tuple[tuple[Any, ...], list[torch.Tensor]]:
    """Split an operator's arguments, in order: those that are not device tensors, and tensors."""
    numbers: list[Any] = []
    tensors: list[torch.Tensor] = []
    _take(args, device_type, numbers, tensors)
    for name, one in kwargs.items():
        numbers.append(name)
        _take((one,), device_type, numbers, tensors)
    return tuple(numbers), tensors


def _take(
    values: Iterable[Any], device_type: str, numbers: list[Any], tensors: list[torch.Tensor]
) -> None:
    for one in values:
        if isinstance(one, torch.Tensor):
            tensors.append(one)
            if one.dim() == 0 and one.device.type not in (device_type, "meta") and _is_plain(one):
                # A kernel gets it as a number.
                numbers.append((float, repr(one.item())))
        elif isinstance(one, tuple | list):
            _take(one, device_type, numbers, tensors)
        elif isinstance(one, dict):
            for name, value in one.items():
                numbers.append(name)
                _take((value,), device_type, numbers, tensors)
        elif isinstance(one, float | complex):
            numbers.append((type(one), repr(one)))
        elif isinstance(one, torch.Generator):
            numbers.append(int(one._cdata))  # type: ignore[attr-defined]
        elif isinstance(one, torch.ScriptObject):
            # A process group or a reduction has another one around it in each call, and packed
            # weights cannot be compared. Guards tell such objects of Python's apart.
            numbers.append(one._type().qualified_name())
        else:
            numbers.append((type(one), one))


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter)
