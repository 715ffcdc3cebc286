"""The arguments of a call, taken apart into values to copy, to read in place and to compare."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch

from cgraph import _core, _torch
from cgraph._graphed.argument_containers import (
    Container,
    Pattern,
    containers_beside,
    pattern_of,
    put_together,
    structure_of,
)
from cgraph._graphed.arguments import Arguments
from cgraph._python.guards import Guards, Way
from cgraph._python.values import (
    as_key,
    form_in_words,
    has_no_parts,
    is_array,
    is_atom,
    is_plain,
)
from cgraph._text import shown
from cgraph._torch import tree_flatten
from cgraph.errors import ArgumentError

__all__ = ["ArgumentLeaf", "Call", "Mode", "as_argument", "copied", "dense_like"]

# Number of letters of a value that are shown.
_LONG = 40

Kind = Literal["tensor", "static", "plain", "module", "object", "whole"]
"""The treatment of a value: it is copied, read where it lies, compared by value, by identity, by
its parts, or by identity without anything to look into."""


class Mode(NamedTuple):
    """The modes of torch that a capture depends on.

    Attributes:
        grad: True if gradients are recorded.
        inference: True in inference mode.
        autocast: The state of autocast; None while it is off.
        settings: torch's settings that all threads have in common, as a number.
    """

    grad: bool
    inference: bool
    autocast: tuple[Any, ...] | None
    settings: int

    @classmethod
    def now(cls) -> Mode:
        """Return the modes of this thread."""
        grad = torch.is_grad_enabled()
        autocast = _torch.autocast_state() if _torch.is_any_autocast_enabled() else None
        inference = not grad and torch.is_inference_mode_enabled()
        return cls(grad, inference, autocast, _torch.torch_settings().now())

    def __str__(self) -> str:
        """Name the modes that are not torch's default for inference."""
        names = ["grad"] if self.grad else ["inference mode"] if self.inference else []
        kinds = [str(dtype).removeprefix("torch.") for is_on, dtype in self.autocast or () if is_on]
        names += [f"autocast {kind}" for kind in kinds]
        # Only where two keys differ by them.
        _settings.setdefault(self.settings, len(_settings))
        number = _settings[self.settings]
        return ", ".join([*names, *([f"settings {number} of torch"] if number else [])])


# The numbers of torch's settings, in the order in which calls have shown them.
_settings: dict[int, int] = {}


class Same:
    """An object as part of a key that does not keep it alive; it equals only itself."""

    def __init__(self, value: object) -> None:
        self._value = weakref.ref(value)
        self._hash = id(value)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        value = self._value()
        return isinstance(other, Same) and value is not None and value is other._value()


@dataclass(frozen=True)
class ArgumentLeaf:
    """A value among the arguments.

    Attributes:
        name: The path to it, such as ``x`` or ``batch['ids'][0]``.
        value: The value.
        kind: The treatment of the value.
        by_name: True if its argument was given by name.
        is_declared: True if it is declared to stay where it lies, so that its address is in the
            key.
    """

    name: str
    value: Any
    kind: Kind
    by_name: bool = False
    is_declared: bool = False

    def key(self) -> Hashable:
        """Return the part of the key that calls of one graph have in common here."""
        if self.kind == "plain":
            return as_key(self.value)
        if self.kind == "object":
            return "object", type(self.value)
        if self.kind in ("module", "whole"):
            return _identity(self.value)
        tensor = self.value
        if (form := _torch.form_of(tensor)) is not None:
            return type(tensor), form, tensor.dtype
        place = tensor.data_ptr() if self.is_declared else None
        strides = None
        if not tensor.is_contiguous():
            # A copied tensor is read without gaps, whatever gaps it had.
            strides = (tensor if self.kind == "static" else dense_like(tensor)).stride()
        of_elements = tensor.shape, tensor.dtype, strides, tensor.device
        lazy = tensor.is_conj(), tensor.is_neg()
        is_leaf = tensor.requires_grad and tensor.is_leaf
        return type(tensor), place, *of_elements, lazy, tensor.requires_grad, is_leaf

    def __str__(self) -> str:
        """Return name and value as text, as they are given."""
        is_tensor = self.kind in ("tensor", "static")
        return f"{self.name}{'=' if self.by_name or not is_tensor else ': '}{self.words}"

    @property
    def words(self) -> str:
        """The value as text."""
        if self.kind not in ("tensor", "static"):
            text = shown(self.value) if self.kind == "plain" else type(self.value).__qualname__
            return text if len(text) <= _LONG else text[:_LONG] + "…"
        return form_in_words(self.value)


class Call:
    """The arguments of one call.

    Attributes:
        args: The positional arguments.
        kwargs: The keyword arguments.
        leaves: All values, in the order of the patterns.
        mode: The modes of torch.
        is_native: True if native entries can match it: all its containers are tuples, lists and
            dictionaries, and it has nothing that only Python can compare or read.
        is_in_order: True if the function sees the order of its keyword arguments.
        also: A plain value that belongs to the key besides the arguments.
        places: The names of the positional arguments.
        placed: The ways to tensors at guarded places that are copied as well, after the others.
        gives_placed: True if the first argument is a tuple of these.
    """

    also: Any = None
    placed: Sequence[Way] = ()
    gives_placed = False

    def __init__(self, arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args = args
        self.kwargs = kwargs
        self.mode = Mode.now()
        self.leaves: list[ArgumentLeaf] = []
        self.is_native = True
        # Containers of other kinds, each after the number of leaves that come before it.
        self._others: list[tuple[int, str]] = []
        self._is_by_name = False
        # The dataclasses that were taken apart: one that is found twice would become two copies.
        self._records: set[int] = set()
        self.places = [arguments.name(place) for place in range(len(args))]
        self._args = [
            self._argument(value, name, arguments.is_static(name))
            for name, value in zip(self.places, args, strict=True)
        ]
        self._is_by_name = True
        self.is_in_order = arguments.are_in_order(kwargs)
        self._kwargs = [
            (name, self._argument(kwargs[name], name, arguments.is_static(name)))
            for name in (kwargs if self.is_in_order else sorted(kwargs))
        ]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors that are copied."""
        given = [leaf.value for leaf in self.leaves if leaf.kind == "tensor"]
        return [*given, *(one.value for one in self.placed)]

    @property
    def names(self) -> list[str]:
        """The names of the tensors that are copied."""
        given = [leaf.name for leaf in self.leaves if leaf.kind == "tensor"]
        return [*given, *(one.name for one in self.placed)]

    @property
    def origins(self) -> list[str]:
        """The names of the tensors that are copied, as they differ from those of other tensors."""
        given = [f"argument {leaf.name}" for leaf in self.leaves if leaf.kind == "tensor"]
        return [*given, *(one.name for one in self.placed)]

    @property
    def statics(self) -> list[ArgumentLeaf]:
        """The tensors that are read where they lie."""
        return [leaf for leaf in self.leaves if leaf.kind == "static"]

    @property
    def objects(self) -> list[Any]:
        """The objects that guards look into, in order."""
        return [value for _, value in self.named_objects]

    @property
    def named_objects(self) -> list[tuple[str, Any]]:
        """The objects that guards look into, with their names."""
        return [(leaf.name, leaf.value) for leaf in self.leaves if leaf.kind == "object"]

    @property
    def named_modules(self) -> list[tuple[str, Any]]:
        """The modules among the arguments, with their names."""
        return [(leaf.name, leaf.value) for leaf in self.leaves if leaf.kind == "module"]

    def on_device(self) -> AbstractContextManager[object]:
        """Return a ``with`` block that makes the tensors' device current, as captures need it."""
        for leaf in self.leaves:
            if leaf.kind in ("tensor", "static") and leaf.value.device.type == "cuda":
                return torch.cuda.device(leaf.value.device)
        return nullcontext()

    @property
    def needs_grad(self) -> bool:
        """True if a tensor among the arguments gets a gradient."""
        tensors = (one.value for one in self.leaves if one.kind in ("tensor", "static"))
        return self.mode.grad and any(tensor.requires_grad for tensor in tensors)

    def key(self) -> Hashable:
        """Return the key of all calls that one graph can serve, without guarded values."""
        leaves = tuple(leaf.key() for leaf in self.leaves)
        return self._structure(), leaves, self.mode, as_key(self.also)

    def without_plain(self) -> Hashable:
        """Return the key without plain values."""
        leaves = tuple(None if one.kind == "plain" else one.key() for one in self.leaves)
        return self._structure(), leaves, self.mode

    def _structure(self) -> Hashable:
        by_name = tuple((name, structure_of(one)) for name, one in self._kwargs)
        return tuple(map(structure_of, self._args)), by_name

    @property
    def plain(self) -> dict[str, Any]:
        """The plain values by their names."""
        return {leaf.name: leaf.value for leaf in self.leaves if leaf.kind == "plain"}

    def arguments(
        self, tensors: Sequence[torch.Tensor], statics: Sequence[torch.Tensor] | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with other tensors in place of those that are copied.

        Args:
            tensors: The other tensors.
            statics: Tensors in place of those that are read where they lie; None to keep these.
        """
        values = self._values(tensors, statics)
        args = tuple(put_together(one, values) for one in self._args)
        if self.gives_placed:
            args = tuple(tensors[len(tensors) - len(self.placed) :]), *args
        return args, {name: put_together(one, values) for name, one in self._kwargs}

    def containers_beside(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[tuple[Any, Any]]:
        """Return the containers in arguments made so, each with the caller's own."""
        if self.gives_placed:
            args = args[1:]
        kwargs_given = [self.kwargs[name] for name in kwargs]
        return [*containers_beside((*args, *kwargs.values()), (*self.args, *kwargs_given))]

    def replaced(self, tensors: Sequence[torch.Tensor]) -> Call:
        """Return the same call with other tensors in place of those that are copied.

        Its containers are its own.
        """
        others = iter(tensors)
        new = self._with(
            replace(leaf, value=next(others)) if leaf.kind == "tensor" else leaf
            for leaf in self.leaves
        )
        new.placed = [one._replace(value=next(others)) for one in self.placed]
        new.args, new.kwargs = new.arguments(new.tensors)
        return new

    def giving_placed(self) -> Call:
        """Return the same call, whose first argument is a tuple of the tensors at places."""
        new = self._with(self.leaves)
        new.gives_placed = True
        return new

    def with_placed(self, guards: Guards) -> Call:
        """Return the same call with the tensors at guarded places that its graph copies."""
        placed = guards.inputs(self.objects)
        if not placed and not self.placed:
            return self
        new = self._with(self.leaves)
        new.placed = placed
        return new

    def with_statics(self, places: Collection[int]) -> Call:
        """Return the same call, in which the leaves at these places are read where they lie."""
        if not places:
            return self
        return self._with(
            replace(leaf, kind="static") if place in places and leaf.kind == "tensor" else leaf
            for place, leaf in enumerate(self.leaves)
        )

    def patterns(
        self, signatures: Sequence[_core.Signature]
    ) -> tuple[list[Pattern], list[tuple[str, Pattern]]]:
        """Return the patterns for a native entry, with these signatures for copied tensors.

        They are empty for a call that no entry can match.
        """
        if not self.is_native:
            return [], []
        copied = iter(signatures)
        leaves = iter([_pattern(leaf, copied) for leaf in self.leaves])
        args = [pattern_of(one, leaves) for one in self._args]
        return args, [(name, pattern_of(one, leaves)) for name, one in self._kwargs]

    def words(self) -> list[str]:
        """Return each argument as text, and the modes."""
        leaves = [*map(str, self.leaves)]
        # The last one first, so that the places of the others stay right.
        for place, other in reversed(self._others):
            leaves.insert(place, other)
        also = "" if self.also is None else f"guards={shown(self.also):.40}"
        return [*leaves, *filter(None, [str(self.mode), also])]

    def __str__(self) -> str:
        """Return the arguments as text."""
        return ", ".join(self.words()) or "no arguments"

    def _with(self, leaves: Iterator[ArgumentLeaf] | Any) -> Call:
        new = object.__new__(Call)
        new.__dict__.update(self.__dict__)
        new.leaves = [*leaves]
        return new

    def _values(
        self, tensors: Sequence[torch.Tensor], statics: Sequence[torch.Tensor] | None
    ) -> Iterator[Any]:
        """Iterate over all values, with other tensors in place of the call's."""
        of_kind = {"tensor": iter(tensors)}
        if statics is not None:
            of_kind["static"] = iter(statics)
        return iter(
            [next(of_kind[one.kind]) if one.kind in of_kind else one.value for one in self.leaves]
        )

    def _argument(self, value: Any, name: str, static: bool) -> Any:
        """Take an argument apart.

        Raises:
            ArgumentError: It contains itself.
        """
        try:
            return self._taken(value, name, static)
        except RecursionError:
            raise ArgumentError(
                f"{name} is a {type(value).__name__} that contains itself, or deeper containers"
                " than Python can go through: expected a finite one"
            ) from None

    def _taken(self, value: Any, name: str, static: bool) -> Any:
        """Take a value apart; return its container, or None for a leaf."""
        kind = type(value)
        if kind is tuple or kind is list:
            pairs = enumerate(value)
            parts = [self._taken(one, f"{name}[{place}]", static) for place, one in pairs]
            return Container(kind.__name__, parts)
        if kind is dict:
            parts = [self._taken(one, f"{name}[{key!r}]", static) for key, one in value.items()]
            return Container("dict", parts, [*value])
        if _torch.is_named_tuple(kind) and len(value) == len(kind._fields):
            fields = zip(kind._fields, value, strict=True)
            parts = [self._taken(one, f"{name}.{field}", static) for field, one in fields]
            return Container("named", parts, None, kind)
        if not is_plain(value) and _torch.is_record(value):
            if id(value) in self._records:
                self._add(value, name, static)
                return None
            self._records.add(id(value))
            attributes = dict(vars(value))
            parts = [self._taken(v, f"{name}.{k}", static) for k, v in attributes.items()]
            return Container("record", parts, [*attributes], kind)
        leaves, spec = tree_flatten(value)
        if spec.is_leaf():
            self._add(value, name, static)
            return None
        self.is_native = False
        self._others.append((len(self.leaves), f"{name}: {kind.__qualname__}"))
        for leaf, its_name in zip(leaves, _torch.names_in(name, value), strict=True):
            self._add(leaf, its_name, static)
        return Container("other", [None] * len(leaves), None, spec)

    def _add(self, value: Any, name: str, static: bool) -> None:
        kind: Kind = "object"
        is_declared = False
        if isinstance(value, torch.Tensor):
            # Native code does not know where it lies, or what is in it.
            self.is_native &= _torch.memory_of(value) is not None
            self.is_native &= _torch.form_of(value) is None
            is_declared = static or isinstance(value, torch.nn.Parameter)
            kind = "static" if is_declared else "tensor"
            self.is_native &= not (value.is_conj() or value.is_neg())
        elif is_plain(value):
            kind = "plain"
            self.is_native &= is_atom(value)
        elif isinstance(value, torch.nn.Module):
            kind = "module"
        elif has_no_parts(value) or is_array(value) or isinstance(value, Iterator):
            kind = "whole"
        self.leaves.append(ArgumentLeaf(name, value, kind, self._is_by_name, is_declared))


def as_argument(copy: torch.Tensor, tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    """Turn a copy into what a function gets instead of a tensor: one of its class."""
    if type(copy) is not type(tensor):
        copy = _torch.in_class(copy, type(tensor))
    return copy.requires_grad_(requires_grad)


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that is a leaf if the tensor is one, and requires a gradient if it does."""
    copy = as_argument(tensor.detach().clone(), tensor, tensor.requires_grad)
    if tensor.is_leaf:
        return copy
    with torch.enable_grad():
        return copy.clone()


def dense_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without memory that has the strides of a copy."""
    return torch.empty_like(tensor, device="meta", requires_grad=False)


def _identity(value: Any) -> Hashable:
    try:
        return Same(value)
    except TypeError:  # it has no weak references
        return "whole", id(value)


def _pattern(leaf: ArgumentLeaf, copied: Iterator[_core.Signature]) -> Pattern:
    if leaf.kind == "plain":
        return "constant", leaf.value
    if leaf.kind == "object":
        return "object", type(leaf.value)
    if leaf.kind in ("module", "whole"):
        return "same", leaf.value
    signature = _torch.signature(leaf.value) if leaf.kind == "static" else next(copied)
    tensor = leaf.value
    is_leaf = tensor.is_leaf if tensor.requires_grad and not torch.is_grad_enabled() else None
    kind = "fixed" if leaf.kind == "static" else "tensor"
    return kind, signature, tensor.requires_grad, is_leaf, type(tensor)
