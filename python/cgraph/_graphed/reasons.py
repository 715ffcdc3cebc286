"""The reasons why calls run eagerly, as text."""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch

from cgraph import _torch
from cgraph._autograd.pinned import PINNED, is_pinning
from cgraph._breaks.flows import WAY_BACK
from cgraph._explanation.findings import KINDS, fix_of
from cgraph._graphed.call import Call
from cgraph._graphed.function_module import NoGradientError
from cgraph._operators.observer import Refusal
from cgraph._python.values import is_array, tensors_behind
from cgraph._text import first_line
from cgraph._torch import tree_iter

__all__ = [
    "Containers",
    "broken_by",
    "fix_for",
    "fix_for_various",
    "reason_against",
    "reason_against_devices",
    "reason_against_result",
    "refused_in_words",
]


_FIXES = {
    "an array": "pass a tensor, or exclude it from the guards: guards={name: False}",
    "an iterator": "pass a list or a tuple",
    "no memory of its own": "pass its component tensors, or a dense copy",
    "more than its elements": "pass its component tensors, or a dense copy",
    "no GPU": "to work without a GPU, choose the simulator by name: CGRAPH_DRIVER=sim, or"
    " cgraph.sim.use()",
    "tensor elsewhere": "move the tensor to the device before the call",
    "no elements": "nothing: there is no work to save",
    "no rows": "nothing: there is no work to save",
    "larger than all sizes": "add a size that is large enough to sizes=; if these are not"
    " rows, name the arguments that have rows: dim={name: 0}",
    "padding is not compared": "declare padding harmless: check_padding=False",
    "padding shows": "let padding rows write nothing that others read, choose a harmless pad=,"
    " sizes= without gaps, or check_padding=False if padding rows do not matter",
    PINNED: "keep it detached, or let it go: then the next call is captured",
    "the function changes an argument": "return the new values instead",
    "DistributedDataParallel": "give warmup=11",
    "a profiler": "nothing: its calls are captured once the profiler has stopped",
    "checkpoint": "leave the function eager, or capture it without dropout or without checkpoints",
    "the break": "let the break return a clone, or write to it before it returns",
    "the result has a tensor on": "return a tensor on the device, and copy it after the call",
    "the result requires a gradient": WAY_BACK,
    "the result has": "return strided tensors, and tuples, lists or dictionaries of them",
    "is written while": "return the new value instead",
    "gradients are recorded": "return a clone of it, or leave it out",
    "the function works on several devices": "graph what runs on each of them by itself",
    "the function changes": "make it a tensor that is written in place, or change it outside of the"
    " call; side_effects= lets replays skip a change that nothing reads",
    "the function leaves": "write to an existing tensor, with copy_(), or return the new one",
    "somebody keeps": "write to an existing tensor, with copy_(), or return the new one",
}
# The fix if two calls differ in their operators or numbers.
_OF_PYTHON = (
    "Python computes something else in each call: pass it as a tensor, keep it in a tensor that is"
    " written in place, or mark that work with @cgraph.eager_break"
)


def fix_for(reason: str | None) -> str | None:
    """Return the fix for a reason, by its first words, or for the kind of a refusal."""
    if reason is None:
        return None
    if reason in KINDS:
        return f"{KINDS[reason].fix}; or mark the work with @cgraph.eager_break"
    return next((fix for words, fix in _FIXES.items() if reason.startswith(words)), _OF_PYTHON)


def fix_for_various(name: str) -> str:
    """Return the fix for a place or an argument that has too many values."""
    if name.endswith("['lr']"):
        return (
            "give the optimizer its rate as a tensor, as AdamW(..., lr=torch.tensor(1e-3,"
            " device=...), capturable=True): schedules write to it"
        )
    if "['betas']" in name or name.endswith("['momentum']"):
        return "let the schedule leave it as it is: OneCycleLR(..., cycle_momentum=False)"
    return (
        f"make it a tensor; guards={{{name!r}: False}} would freeze it at the value of the capture"
    )


def refused_in_words(refusal: Refusal) -> str:
    """Return the reason why a capture refuses an operator, as text."""
    return f"{refusal.operator} cannot be captured, as it {KINDS[refusal.kind].what}"


def broken_by(cause: Exception) -> tuple[str, str | None]:
    """Return the reason why a capture broke, and the fix if one is known."""
    if isinstance(cause, NoGradientError):
        return "its result required a gradient in the previous call, but requires none now", None
    if is_pinning(cause):
        return PINNED, fix_for(PINNED)
    return first_line(cause), fix_of(cause)


def reason_against(call: Call, device_type: str) -> str | None:
    """Return why such calls run eagerly, whatever the function does; None if they need not."""
    for leaf in call.leaves:
        if leaf.kind == "whole" and is_array(leaf.value):
            kind = type(leaf.value).__qualname__
            return f"an array: {leaf.name} is of {kind}, whose contents are not compared"
        if leaf.kind == "whole" and isinstance(leaf.value, Iterator):
            return f"an iterator: {leaf.name} yields different items in each call"
        if leaf.kind == "static" and (leaf.value.is_conj() or leaf.value.is_neg()):
            return f"no memory of its own: {leaf.name} is conjugated or negated when it is read"
        if leaf.kind not in ("tensor", "static"):
            continue
        if (form := _torch.form_of(leaf.value)) is not None:
            return f"more than its elements: {leaf.name} is {form}"
        if _torch.memory_of(leaf.value) is None:
            return f"no memory of its own: {leaf.name}"
        if leaf.kind == "tensor" and leaf.value.device.type != device_type:
            if device_type == "cuda" and not torch.cuda.is_available():
                return f"no GPU: {leaf.name} is on {leaf.value.device}"
            return f"tensor elsewhere: {leaf.name} is on {leaf.value.device}"
    if call.tensors and not any(one.numel() for one in call.tensors):
        return f"no elements: {', '.join(call.names)}"
    return None


def reason_against_devices(devices: Iterable[torch.device], device_type: str) -> str | None:
    """Return why calls cannot be captured that work on these devices; None if they can."""
    names = sorted(str(one) for one in devices if one.type == device_type)
    return f"the function works on several devices: {', '.join(names)}" if names[1:] else None


def reason_against_result(
    result: Any, device_type: str, is_made: Callable[[torch.Tensor], bool]
) -> str | None:
    """Return why no replay could return a result; None if one could.

    Args:
        result: The result of a call.
        device_type: The device type of the tensors that replays compute.
        is_made: Tells whether the call made the memory of a tensor.
    """
    leaves = [*tree_iter(result)]
    needs_grad = any(isinstance(one, torch.Tensor) and one.grad_fn is not None for one in leaves)
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            # An object from before the call is returned as it is.
            if any(map(is_made, tensors_behind(leaf))):
                kind = type(leaf).__qualname__
                return f"the result has a {kind} with tensors in it, which pytree does not know"
            if isinstance(leaf, Iterator | set) or is_array(leaf):
                return f"the result has a {type(leaf).__qualname__}, which its caller could change"
        elif leaf.layout is not torch.strided or _torch.memory_of(leaf) is None:
            return f"the result has a tensor of layout {leaf.layout}, which a replay cannot fill"
        elif leaf.device.type != device_type:
            return f"the result has a tensor on {leaf.device}, which replays do not compute"
        elif needs_grad and torch.is_grad_enabled() and not is_made(leaf):
            return "gradients are recorded, and the result has a tensor that was there before"
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
