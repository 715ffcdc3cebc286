"""The operators of one call, so that two calls can be compared.

Two calls do the same if their operators are the same, get the same numbers, and take tensors from
the same places: an argument, an earlier operator, or a place outside by its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from cgraph import _torch
from cgraph._reason import Reason
from cgraph.causes import Cause

__all__ = ["Operator", "OutsideMemory", "Trace"]


class Operator(NamedTuple):
    """One operator of a call.

    Attributes:
        name: Its name with the overload.
        numbers: Its non-tensor arguments, in order.
        tensors: The origin of each tensor, and its layout there.
        line: The user's line that called it; None if lines were not requested.
    """

    name: str
    numbers: tuple[Any, ...]
    tensors: tuple[Any, ...]
    line: str | None


@dataclass
class OutsideMemory:
    """Memory that a call took from outside.

    Attributes:
        weak: The memory.
        kept: The memory, kept alive so that nothing else comes to lie there. None after code that
            torch has compiled, which makes tensors without an operator: the memory may be one of
            these.
        dtype: The dtype of the tensor that an operator got first.
        shape: The shape of that tensor.
        place: The place of that operator.
        is_written: True if an operator writes it.
        name: The place where the function finds it, or its address; None if only its order is
            known.
        is_named: True if ``name`` is a place.
    """

    weak: _torch.WeakStorage
    kept: torch.UntypedStorage | None
    dtype: torch.dtype
    shape: tuple[int, ...]
    place: int
    is_written: bool = False
    name: str | None = None
    is_named: bool = False

    @property
    def storage(self) -> torch.UntypedStorage | None:
        """The memory; None if it is gone."""
        return self.weak.get()


@dataclass
class Trace:
    """The operators of a call, and the memory that they took from outside.

    Attributes:
        operators: The operators, in order.
        outside: The memory from outside, by the number of the storage.
        inputs: The origins of the tensors that are copied, by name.
    """

    operators: list[Operator] = field(default_factory=list)
    outside: dict[int, OutsideMemory] = field(default_factory=dict)
    inputs: Sequence[str] = ()

    def name_outside(self, names: Mapping[int, str]) -> None:
        """Name the memory from outside; ``names`` has the places by the addresses of storages."""
        for one in self.outside.values():
            if (memory := one.storage) is None:
                continue
            address = memory.data_ptr()
            one.name, one.is_named = names.get(address), address in names
            if not one.is_named and one.kept is not None:
                one.name = f"memory at {address:#x}"

    def written(self) -> list[tuple[torch.UntypedStorage, torch.dtype]]:
        """Return the outside memory that operators wrote, with the dtype that was seen first."""
        pairs = ((one.storage, one.dtype) for one in self.outside.values() if one.is_written)
        return [(memory, dtype) for memory, dtype in pairs if memory is not None]

    def difference(self, before: Trace) -> Reason | None:
        """Return the first difference from the previous call's operators; None if there is none."""
        mine, theirs = self._names(), before._names()
        for now, then in zip(self.operators, before.operators, strict=False):
            if now.name != then.name:
                text = f"{_short(now)} runs where {_short(then)} ran in the previous call"
                return _differs(text, now.line or then.line)
            if now.numbers != then.numbers:
                text = f"{_short(now)} gets {_change(now.numbers, then.numbers)}"
                return _differs(text, now.line or then.line)
            if (moved := _moved(now, mine, then, theirs)) is not None:
                return _differs(f"{_short(now)} {moved}", now.line or then.line)
        count, known = len(self.operators), len(before.operators)
        if count == known:
            return None
        longer = self if count > known else before
        one = longer.operators[min(count, known)]
        when = "and did not in the previous call" if count > known else "in the previous call only"
        return _differs(f"{_short(one)} runs {when}", one.line)

    def _names(self) -> Names:
        """Return the names of inputs, and of outside memory in the order of its first use."""
        return {"input": [*self.inputs], "outside": [one.name for one in self.outside.values()]}


Names = dict[str, list[str | None]]


def _differs(text: str, line: str | None) -> Reason:
    return Reason(Cause.DIFFERS, text, line)


def _short(operator: Operator) -> str:
    return operator.name.removesuffix(".default")


def _change(now: tuple[Any, ...], then: tuple[Any, ...]) -> str:
    for one, other in zip(now, then, strict=False):
        if one != other:
            return f"{_value(one)}, and {_value(other)} in the previous call"
    return f"{len(now)} values, and {len(then)} in the previous call"


def _value(number: Any) -> str:
    return str(number[1])[:60] if isinstance(number, tuple) and len(number) == 2 else str(number)


def _moved(now: Operator, mine: Names, then: Operator, theirs: Names) -> str | None:
    """Tell what else an operator gets; None if it is the same, or its copy."""
    for one, other in zip(now.tensors, then.tensors, strict=False):
        here, there = _origin(one[0], mine), _origin(other[0], theirs)
        if here != there:
            return f"takes {here}, and {there} in the previous call"
        # Of an argument itself the key has the layout.
        if one[1:] != other[1:] and one[1:] and other[1:]:
            return f"takes another part of {here} than in the previous call"
    if len(now.tensors) == len(then.tensors):
        return None
    return f"takes {len(now.tensors)} tensors, and {len(then.tensors)} in the previous call"


def _origin(origin: tuple[Any, ...], names: Names) -> str:
    kind, place = (*origin, None)[:2]
    if kind in ("host", "other"):
        return "a tensor of the host" if kind == "host" else f"a {place}"
    if kind in names:
        return names[kind][place] or "a tensor from outside"
    return f"the result of operator {place}"
