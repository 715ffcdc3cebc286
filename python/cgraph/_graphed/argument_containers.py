"""The containers among the arguments of a call.

An argument is None here for a value, or the name of a kind of container with its parts:
``("tuple", [part, …])``, ``("list", [part, …])``, ``("dict", [(key, part), …])``, for a named tuple
``("named", (class, [part, …]))``, for a dataclass ``("record", (class, [(name, part), …]))``, or
``("other", (specification, count))`` for other types that pytree takes apart. The values come in
order.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Any

from cgraph import _torch
from cgraph._python.values import as_key, is_plain
from cgraph._torch import tree_unflatten

__all__ = ["Pattern", "containers_beside", "pattern_of", "put_together", "structure_of"]

Pattern = tuple[Any, ...]
"""The pattern that a native entry matches; see ``cgraph._core.Entry``."""


def structure_of(one: Any) -> Hashable:
    """Return the structure of an argument, which differs between arguments of other containers."""
    if isinstance(one, list):
        return tuple(structure_of(part) for part in one)
    if one is None:
        return None
    kind, parts = one
    if kind == "other":
        return kind, parts
    if kind == "dict":
        return kind, tuple((_key(key), structure_of(part)) for key, part in parts)
    if kind == "record":
        of, parts = parts
        return kind, of, tuple((name, structure_of(part)) for name, part in parts)
    if kind == "named":
        of, parts = parts
        return kind, of, structure_of(parts)
    return kind, structure_of(parts)


def put_together(one: Any, values: Iterator[Any]) -> Any:
    """Build an argument of these values, in containers of its own."""
    if one is None:
        return next(values)
    kind, parts = one
    if kind == "other":
        spec, count = parts
        return tree_unflatten([next(values) for _ in range(count)], spec)
    if kind == "dict":
        return {key: put_together(part, values) for key, part in parts}
    if kind == "record":
        of, parts = parts
        return _torch.record_of(of, [(name, put_together(part, values)) for name, part in parts])
    if kind == "named":
        of, parts = parts
        return tuple.__new__(of, [put_together(part, values) for part in parts])
    items = [put_together(part, values) for part in parts]
    return tuple(items) if kind == "tuple" else items


def containers_beside(made: Iterable[Any], given: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield the lists and dictionaries in arguments built so, each with the caller's own."""
    waiting = [*zip(made, given, strict=True)]
    while waiting:
        one, own = waiting.pop()
        if type(own) in (list, dict):
            yield one, own
        if isinstance(own, list | tuple) and type(one) is type(own):
            waiting += zip(one, own, strict=True)
        elif type(own) is dict:
            waiting += ((one[key], part) for key, part in own.items())


def pattern_of(one: Any, leaves: Iterator[Pattern]) -> Pattern:
    """Build the pattern that a native entry matches from patterns for the values."""
    if one is None:
        return next(leaves)
    kind, parts = one
    if kind == "dict":
        return kind, _pairs_of(parts, leaves)
    if kind == "record":
        of, parts = parts
        return kind, _pairs_of(parts, leaves), of
    if kind == "named":
        of, parts = parts
        return kind, [pattern_of(part, leaves) for part in parts], of
    return kind, [pattern_of(part, leaves) for part in parts]


def _pairs_of(parts: list[tuple[Any, Any]], leaves: Iterator[Pattern]) -> list[tuple[Any, Pattern]]:
    return [(key, pattern_of(part, leaves)) for key, part in parts]


def _key(key: Hashable) -> Hashable:
    return as_key(key) if is_plain(key) else key
