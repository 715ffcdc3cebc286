"""The operators of a function that compute something, and where they come from."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from cgraph import _driver, _torch, breaks, labels
from cgraph._captures.label_recorder import Modules
from cgraph._operators.facts import operator_reader
from cgraph._source import user_line
from cgraph._text import short_place
from cgraph._torch import tree_iter
from cgraph.labels import Label

__all__ = ["SeenOperator", "Watch"]

aten = torch.ops.aten

# Operators whose result is uninitialised.
_UNWRITTEN = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
# Results that are not values: random states, and tensors that only a backward pass reads.
_NO_VALUES = {"philox_seed", "philox_offset", "rng_state", "unused", "debug_attn_mask"}


@dataclass
class SeenOperator:
    """An operator that was seen.

    Attributes:
        label: The place it comes from.
        segment: Number of breaks of the user before it.
        results: The tensors that it returned, or copies.
        kernels: The names of its kernels.
        node: The number of its first node.
        is_behind_backward: True if a backward pass ran just before, whose operators are not seen.
        numbers: Its non-tensor arguments, by type and value.
    """

    label: Label
    segment: int
    results: list[torch.Tensor]
    kernels: tuple[str, ...] = ()
    node: int = 0
    is_behind_backward: bool = False
    numbers: tuple[Any, ...] = ()

    def __str__(self) -> str:
        """Return operator, node, line, module and scopes as text."""
        label = self.label
        text = str(label.operator)
        names = [name for name in dict.fromkeys(self.kernels) if name != label.operator]
        if names:
            text += f" (node {self.node}: {', '.join(names)})"
        else:
            text += f" (node {self.node})"
        if label.source is not None:
            text += f" at {short_place(label.source)}"
        if label.module is not None:
            text += f" in {label.module}"
        return text + "".join(f", {name}" for name in label.stack)


class Watch(_torch.Bystander):
    """A mode that sees the operators of a function that compute something, except in breaks."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._place = threading.get_ident(), _torch.backward_pass()
        # True if a backward pass has run since the last operator.
        self._has_backward = False
        self._in_break = False
        self._modules: Modules | None = None
        self.segment = 0
        self._reader = operator_reader(_driver.current().device_type)

    def watching(self) -> ExitStack:
        """Return a context in which operators are seen."""
        context = ExitStack()
        self._modules = Modules(_nothing)
        context.callback(self._modules.remove)
        context.enter_context(breaks.breakable(self))
        self.uncompiled = context.enter_context(_torch.Uncompiled())
        context.enter_context(self)
        return context

    def run(self, work: breaks.Work, args: Any, kwargs: Any) -> Any:
        """Run a break, whose operators are not part of the graph."""
        if self._in_break:
            return work.fn(*args, **kwargs)
        self._in_break = True
        try:
            return self.call_break(work, args, kwargs)
        finally:
            self._in_break = False
            self.segment += 1

    def call_break(self, work: breaks.Work, args: Any, kwargs: Any) -> Any:
        """Call a break."""
        return work.fn(*args, **kwargs)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator."""
        result = func(*args, **(kwargs or {}))
        # A backward pass has its own stack of modes, so that no capture can be divided there.
        place = threading.get_ident(), _torch.backward_pass()
        if self._in_break or place != self._place:
            self._has_backward |= not self._in_break
            return result
        if func in _UNWRITTEN:
            self.unwritten(result)
        elif not _is_view(func):
            module = None if self._modules is None else self._modules.current()
            label = Label(tuple(labels.scopes()), module, str(func), user_line())
            values = list(_values(func, result))
            operator = SeenOperator(
                label, self.segment, values, is_behind_backward=self._has_backward
            )
            operator.numbers, _ = self._reader.split(args, kwargs or {})
            self._has_backward = False
            self.seen(operator)
        return result

    def seen(self, operator: SeenOperator) -> None:
        """Note an operator that has just run."""
        raise NotImplementedError

    def unwritten(self, tensor: torch.Tensor) -> None:
        """Note uninitialised memory."""


def _is_view(func: Any) -> bool:
    """Return whether an operator computes nothing."""
    return getattr(func, "is_view", False) or torch.Tag.inplace_view in getattr(func, "tags", ())


def _values(func: Any, result: Any) -> Sequence[torch.Tensor]:
    """Return the tensors among an operator's results, without those that are not values."""
    names: list[str | None] = []
    if hasattr(func, "_schema"):
        names = [one.name for one in func._schema.returns]
    results = result if isinstance(result, tuple) and len(result) == len(names) else (result,)
    names = names if len(names) == len(results) else [None] * len(results)
    kept = [one for name, one in zip(names, results, strict=True) if name not in _NO_VALUES]
    return [leaf for leaf in tree_iter(kept) if isinstance(leaf, torch.Tensor)]


def _nothing() -> None:
    """Ignore the beginning of a module."""
