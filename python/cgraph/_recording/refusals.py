"""Calls that are better not captured."""

from __future__ import annotations

import types
import warnings
from collections import deque
from collections.abc import Callable, Iterator, MappingView, Sequence
from typing import Any

import torch

from cgraph import _driver, _torch
from cgraph._recording.calls import Call
from cgraph._recording.recorded import Recorded
from cgraph._source import levels_to_user
from cgraph._state.constants import is_array
from cgraph._state.hidden import hides_tensors
from cgraph._state.reach import Surroundings
from cgraph.errors import CaptureError

__all__ = [
    "OF_BUSY",
    "OF_EMPTY",
    "OF_OPEN",
    "OF_SAVING",
    "OF_SHARING",
    "OF_WAITING",
    "ResultError",
    "is_of_old_torch",
    "is_saved_elsewhere",
    "reason_against",
    "require_known_classes",
    "require_no_gradient",
    "require_none_recorded",
    "warn_of_call",
]


OF_BUSY = "another thread captures into the pool"
"""Why a call is not captured for now."""
OF_EMPTY = "no elements in any tensor"
"""Why a call is not captured that has nothing to compute."""
OF_OPEN = (
    "each graph of its key waits for the backward pass of an earlier call: give max_open= a larger"
    " number, or call under torch.no_grad() where no backward pass follows; before freeze(), make"
    " as many calls at a time as there will be"
)
"""Why a call has no graph whose key has some."""
OF_SAVING = (
    "hooks see what autograd saves, as in activation checkpointing: call .capture() before, outside"
    " of it"
)
"""Why a call is not captured where :func:`is_saved_elsewhere`."""
OF_SHARING = (
    "an argument that the function writes shares memory with another one, or with itself, or with"
    " what the function finds elsewhere: give it memory of its own"
)
"""Why a call is no replay whose graph would write to copies."""
OF_WAITING = "until its next call"
"""What the reason of a key begins with whose next call is captured, if it makes nothing new."""


def reason_against(call: Call, function: Callable[..., Any]) -> str | None:
    """Why a call of a function is better not captured."""
    device_type = _driver.current().device_type
    for leaf in (one for one in call.leaves if one.kind == "constant"):
        if isinstance(leaf.value, Iterator):
            return f"an iterator, which the first call uses up: {leaf.name}"
        if hides_tensors(leaf.value):
            kind = type(leaf.value).__qualname__
            if leaf is call.leaves[0] and _is_method_of(function, type(leaf.value)):
                return (
                    f"below another decorator, which hands it the object: {leaf.name} is a {kind}"
                )
            return f"tensors inside a {kind}, which pytree does not know: {leaf.name}"
    tensors = [leaf for leaf in call.leaves if leaf.kind != "constant"]
    devices = set()
    for leaf in tensors:
        device, form = leaf.value.device, _torch.form_of(leaf.value)
        if device.type == device_type and _torch.memory_of(leaf.value) is None:
            kind = form or type(leaf.value).__name__
            return f"no memory of its own: {leaf.name} is {kind}"
        if form is not None:
            return f"more than its elements: {leaf.name} is {form}"
        if leaf.is_lazy:
            return (
                f"a static argument whose memory holds the conjugate or the negative: {leaf.name}:"
                " give what resolve_conj() or resolve_neg() returns"
            )
        names = [name for name in vars(leaf.value) if not name.startswith("_")]
        if leaf.kind == "tensor" and names:
            return f"attributes of a tensor, which a copy has not: {leaf.name}.{names[0]}"
        if device.type != device_type:
            kind = "CPU tensor" if device.type == "cpu" else "tensor elsewhere"
            return f"{kind}: {leaf.name} is on {device}, not on {device_type}"
        devices.add(device)
    if len(devices) > 1:
        return f"tensors on several devices: {', '.join(sorted(map(str, devices)))}"
    if tensors and all(leaf.value.numel() == 0 for leaf in tensors):
        return OF_EMPTY
    return None


def _is_method_of(function: Callable[..., Any], kind: type) -> bool:
    """Whether a function is a method of objects of a class, by its name and where it is."""
    if isinstance(function, types.MethodType):  # it has its object
        return False
    title = getattr(function, "__qualname__", "")
    name = title.rpartition(".")[2]
    owner = next((one for one in kind.__mro__ if title == f"{one.__qualname__}.{name}"), None)
    return owner is not None and not isinstance(vars(owner).get(name), staticmethod | None)


class ResultError(CaptureError):
    """The function returns what no replay could return."""


def require_known_classes(outputs: Sequence[Any]) -> None:
    """Refuse a result with what would be the same object in each call, and may change.

    Also one with an object that has tensors and is no container that pytree knows, such as a
    function that closes over some.

    Raises:
        ResultError: It has.
    """
    for leaf in (one for one in outputs if isinstance(one, torch.Tensor)):
        attributes = [one for one in vars(leaf) if not one.startswith("_")]
        if attributes and not isinstance(leaf, torch.nn.Parameter):
            raise ResultError(
                f"the result has a tensor with an attribute, {attributes[0]}, and what replays"
                " return has none: return it beside the tensor"
            )
    for leaf in (one for one in outputs if not isinstance(one, torch.Tensor)):
        kind = type(leaf).__qualname__
        if hides_tensors(leaf):
            raise ResultError(
                f"the result has a {kind}, whose tensors cannot be told apart from it: return"
                " tuples, lists, dictionaries or classes that pytree knows"
            )
        if isinstance(leaf, _CHANGING) or is_array(leaf):
            raise ResultError(
                f"the result has a {kind}, and replays would return that of the capture again:"
                " return tensors, numbers, strings and tuples of them"
            )


def require_no_gradient(recorded: Recorded) -> None:
    """Refuse a graph without a backward pass whose result requires a gradient; it is let go.

    Raises:
        CaptureError: It does.
    """
    tensors = [one for one in recorded.outputs if isinstance(one, torch.Tensor)]
    if any(one.requires_grad for one in tensors):
        recorded.reset()
        raise CaptureError(
            "the result requires a gradient of something that is no argument and in no module that"
            " the function names: pass the module, or call under torch.no_grad()"
        )


def require_none_recorded(recorded: Recorded) -> None:
    """Refuse a graph whose result has a history although the call records none; it is let go.

    Results that require gradients without one, such as parameters, are what they are.

    Raises:
        CaptureError: It has.
    """
    tensors = [one for one in recorded.outputs if isinstance(one, torch.Tensor)]
    if any(one.grad_fn is not None for one in tensors):
        recorded.reset()
        raise CaptureError(
            "the result requires a gradient, as the function records some where its caller records"
            " none: call it with gradients, or return tensors that require none"
        )


def is_saved_elsewhere(call: Call, surroundings: Surroundings) -> bool:
    """Whether somebody sees what autograd saves in a call, and so would see its warm-up."""
    needs_grad = call.mode.grad and (call.needs_grad or surroundings.needs_grad)
    return needs_grad and _torch.has_saved_tensors_hooks()


def warn_of_call(name: str, reason: str) -> None:
    """Say that a call of a function runs eagerly, which others of its key need not."""
    warnings.warn(f"{name} runs eagerly in this call: {reason}", stacklevel=levels_to_user())


def is_of_old_torch(error: Exception) -> bool:
    """Whether torch 2.8 has refused an operator of higher order only because a mode looks on.

    One that was made after the mode was entered, as by a first import of torch's compiler.
    """
    return isinstance(error, NotImplementedError) and "no rule registered for HOP" in str(error)


# Lists and dictionaries are of classes that pytree does not know, or they would not come whole.
_CHANGING = (list, dict, deque, set, bytearray, Iterator, MappingView)
