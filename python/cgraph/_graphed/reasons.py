"""The reasons why calls run eagerly, as text."""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch

from cgraph import _torch
from cgraph._autograd.pinned import PINNED, is_pinning
from cgraph._explanation.findings import failed_by
from cgraph._graphed.call import Call
from cgraph._graphed.function_module import NoGradientError
from cgraph._python.values import Form, is_array, tensors_behind
from cgraph._reason import Reason
from cgraph._source import place_of
from cgraph._torch import tree_iter
from cgraph.causes import Cause

__all__ = [
    "ONE_SIZE",
    "Containers",
    "broken_by",
    "reason_against",
    "reason_against_devices",
    "reason_against_result",
    "reason_of_various",
]


ONE_SIZE = (
    "write into a tensor of one size, with cache.index_copy_(dim, position, new) and a position of"
    " shape [1]: each other shape needs a graph of its own"
)
"""The fix of a place whose tensor has another shape in each call."""


def reason_of_various(name: str, value: Any, text: str) -> Reason:
    """Return the reason against calls of a place or an argument that has too many values."""
    fix = (
        f"make it a tensor; guards={{{name!r}: False}} would freeze it at the value of the capture"
    )
    if name.endswith("['lr']"):
        fix = (
            "give the optimizer its rate as a tensor, as AdamW(..., lr=torch.tensor(1e-3,"
            " device=...), capturable=True): schedules write to it"
        )
    elif isinstance(value, Form):
        fix = ONE_SIZE
    elif "['betas']" in name or name.endswith("['momentum']"):
        fix = "let the schedule leave it as it is: OneCycleLR(..., cycle_momentum=False)"
    return Reason(Cause.CHANGING_VALUE, text, None, fix)


def broken_by(error: Exception) -> Reason:
    """Return the reason why a capture broke."""
    if isinstance(error, NoGradientError):
        text = "its result required a gradient in the previous call, but requires none now"
        return Reason(Cause.DIFFERS, text, place_of(error))
    if is_pinning(error):
        return Reason(Cause.HELD_HISTORY, PINNED, place_of(error))
    return failed_by(error)


def reason_against(call: Call, device_type: str) -> Reason | None:
    """Return why such calls run eagerly, whatever the function does; None if they need not."""
    for leaf in call.leaves:
        if leaf.kind == "whole" and is_array(leaf.value):
            kind = type(leaf.value).__qualname__
            text = f"an array: {leaf.name} is of {kind}, whose contents are not compared"
            return Reason(Cause.ARRAY, text)
        if leaf.kind == "whole" and isinstance(leaf.value, Iterator):
            text = f"an iterator: {leaf.name} yields different items in each call"
            return Reason(Cause.ITERATOR, text)
        if leaf.kind == "static" and (leaf.value.is_conj() or leaf.value.is_neg()):
            text = f"no memory of its own: {leaf.name} is conjugated or negated when it is read"
            return Reason(Cause.NO_MEMORY, text)
        if leaf.kind not in ("tensor", "static"):
            continue
        if (form := _torch.form_of(leaf.value)) is not None:
            text = f"more than its elements: {leaf.name} is {form}"
            return Reason(Cause.WRAPPED_TENSOR, text)
        if _torch.memory_of(leaf.value) is None:
            return Reason(Cause.NO_MEMORY, f"no memory of its own: {leaf.name}")
        if leaf.kind == "tensor" and leaf.value.device.type != device_type:
            if device_type == "cuda" and not torch.cuda.is_available():
                return Reason(Cause.NO_GPU, f"no GPU: {leaf.name} is on {leaf.value.device}")
            text = f"tensor elsewhere: {leaf.name} is on {leaf.value.device}"
            return Reason(Cause.OTHER_DEVICE, text)
    if call.tensors and not any(one.numel() for one in call.tensors):
        return Reason(Cause.EMPTY, f"no elements: {', '.join(call.names)}")
    return None


def reason_against_devices(devices: Iterable[torch.device], device_type: str) -> Reason | None:
    """Return why calls cannot be captured that work on these devices; None if they can."""
    names = sorted(str(one) for one in devices if one.type == device_type)
    if len(names) < 2:
        return None
    text = f"the function works on several devices: {', '.join(names)}"
    return Reason(Cause.SEVERAL_DEVICES, text)


def reason_against_result(
    result: Any, device_type: str, is_made: Callable[[torch.Tensor], bool]
) -> Reason | None:
    """Return why no replay could return a result; None if one could.

    Args:
        result: The result of a call.
        device_type: The device type of the tensors that replays compute.
        is_made: Tells whether the call made the memory of a tensor.
    """
    leaves = [*tree_iter(result)]
    needs_grad = any(isinstance(one, torch.Tensor) and one.grad_fn is not None for one in leaves)
    for leaf in leaves:
        kind = type(leaf).__qualname__
        if not isinstance(leaf, torch.Tensor):
            # An object from before the call is returned as it is.
            if any(map(is_made, tensors_behind(leaf))):
                text = f"the result has a {kind} with tensors in it, which pytree does not know"
                return Reason(Cause.RESULT_KIND, text)
            if isinstance(leaf, Iterator | set) or is_array(leaf):
                text = f"the result has a {kind}, which its caller could change"
                return Reason(Cause.RESULT_KIND, text)
        elif leaf.layout is not torch.strided or _torch.memory_of(leaf) is None:
            text = f"the result has a tensor of layout {leaf.layout}, which a replay cannot fill"
            return Reason(Cause.RESULT_KIND, text)
        elif leaf.device.type != device_type:
            text = f"the result has a tensor on {leaf.device}, which replays do not compute"
            return Reason(Cause.RESULT_ELSEWHERE, text)
        elif needs_grad and torch.is_grad_enabled() and not is_made(leaf):
            text = "gradients are recorded, and the result has a tensor that was there before"
            return Reason(Cause.RETURNED_TENSOR, text)
    return None


class Containers:
    """The contents of the arguments before a call: items of containers, memory of tensors."""

    def __init__(self, arguments: Any) -> None:
        self._items: dict[int, tuple[Any, list[tuple[Any, Any]]]] = {}
        self._memory: dict[int, tuple[torch.Tensor, tuple[Any, ...]]] = {}
        waiting: list[Any] = [arguments]
        while waiting:
            one = waiting.pop()
            if isinstance(one, torch.Tensor):
                self._memory[id(one)] = one, _torch.place_of(one)
            elif id(one) not in self._items and (
                isinstance(one, _CONTAINERS) or _torch.is_record(one)
            ):
                self._items[id(one)] = one, _items(one)
                waiting += [value for _, value in _items(one)]

    def changed(self, assigned: Collection[int]) -> str | None:
        """Return the container or tensor property that has changed, as text; None if none has.

        Args:
            assigned: The ``id`` of each container to whose parts replays assign.
        """
        for tensor, place in self._memory.values():
            if _torch.place_of(tensor) != place:
                return "the shape or the memory of a tensor"
        for one, items in self._items.values():
            now, may_change = _items(one), id(one) in assigned
            is_same = len(now) == len(items) or (may_change and len(now) > len(items))
            # Where replays assign, items may be new, and values others.
            for (key, value), (old, before) in zip(now, items, strict=False):
                is_same &= key is old and (may_change or value is before)
            if not is_same:
                return f"a {type(one).__name__}"
        return None


_CONTAINERS = (dict, list, tuple, set, collections.deque)


def _items(one: Any) -> list[tuple[Any, Any]]:
    if isinstance(one, list | tuple | set | collections.deque):
        return [(None, value) for value in one]
    return [*(one if isinstance(one, dict) else vars(one)).items()]
