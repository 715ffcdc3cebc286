"""The operators of one call, so that two calls can be compared.

Two calls do the same where their operators are the same, get the same numbers, and take tensors
from the same places: an argument, an earlier operator, or a place outside by its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from cgraph import _torch

__all__ = ["Difference", "Operator", "OutsideMemory", "Trace"]


class Operator(NamedTuple):
    """One operator of a call.

    Attributes:
        name: Its name with the overload.
        numbers: All that it got and that is no tensor, in order.
        tensors: Where each tensor is from, and how it lies there.
        line: The line of the user's that called it; None where lines were not asked for.
    """

    name: str
    numbers: tuple[Any, ...]
    tensors: tuple[Any, ...]
    line: str | None


@dataclass
class OutsideMemory:
    """Memory that a call took from outside of it.

    Attributes:
        weak: The memory.
        kept: The memory, kept alive, so that nothing else comes to lie there. None behind code that
            torch has compiled, which makes tensors without an operator: it may be one of these.
        dtype: That of the tensor that an operator got first.
        shape: Likewise.
        place: The place of that operator.
        is_written: Whether an operator writes it.
        name: Where the function finds it, or its address; None if only its order is known.
        is_named: Whether that is a place.
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
        """The memory, if it is still there."""
        return self.weak.get()


class Difference(NamedTuple):
    """Where two calls differ.

    Attributes:
        text: How, in words.
        line: The line of the user's; None if it is not known.
    """

    text: str
    line: str | None


@dataclass
class Trace:
    """The operators of a call, and what they took from outside.

    Attributes:
        operators: They, in order.
        outside: By the number of the storage.
        inputs: What the arguments that are copied are called.
    """

    operators: list[Operator] = field(default_factory=list)
    outside: dict[int, OutsideMemory] = field(default_factory=dict)
    inputs: Sequence[str] = ()

    def name_outside(self, names: Mapping[int, str]) -> None:
        """Note where the function finds what it took; ``names`` by the addresses of storages."""
        for one in self.outside.values():
            if (memory := one.storage) is None:
                continue
            address = memory.data_ptr()
            one.name, one.is_named = names.get(address), address in names
            if not one.is_named and one.kept is not None:
                one.name = f"memory at {address:#x}"

    def written(self) -> list[tuple[torch.UntypedStorage, torch.dtype]]:
        """What operators wrote of it, with the type of the tensor that an operator got first."""
        pairs = ((one.storage, one.dtype) for one in self.outside.values() if one.is_written)
        return [(memory, dtype) for memory, dtype in pairs if memory is not None]

    def difference(self, before: Trace) -> Difference | None:
        """The first operator that is another one than in the call before; None if none is."""
        mine, theirs = self._names(), before._names()
        for now, then in zip(self.operators, before.operators, strict=False):
            if now.name != then.name:
                text = f"{_short(now)} runs where {_short(then)} ran in the call before"
                return Difference(text, now.line or then.line)
            if now.numbers != then.numbers:
                text = f"{_short(now)} gets {_change(now.numbers, then.numbers)}"
                return Difference(text, now.line or then.line)
            if not _are_from_same(now, mine, then, theirs):
                text = f"{_short(now)} {_moved(now, mine, then, theirs)}"
                return Difference(text, now.line or then.line)
        count, known = len(self.operators), len(before.operators)
        if count == known:
            return None
        longer = self if count > known else before
        one = longer.operators[min(count, known)]
        when = "and did not in the call before" if count > known else "in the call before only"
        return Difference(f"{_short(one)} runs {when}", one.line)

    def _names(self) -> Names:
        """The names of inputs, and of what is outside in the order of its first use."""
        inputs: list[str | None] = [f"argument {name}" for name in self.inputs]
        return {"input": inputs, "outside": [one.name for one in self.outside.values()]}


Names = dict[str, list[str | None]]


def _are_from_same(now: Operator, mine: Names, then: Operator, theirs: Names) -> bool:
    """Whether two operators get the same; what is read in its place is where its copy was."""
    pairs = zip(now.tensors, then.tensors, strict=False)
    return len(now.tensors) == len(then.tensors) and all(
        _origin(one[0], mine) == _origin(other[0], theirs) and _is_same_part(one[1:], other[1:])
        for one, other in pairs
    )


def _is_same_part(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether two are laid out alike; of an argument itself nothing is noted: its key has that."""
    return one == other or not one or not other


def _short(operator: Operator) -> str:
    return operator.name.removesuffix(".default")


def _change(now: tuple[Any, ...], then: tuple[Any, ...]) -> str:
    for one, other in zip(now, then, strict=False):
        if one != other:
            return f"{_value(one)}, and {_value(other)} in the call before"
    return f"{len(now)} values, and {len(then)} in the call before"


def _value(number: Any) -> str:
    return str(number[1])[:60] if isinstance(number, tuple) and len(number) == 2 else str(number)


def _moved(now: Operator, mine: Names, then: Operator, theirs: Names) -> str:
    for one, other in zip(now.tensors, then.tensors, strict=False):
        here, there = _origin(one[0], mine), _origin(other[0], theirs)
        if here != there:
            return f"takes {here}, and {there} in the call before"
        if not _is_same_part(one[1:], other[1:]):
            return f"takes another part of {here} than in the call before"
    return f"takes {len(now.tensors)} tensors, and {len(then.tensors)} in the call before"


def _origin(origin: tuple[Any, ...], names: Names) -> str:
    kind, place = (*origin, None)[:2]
    if kind in ("host", "other"):
        return "a tensor of the host" if kind == "host" else f"a {place}"
    if kind in names:
        return names[kind][place] or "a tensor from outside"
    return f"the result of operator {place}"
