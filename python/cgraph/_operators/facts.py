"""Facts about an operator before its call, and a reader of its arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from cgraph import _core, _torch
from cgraph._operators.refused import may_be_refused
from cgraph._operators.schemas import touches_memory, writes_nothing

__all__ = ["Facts", "facts_of", "operator_reader"]


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


def operator_reader(device_type: str) -> _core.OperatorReader:
    """Return a reader of operators' arguments, for captures on devices of a type."""
    plain, others = [torch.Tensor, torch.nn.Parameter], (torch.Generator, torch.ScriptObject)
    reader = _torch.tensor_reader()
    return _core.OperatorReader(reader, plain, *others, _torch.memory_of, device_type)
