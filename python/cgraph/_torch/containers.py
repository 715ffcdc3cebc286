"""Trees of containers, as in pytree with two exceptions.

A ``torch.Size`` is a value, where torch makes a tuple. A dataclass that has tensors is a container
of its attributes, without registration.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils import _pytree

from cgraph.errors import ArgumentError

__all__ = [
    "is_named_tuple",
    "is_record",
    "names_in",
    "record_of",
    "tree_dumps",
    "tree_flatten",
    "tree_iter",
    "tree_loads",
    "tree_map",
    "tree_unflatten",
]

tree_unflatten = _pytree.tree_unflatten

# Containers whose parts pytree names by their keys and numbers.
_MAPPINGS = (dict, OrderedDict, defaultdict)
_SEQUENCES = (list, tuple, deque)
# The usual leaves, which take the least time.
_LEAVES = {torch.Tensor, torch.nn.Parameter, int, float, bool, str, type(None)}
_LEAF = _pytree.tree_flatten(None)[1]
# A dataclass that has more values is data, or a whole program.
_MOST_VALUES = 4096


def tree_flatten(tree: Any) -> tuple[list[Any], Any]:
    """Return the leaves of a tree and its structure."""
    if type(tree) in _LEAVES:
        return [tree], _LEAF
    leaves, spec = _pytree.tree_flatten(tree, is_leaf=_is_size)
    if any(map(is_record, leaves)):
        leaves, spec = _pytree.tree_flatten(tree_with_records(tree), is_leaf=_is_size)
    return leaves, spec


def tree_iter(tree: Any) -> Iterator[Any]:
    """Yield the leaves of a tree."""
    kind = type(tree)
    if kind in _LEAVES:
        yield tree
    elif kind is tuple or kind is list:
        for one in tree:
            yield from tree_iter(one)
    else:
        for leaf in _pytree.tree_iter(tree, is_leaf=_is_size):
            if is_record(leaf):
                yield from _pytree.tree_iter(tree_with_records(leaf), is_leaf=_is_size)
            else:
                yield leaf


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return a tree of the same containers, with the function's result for each leaf."""
    leaves, spec = tree_flatten(tree)
    return tree_unflatten(map(function, leaves), spec)


def names_in(name: str, tree: Any) -> list[str]:
    """Return the names of a tree's leaves, as ``result[0]['x']``.

    Args:
        name: The name of the tree.
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


def tree_dumps(spec: Any) -> str:
    """Return the structure of a tree as text.

    Raises:
        ArgumentError: It has a container that has no text.
    """
    try:
        text = _pytree.treespec_dumps(spec)
        is_whole = _pytree.treespec_loads(text) == spec
    except Exception as error:  # those of many kinds of keys
        raise ArgumentError(f"{spec} cannot be written: {error!r}") from error
    if not is_whole:
        raise ArgumentError(f"{spec} cannot be written: it would come back as another one")
    return text


def tree_loads(text: str) -> Any:
    """Return the structure of a tree that :func:`tree_dumps` has written.

    Raises:
        ArgumentError: It has a container that this process does not know.
    """
    try:
        return _pytree.treespec_loads(text)
    except Exception as error:  # as above
        raise ArgumentError(f"{text:.80} cannot be read: {error!r}") from error


def is_named_tuple(kind: type) -> bool:
    """Return whether a class is as ``typing.NamedTuple`` makes it, without code of its own."""
    is_plain = kind.__bases__ == (tuple,) and not kind.__dictoffset__
    return is_plain and {"_fields", "_make"} <= vars(kind).keys() and not _is_known(kind)


def is_record(value: Any) -> bool:
    """Return whether a value is a dataclass that has tensors and that pytree does not know.

    It has its attributes in a dictionary, no code of its class runs when it is made or dies, and
    nothing can tell it from a copy. None of its values leads back to it, or to another dataclass
    twice.
    """
    if not _may_be_record(type(value)):
        return False
    found: dict[int, Any] = {}
    again: list[Any] = []
    return _has_tensors(value, found, again) and not any(_has_tensors(one, {}, []) for one in again)


def record_of(kind: type, attributes: Iterable[tuple[str, Any]]) -> Any:
    """Create a dataclass with these attributes, without initialising it."""
    made: Any = object.__new__(kind)
    vars(made).update(attributes)
    return made


def tree_with_records(tree: Any) -> Any:
    """Return a tree with a container of pytree in place of each dataclass that has tensors."""

    def stands_for(leaf: Any) -> Any:
        return _Record(leaf) if is_record(leaf) else leaf

    return _pytree.tree_map(stands_for, tree, is_leaf=_is_size)


class _Record:
    """A stand-in for a dataclass in a tree; unflattening makes another dataclass of it."""

    def __init__(self, record: Any) -> None:
        self.kind = type(record)
        # Also the attributes besides its fields.
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
    """Return whether there is a tensor in a dataclass, or in others that it leads to.

    Args:
        value: The dataclass.
        found: Receives all these dataclasses, by their ``id``.
        again: Receives the dataclasses that it leads to more than once.
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
    # An object that compares by identity may be searched for.
    hashed: Any = kind.__hash__
    is_itself = hashed is object.__hash__ or hasattr(kind, "__del__")
    is_module = issubclass(kind, torch.nn.Module)
    return not (has_own_ways or has_slots or is_itself or is_module or _is_known(kind))


# The methods by which objects are made and read.
_WAYS = ("__new__", "__getattribute__")


def _is_known(kind: type) -> bool:
    return kind in _pytree.SUPPORTED_NODES


def _is_size(value: Any) -> bool:
    return type(value) is torch.Size
