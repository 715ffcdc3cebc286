"""Trees of containers, as pytree has them but for two things.

A ``torch.Size`` is a value, of which torch makes a tuple. A dataclass that has tensors is a
container of its attributes, without being registered.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils import _pytree

__all__ = [
    "is_named_tuple",
    "is_record",
    "names_in",
    "record_of",
    "tree_flatten",
    "tree_iter",
    "tree_map",
    "tree_unflatten",
]

tree_unflatten = _pytree.tree_unflatten

# What pytree calls the parts of by their keys and numbers.
_MAPPINGS = (dict, OrderedDict, defaultdict)
_SEQUENCES = (list, tuple, deque)
# What has more values is of data, or is all of a program.
_MOST_VALUES = 4096


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


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """A tree of the same containers, with what the function returns for each leaf."""
    leaves, spec = tree_flatten(tree)
    return tree_unflatten(map(function, leaves), spec)


def names_in(name: str, tree: Any) -> list[str]:
    """How the leaves of a tree are found, as ``result[0]['x']``.

    Args:
        name: What the tree is called.
        tree: The tree.
    """
    kind = type(tree)
    items: Iterable[tuple[Any, Any]] | None = None
    if kind in _MAPPINGS:
        items = tree.items()
    elif kind in _SEQUENCES:
        items = enumerate(tree)
    if items is not None:
        return [one for key, part in items for one in names_in(f"{name}[{key!r}]", part)]
    if issubclass(kind, torch.Tensor) or _is_size(tree):
        return [name]
    tree = tree_with_records(tree)
    try:
        pairs = _pytree.tree_flatten_with_path(tree, is_leaf=_is_size)[0]
    except ValueError:  # of a class that was registered without names
        count = len(_pytree.tree_leaves(tree, is_leaf=_is_size))
        return [f"{name}.{place}" for place in range(count)]
    return [name + _pytree.keystr(path) for path, _ in pairs]


def is_named_tuple(kind: type) -> bool:
    """Whether a class is just what ``typing.NamedTuple`` makes, with no ways of its own."""
    is_plain = kind.__bases__ == (tuple,) and not kind.__dictoffset__
    return is_plain and {"_fields", "_make"} <= vars(kind).keys() and not _is_known(kind)


def is_record(value: Any) -> bool:
    """Whether a value is a dataclass that has tensors, and is no container that pytree knows.

    It has its attributes in a dictionary, no code of its class runs when it is made or goes, and
    nobody can tell a copy from it. None of what it has leads back to it, or to another one twice.
    """
    if not _may_be_record(type(value)):
        return False
    found: dict[int, Any] = {}
    again: list[Any] = []
    return _has_tensors(value, found, again) and not any(_has_tensors(one, {}, []) for one in again)


def record_of(kind: type, attributes: Iterable[tuple[str, Any]]) -> Any:
    """A dataclass that has these attributes, and was not initialised."""
    made: Any = object.__new__(kind)
    vars(made).update(attributes)
    return made


def tree_with_records(tree: Any) -> Any:
    """A tree with something that pytree knows in the place of each dataclass that has tensors."""

    def stands_for(leaf: Any) -> Any:
        return _Record(leaf) if is_record(leaf) else leaf

    return _pytree.tree_map(stands_for, tree, is_leaf=_is_size)


class _Record:
    """What stands for a dataclass in a tree; another dataclass is made of it."""

    def __init__(self, record: Any) -> None:
        self.kind = type(record)
        # Also what it has besides its fields.
        self.attributes = {name: tree_with_records(one) for name, one in vars(record).items()}


def _taken_apart(record: _Record) -> tuple[list[Any], Any]:
    return [*record.attributes.values()], (record.kind, *record.attributes)


def _with_names(record: _Record) -> tuple[list[tuple[Any, Any]], Any]:
    items = [(_pytree.GetAttrKey(name), one) for name, one in record.attributes.items()]
    return items, _taken_apart(record)[1]


def _put_together(attributes: Iterable[Any], context: Any) -> Any:
    kind, *names = context
    return record_of(kind, zip(names, attributes, strict=True))


_pytree.register_pytree_node(_Record, _taken_apart, _put_together, flatten_with_keys_fn=_with_names)


def _has_tensors(value: Any, found: dict[int, Any], again: list[Any]) -> bool:
    """Whether there is a tensor in a dataclass, or in others that it leads to.

    Args:
        value: The dataclass.
        found: Gets all of them, by their ``id``.
        again: Gets those that it leads to more than once.
    """
    has_tensor, left = False, _MOST_VALUES
    waiting = [value]
    found[id(value)] = value
    while waiting:
        values = [*vars(waiting.pop()).values()]
        leaves = (leaf for one in values for leaf in _pytree.tree_iter(one, is_leaf=_is_size))
        for leaf in leaves:
            left -= 1
            if left < 0:
                return False
            has_tensor |= issubclass(type(leaf), torch.Tensor)
            if _may_be_record(type(leaf)):
                (again if id(leaf) in found else waiting).append(leaf)
                found[id(leaf)] = leaf
    return has_tensor


def _may_be_record(kind: type) -> bool:
    if not hasattr(kind, "__dataclass_fields__"):
        return False
    has_own_ways = any(getattr(kind, name) is not getattr(object, name) for name in _WAYS)
    has_slots = any(vars(base).get("__slots__") for base in kind.__mro__)
    # Who compares by identity may look for it.
    hashed: Any = kind.__hash__
    is_itself = hashed is object.__hash__ or hasattr(kind, "__del__")
    is_module = issubclass(kind, torch.nn.Module)
    return not (has_own_ways or has_slots or is_itself or is_module or _is_known(kind))


# How objects are made and asked.
_WAYS = ("__new__", "__getattribute__")


def _is_known(kind: type) -> bool:
    return kind in _pytree.SUPPORTED_NODES


def _is_size(value: Any) -> bool:
    return type(value) is torch.Size
