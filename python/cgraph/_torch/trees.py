"""Trees of containers, as pytree has them but for two things.

A ``torch.Size`` is a value, of which torch makes a tuple. A dataclass that has tensors is a
container of its attributes, without being registered.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils import _pytree

__all__ = [
    "attributes_in",
    "is_named_tuple",
    "is_record",
    "record_of",
    "tree_flatten",
    "tree_iter",
    "tree_iter_once",
    "tree_map",
    "tree_unflatten",
    "tree_with_records",
]

tree_unflatten = _pytree.tree_unflatten

# So many are looked through that are one inside the other: they may lead back. What has more values
# than that is of data, or is all of a program.
_MOST_RECORDS, _MOST_VALUES = 8, 4096
# How objects are made and asked.
_WAYS = ("__new__", "__getattribute__")


def tree_flatten(tree: Any) -> tuple[list[Any], Any]:
    """The leaves of a tree, and how they are put together."""
    leaves, spec = _pytree.tree_flatten(tree, is_leaf=_is_size)
    if any(map(is_record, leaves)):
        leaves, spec = _pytree.tree_flatten(tree_with_records(tree), is_leaf=_is_size)
    return leaves, spec


def tree_iter(tree: Any) -> Iterator[Any]:
    """The leaves of a tree."""
    for leaf in _pytree.tree_iter(tree, is_leaf=_is_size):
        if is_record(leaf):
            yield from _pytree.tree_iter(tree_with_records(leaf), is_leaf=_is_size)
        else:
            yield leaf


def tree_iter_once(tree: Any, seen: dict[int, Any]) -> Iterator[Any]:
    """The leaves of a tree that were not met before; containers may contain themselves.

    Args:
        tree: The tree.
        seen: What was met, by its ``id``; it gets leaves and containers, and keeps them alive.
    """

    def is_leaf(value: Any) -> bool:
        if id(value) in seen or _is_size(value):
            return True
        if isinstance(value, dict | list | tuple | deque):
            seen[id(value)] = value
        return False

    for leaf in _pytree.tree_iter(tree, is_leaf=is_leaf):
        if id(leaf) not in seen:
            seen[id(leaf)] = leaf
            yield leaf


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """A tree of the same containers, with what the function returns for each leaf."""
    leaves, spec = tree_flatten(tree)
    return tree_unflatten(map(function, leaves), spec)


def is_named_tuple(kind: type) -> bool:
    """Whether a class is one of ``typing.NamedTuple``, which pytree knows by that alone."""
    is_tuple = issubclass(kind, tuple) and kind is not tuple
    return is_tuple and isinstance(getattr(kind, "_fields", None), tuple) and not _is_known(kind)


def is_record(value: Any) -> bool:
    """Whether a value is a dataclass that has tensors, and is no container that pytree knows.

    It has its attributes in a dictionary, and no code of its class runs when it is made or asked.
    """
    return hasattr(type(value), "__dataclass_fields__") and _has_tensors(value, _MOST_RECORDS)


def attributes_in(record: Any) -> dict[str, Any]:
    """What a dataclass has, also besides its fields."""
    found: dict[str, Any] = vars(record)
    return found


def record_of(kind: type, attributes: Iterable[tuple[str, Any]]) -> Any:
    """A dataclass that has these attributes, and was not initialised."""
    made: Any = object.__new__(kind)
    vars(made).update(attributes)
    return made


def tree_with_records(tree: Any) -> Any:
    """A tree with something that pytree knows in the place of each dataclass that has tensors."""
    return _with_records(tree, _MOST_RECORDS)


class _Record:
    """What stands for a dataclass in a tree; another dataclass is made of it."""

    def __init__(self, record: Any, left: int) -> None:
        self.kind = type(record)
        items = attributes_in(record).items()
        self.attributes = {name: _with_records(one, left) for name, one in items}


def _with_records(tree: Any, left: int) -> Any:
    if not left:
        return tree

    def stands_for(leaf: Any) -> Any:
        return _Record(leaf, left - 1) if is_record(leaf) else leaf

    return _pytree.tree_map(stands_for, tree, is_leaf=_is_size)


def _taken_apart(record: _Record) -> tuple[list[Any], Any]:
    return [*record.attributes.values()], (record.kind, *record.attributes)


def _with_names(record: _Record) -> tuple[list[tuple[Any, Any]], Any]:
    items = [(_pytree.GetAttrKey(name), one) for name, one in record.attributes.items()]
    return items, _taken_apart(record)[1]


def _put_together(attributes: Iterable[Any], context: Any) -> Any:
    kind, *names = context
    return record_of(kind, zip(names, attributes, strict=True))


_pytree.register_pytree_node(_Record, _taken_apart, _put_together, flatten_with_keys_fn=_with_names)


def _has_tensors(value: Any, left: int) -> bool:
    kind = type(value)
    if not left or not hasattr(kind, "__dataclass_fields__") or not _is_plain(kind):
        return False
    values = [*vars(value).values()]
    leaves = (leaf for one in values for leaf in _pytree.tree_iter(one, is_leaf=_is_size))
    found = [*itertools.islice(leaves, _MOST_VALUES + 1)]
    if len(found) > _MOST_VALUES:
        return False
    return any(isinstance(one, torch.Tensor) or _has_tensors(one, left - 1) for one in found)


def _is_plain(kind: type) -> bool:
    of_object = [getattr(kind, name) is getattr(object, name) for name in _WAYS]
    has_slots = any(vars(base).get("__slots__") for base in kind.__mro__)
    is_module = issubclass(kind, torch.nn.Module)
    return all(of_object) and not (has_slots or is_module or _is_known(kind))


def _is_known(kind: type) -> bool:
    return kind in _pytree.SUPPORTED_NODES


def _is_size(value: Any) -> bool:
    return type(value) is torch.Size
