"""The containers among the arguments of a call."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from cgraph import _torch
from cgraph._python.values import as_key, is_plain
from cgraph._torch import tree_unflatten

__all__ = [
    "Container",
    "Pattern",
    "containers_beside",
    "items_in",
    "pattern_of",
    "put_together",
    "structure_of",
]

Pattern = tuple[Any, ...]
"""The pattern that a native entry matches; see ``cgraph._core.Entry``."""


class Container(NamedTuple):
    """A container, whose values are None in it and come in order.

    Attributes:
        kind: ``"tuple"``, ``"list"``, ``"dict"``, ``"named"`` for a named tuple, ``"record"`` for a
            dataclass, or ``"other"`` for other types that pytree takes apart.
        parts: Its parts.
        keys: The keys or names of these, if they have some.
        of: Its class or specification, if the kind does not tell.
    """

    kind: str
    parts: list[Any]
    keys: Sequence[Any] | None = None
    of: Any = None


def structure_of(one: Container | None) -> Hashable:
    """Return the structure of an argument, which differs between arguments of other containers."""
    if one is None:
        return None
    keys = tuple(as_key(key) if is_plain(key) else key for key in one.keys or ())
    return one.kind, one.of, keys, tuple(map(structure_of, one.parts))


def put_together(one: Container | None, values: Iterator[Any]) -> Any:
    """Build an argument of these values, in containers of its own."""
    if one is None:
        return next(values)
    parts = [put_together(part, values) for part in one.parts]
    if one.kind == "other":
        return tree_unflatten(parts, one.of)
    if one.kind == "named":
        return tuple.__new__(one.of, parts)
    if one.keys is not None:
        pairs = [*zip(one.keys, parts, strict=True)]
        return dict(pairs) if one.kind == "dict" else _torch.record_of(one.of, pairs)
    return tuple(parts) if one.kind == "tuple" else parts


def containers_beside(made: Iterable[Any], given: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield the containers in arguments built so, each with the caller's own."""
    waiting = [*zip(made, given, strict=True)]
    while waiting:
        one, own = waiting.pop()
        if one is own or isinstance(own, torch.Tensor):
            continue
        yield one, own
        parts = dict(items_in(own))
        waiting += ((part, parts[key]) for key, part in items_in(one))


def items_in(one: Any) -> list[tuple[Any, Any]]:
    """Return the keys and values of a dictionary, list, tuple or dataclass."""
    if isinstance(one, list | tuple):
        return [*enumerate(one)]
    return [*(one if isinstance(one, dict) else vars(one)).items()]


def pattern_of(one: Container | None, leaves: Iterator[Pattern]) -> Pattern:
    """Build the pattern that a native entry matches from patterns for the values."""
    if one is None:
        return next(leaves)
    parts: list[Any] = [pattern_of(part, leaves) for part in one.parts]
    inside = parts if one.keys is None else [*zip(one.keys, parts, strict=True)]
    return (one.kind, inside) if one.of is None else (one.kind, inside, one.of)
