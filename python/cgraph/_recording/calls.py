"""The arguments of a call, taken apart: what is copied, what stays, what is constant."""

from __future__ import annotations

import bisect
from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from cgraph import _core, _torch
from cgraph._recording.arguments import Arguments
from cgraph._recording.structure import Pattern, is_like, pattern_of, put_together, structure_of
from cgraph._state.constants import Constant, Same, as_now, is_compared_here, is_loose
from cgraph._state.hidden import is_opaque
from cgraph._text import shown
from cgraph._torch import tree_flatten

__all__ = [
    "Call",
    "Leaf",
    "Mode",
    "as_argument",
    "copied",
]

# So many letters of a constant are shown.
_LONG = 40


class Mode(NamedTuple):
    """The modes of torch's that a capture depends on.

    Attributes:
        grad: Whether gradients are recorded.
        inference: Whether it is inference mode.
        autocast: What autocast does; None while it is off.
    """

    grad: bool
    inference: bool
    autocast: tuple[Any, ...] | None

    @classmethod
    def now(cls) -> Mode:
        """Those of this thread."""
        grad = torch.is_grad_enabled()
        autocast = _torch.autocast_state() if _torch.is_any_autocast_enabled() else None
        return cls(grad, not grad and torch.is_inference_mode_enabled(), autocast)

    def __str__(self) -> str:
        """Those that are not torch's default for inference."""
        names = ["grad"] if self.grad else ["inference mode"] if self.inference else []
        kinds = [str(dtype).removeprefix("torch.") for is_on, dtype in self.autocast or () if is_on]
        return ", ".join([*names, *(f"autocast {kind}" for kind in kinds)])


@dataclass(frozen=True)
class Leaf:
    """A value among the arguments.

    Attributes:
        name: How it is found, as ``x`` or ``batch['ids'][0]``.
        value: The value.
        kind: ``tensor`` for one that is copied, ``fixed`` for one that is read where it lies, or
            ``constant`` for what is no tensor.
        by_name: Whether its argument was given by name.
    """

    name: str
    value: Any
    kind: str
    by_name: bool = False

    def key(self, grad: bool) -> Hashable:
        """What two calls of one graph have in common here."""
        if self.kind == "constant":
            if isinstance(self.value, torch.nn.Module):
                return Same(self.value)
            return ("opaque", type(self.value)) if is_opaque(self.value) else Constant(self.value)
        tensor = self.value
        if (form := _torch.form_of(tensor)) is not None:
            return self.kind, type(tensor), form, tensor.dtype
        of_elements = tensor.shape, tensor.dtype, self._strides, tensor.device, self.is_lazy
        return self.kind, type(tensor), *of_elements, tensor.requires_grad, self.needs_grad(grad)

    @property
    def _strides(self) -> tuple[int, ...] | None:
        """Those of the tensor that a graph reads; None if it is contiguous."""
        if self.value.layout is not torch.strided or self.value.is_contiguous():
            return None
        # What is copied is read without gaps, whatever it had.
        return (self.value if self.kind == "fixed" else dense_like(self.value)).stride()

    @property
    def is_lazy(self) -> bool:
        """Whether a tensor is read where it lies, and its bytes are not its values."""
        return self.kind == "fixed" and (self.value.is_conj() or self.value.is_neg())

    def needs_grad(self, grad: bool) -> bool:
        """Whether the function may take a gradient of a tensor.

        Where none are recorded it may record some itself, but none of a history before the call.
        """
        return bool(self.value.requires_grad and (grad or self.value.is_leaf))

    def __str__(self) -> str:
        """Name and value in words, as they are given."""
        return f"{self.name}{'=' if self.by_name or self.kind == 'constant' else ': '}{self.words}"

    @property
    def words(self) -> str:
        """The value in words."""
        if self.kind == "constant":
            text = shown(self.value)
            return text if len(text) <= _LONG else text[:_LONG] + "…"
        dtype = str(self.value.dtype).removeprefix("torch.")
        if type(self.value) is not torch.Tensor:
            dtype = f"{type(self.value).__name__} {dtype}"
        if (form := _torch.form_of(self.value)) is not None:
            return f"{form} {dtype}"
        grad = " with grad" if self.value.requires_grad else ""
        strides = "" if self._strides is None else f" strides {list(self._strides)}"
        if self.kind == "tensor" and self._strides == _strides_of(self.value.shape):
            # One with gaps, or that is expanded, of which the copy shows nothing.
            strides = " not contiguous"
        return f"{dtype}{list(self.value.shape)}{strides}{grad}"


class Call:
    """One call's arguments.

    Args:
        arguments: Those of the function.
        owned: The ``id`` of each tensor that a module of the function has.
        args: The positional arguments.
        kwargs: The keyword arguments.

    Attributes:
        leaves: All values, in the order of the patterns.
        mode: torch's modes.
        is_native: Whether native entries can match it: it has no containers of other kinds than
            tuples, lists and dictionaries, and nothing that only Python can compare or read.
        is_in_order: Whether the function sees the order of its keyword arguments.
    """

    def __init__(
        self,
        arguments: Arguments,
        owned: Collection[int],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.mode = Mode.now()
        self.leaves: list[Leaf] = []
        self.is_native = True
        self._owned = owned
        # Containers of other kinds, each with how many leaves come before, and arguments by name.
        self._others: list[tuple[int, str]] = []
        self._is_by_name = False
        # The dataclasses that were taken apart: who finds one twice would find two copies.
        self._records: set[int] = set()
        self._args = [
            self._taken(value, name := arguments.name(place), arguments.is_static(place, name))
            for place, value in enumerate(args)
        ]
        self._is_by_name = True
        self.is_in_order = arguments.are_in_order(kwargs)
        self._kwargs = [
            (name, self._taken(kwargs[name], name, arguments.is_static(None, name)))
            for name in (kwargs if self.is_in_order else sorted(kwargs))
        ]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors that are copied."""
        return [leaf.value for leaf in self.leaves if leaf.kind == "tensor"]

    @property
    def names(self) -> list[str]:
        """The names of those."""
        return [leaf.name for leaf in self.leaves if leaf.kind == "tensor"]

    @property
    def modules(self) -> list[torch.nn.Module]:
        """The modules among the arguments."""
        return [leaf.value for leaf in self.leaves if isinstance(leaf.value, torch.nn.Module)]

    @property
    def odd_one(self) -> Leaf | None:
        """The first tensor that is more than plain elements side by side in memory."""
        tensors = (leaf for leaf in self.leaves if leaf.kind != "constant")
        return next((one for one in tensors if _torch.form_of(one.value) is not None), None)

    def on_device(self) -> AbstractContextManager[object]:
        """A ``with`` block in which the device of the tensors is current, as captures want it."""
        for leaf in self.leaves:
            if leaf.kind != "constant" and leaf.value.device.type == "cuda":
                return torch.cuda.device(leaf.value.device)
        return nullcontext()

    @property
    def needs_grad(self) -> bool:
        """Whether a tensor among the arguments gets a gradient."""
        tensors = (leaf.value for leaf in self.leaves if leaf.kind != "constant")
        return self.mode.grad and any(tensor.requires_grad for tensor in tensors)

    def key(self) -> Hashable:
        """What all calls have in common that one graph can serve."""
        structure = (structure_of(self._args), tuple((n, structure_of(p)) for n, p in self._kwargs))
        return structure, tuple(leaf.key(self.mode.grad) for leaf in self.leaves), self.mode

    def arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with other tensors in the places of those that are copied."""
        values = self._values(tensors)
        args = tuple(put_together(one, values) for one in self._args)
        return args, {name: put_together(one, values) for name, one in self._kwargs}

    def consists_of(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]
    ) -> bool:
        """Whether arguments that :meth:`arguments` has made still consist of the same objects."""
        values = self._values(tensors)
        given = [*args, *(kwargs[name] for name, _ in self._kwargs)]
        parts = [*self._args, *(part for _, part in self._kwargs)]
        return all(is_like(part, value, values) for part, value in zip(parts, given, strict=True))

    def reason_beside(self, writes: Sequence[tuple[int, int]]) -> str | None:
        """Why no graph serves it that writes such memory: it reads copies, which are not written.

        Args:
            writes: The ends of each piece, in order, of which no two overlap.
        """
        if not writes:
            return None
        for name, tensor in zip(self.names, self.tensors, strict=True):
            if _torch.memory_of(tensor) is None:
                continue
            begin, end = _torch.span_of(tensor)
            after = bisect.bisect_right(writes, begin, key=lambda piece: piece[1])
            if after < len(writes) and writes[after][0] < end:
                return (
                    f"{name} shares memory with a tensor that the function writes: give it a copy,"
                    " or let it find both in the same way"
                )
        return None

    def replaced(self, tensors: Sequence[torch.Tensor]) -> Call:
        """The same call with other tensors in the places of those that are copied."""
        new = object.__new__(Call)
        new.__dict__.update(self.__dict__)
        others = iter(tensors)
        new.leaves = [
            replace(leaf, value=next(others)) if leaf.kind == "tensor" else leaf
            for leaf in self.leaves
        ]
        return new

    def patterns(
        self, signatures: Sequence[_core.Signature]
    ) -> tuple[list[Pattern], list[tuple[str, Pattern]]]:
        """What a native entry matches: these signatures for the tensors that are copied.

        For a call that none can match, there is nothing to compare.
        """
        if not self.is_native:
            return [], []
        copied = iter(signatures)
        leaves = iter([_pattern(leaf, copied, self.mode.grad) for leaf in self.leaves])
        args = [pattern_of(one, leaves) for one in self._args]
        return args, [(name, pattern_of(one, leaves)) for name, one in self._kwargs]

    def words(self, *, by_name: bool = True) -> list[str]:
        """Each argument in words, and the modes.

        Args:
            by_name: Tell what was given by name from what was given by place.
        """
        leaves = [str(one if by_name else replace(one, by_name=False)) for one in self.leaves]
        # The last one first, as those before it stay where they are.
        for place, other in reversed(self._others):
            leaves.insert(place, other)
        return [*leaves, *filter(None, [str(self.mode)])]

    def __str__(self) -> str:
        """The arguments in words."""
        return ", ".join(self.words()) or "no arguments"

    def _values(self, tensors: Sequence[torch.Tensor]) -> Iterator[Any]:
        """All values, with other tensors in the places of those that are copied."""
        others = iter(tensors)
        return iter([next(others) if leaf.kind == "tensor" else leaf.value for leaf in self.leaves])

    def _taken(self, value: Any, name: str, static: bool) -> Any:
        """What a value consists of: its container, or None for a leaf."""
        kind = type(value)
        if kind is tuple or kind is list:
            parts = [
                self._taken(one, f"{name}[{place}]", static) for place, one in enumerate(value)
            ]
            return kind.__name__, parts
        if kind is dict:
            return "dict", [
                (key, self._taken(one, f"{name}[{key!r}]", static)) for key, one in value.items()
            ]
        if _torch.is_named_tuple(kind) and len(value) == len(kind._fields):
            fields = zip(kind._fields, value, strict=True)
            return "named", (
                kind,
                [self._taken(one, f"{name}.{field}", static) for field, one in fields],
            )
        if _torch.is_record(value):
            if id(value) in self._records:
                self._add(value, name, static)
                return None
            self._records.add(id(value))
            attributes = [*vars(value).items()]
            parts = [
                (field, self._taken(one, f"{name}.{field}", static)) for field, one in attributes
            ]
            return "record", (kind, parts)
        leaves, spec = tree_flatten(value)
        if spec.is_leaf():
            self._add(value, name, static)
            return None
        self.is_native = False
        self._others.append((len(self.leaves), f"{name}: {kind.__qualname__}"))
        for leaf, its_name in zip(leaves, _torch.names_in(name, value), strict=True):
            self._add(leaf, its_name, static)
        return "other", (spec, len(leaves))

    def _add(self, value: Any, name: str, static: bool) -> None:
        kind = "constant"
        self.is_native &= not is_compared_here(value) and not is_opaque(value)
        if isinstance(value, torch.Tensor):
            # Nothing native knows where it lies, or what is in it.
            self.is_native &= _torch.memory_of(value) is not None
            self.is_native &= _torch.form_of(value) is None
            kind = "fixed" if static or id(value) in self._owned else "tensor"
        leaf = Leaf(name, value, kind, self._is_by_name)
        self.is_native &= not leaf.is_lazy
        self.leaves.append(leaf)


def as_argument(copy: torch.Tensor, tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    """Let what a function is given instead of a tensor be of its class."""
    if type(copy) is not type(tensor):
        copy = _torch.in_class(copy, type(tensor))
    return copy.requires_grad_(requires_grad)


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that is a leaf or has a history as the tensor, and requires a gradient likewise."""
    copy = as_argument(tensor.detach().clone(), tensor, tensor.requires_grad)
    if tensor.is_leaf:
        return copy
    with torch.enable_grad():
        return copy.clone()


def dense_like(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without memory whose strides are those of a copy."""
    return torch.empty_like(tensor, device="meta", requires_grad=False)


def _strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return torch.empty(shape, device="meta").stride()


def _pattern(leaf: Leaf, copied: Iterator[_core.Signature], grad: bool) -> Pattern:
    if leaf.kind == "constant":
        return "same" if is_loose(leaf.value) else "constant", as_now(leaf.value)
    signature = _torch.signature(leaf.value) if leaf.kind == "fixed" else next(copied)
    tensor = leaf.value
    # See :meth:`Leaf.needs_grad`.
    is_leaf = tensor.is_leaf if tensor.requires_grad and not grad else None
    return leaf.kind, signature, tensor.requires_grad, is_leaf, type(tensor)
