"""Modules of torch, as graphed functions see them: their tensors and their hooks."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

__all__ = [
    "OF_ITSELF",
    "call_forward",
    "caller_of_forwards",
    "follow_modules",
    "global_hooks",
    "hooks_aside",
    "hooks_of",
    "hooks_of_leaf",
    "hooks_of_users",
    "knows_its_weights",
    "note_weights",
    "operator_of",
    "steps_noted",
]

HooksOf = tuple[dict[str, Any], str]
"""A dictionary, and the name of its item that is a dictionary of hooks."""

ForwardHook = Callable[..., None]
"""A callback for a module, its arguments and, after its forward, the result."""

HOOKS_OF_LEAVES = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""The attributes of tensors that :func:`hooks_of_leaf` looks at."""

OF_ITSELF = frozenset(
    {
        *("apply", "bfloat16", "cpu", "cuda", "double", "eval", "float", "half", "requires_grad_"),
        *("share_memory", "to", "to_empty", "train", "type"),
    }
)
"""The names of methods of modules that return the module."""

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_GLOBAL_HOOKS = tuple(f"_global{name}" for name in _HOOKS)
# cgraph's own hooks of all modules, before and after a forward.
_forward_hooks_of_cgraph: list[tuple[ForwardHook, ForwardHook]] = []


def knows_its_weights(module: torch.nn.Module) -> bool:
    """Return whether a module is torch's own; these may keep tensors made of their parameters.

    Recurrent ones keep lists of them, and a norm of weights keeps its result.
    """
    return isinstance(module, torch.nn.RNNBase) or type(module).__module__.startswith("torch.nn.")


def note_weights(module: torch.nn.Module) -> None:
    """Let a recurrent module take its present parameters for those of its last call.

    Otherwise it copies them to other memory, where a replay finds their values at the capture.
    """
    if not isinstance(module, torch.nn.RNNBase):
        return
    weights = [getattr(module, name, None) for name in module._flat_weights_names]
    notes = vars(module)
    notes["_flat_weights"] = weights
    if "_flat_weight_refs" in notes:
        references = [None if one is None else weakref.ref(one) for one in weights]
        notes["_flat_weight_refs"] = references


def hooks_of(module: torch.nn.Module | None) -> list[HooksOf]:
    """Return the places of the hooks around a module's passes, or around those of all modules."""
    owner, names = (vars(torch_module), _GLOBAL_HOOKS) if module is None else (vars(module), _HOOKS)
    return [(owner, name) for name in names if isinstance(owner.get(name), dict)]


def hooks_of_leaf(leaf: torch.Tensor) -> list[tuple[torch.Tensor, str, Any]]:
    """Return where a leaf has the hooks of its gradient, and the dictionary with them or None."""
    return [(leaf, name, getattr(leaf, name)) for name in HOOKS_OF_LEAVES]


@contextmanager
def hooks_aside(leaves: Iterable[torch.Tensor]) -> Iterator[None]:
    """Keep ``autograd.grad`` from running hooks of these leaves, on any thread."""
    hooked = [(one, one._backward_hooks) for one in leaves if one._backward_hooks]
    try:
        for one, _ in hooked:
            one._backward_hooks = None
        yield
    finally:
        for one, hooks in hooked:
            one._backward_hooks = hooks


def hooks_of_users(hooks: HooksOf) -> dict[int, Any]:
    """Return the hooks that are not cgraph's own, by their numbers."""
    owner, name = hooks
    if not owner.get(name):
        return {}
    # Other threads may follow modules meanwhile.
    found = owner.get(name, {}).copy()
    own = [one for pair in _forward_hooks_of_cgraph for one in pair]
    return {number: one for number, one in found.items() if all(one is not two for two in own)}


def follow_modules(enter: ForwardHook, leave: ForwardHook) -> Callable[[], None]:
    """Call functions before and after each module's forward; return a function to stop that."""
    _forward_hooks_of_cgraph.append((enter, leave))
    hooks = [
        torch_module.register_module_forward_pre_hook(enter),
        torch_module.register_module_forward_hook(leave, always_call=True),
    ]

    def stop() -> None:
        for hook in hooks:
            hook.remove()
        _forward_hooks_of_cgraph[:] = [
            pair for pair in _forward_hooks_of_cgraph if pair[0] is not enter
        ]

    return stop


def caller_of_forwards() -> types.FunctionType:
    """Return the function of all modules that calls a forward, and the hooks around it."""
    found: Any = torch.nn.Module._call_impl
    return found  # type: ignore[no-any-return]


def operator_of(value: object) -> tuple[str, Any] | None:
    """Return the name of an operator and the function behind a custom one; None if it is none."""
    kind = type(value).__module__
    if kind.startswith("torch._ops"):
        return str(value), None
    if kind == "torch._library.custom_ops":
        return str(getattr(value, "_qualname", "")), getattr(value, "_init_fn", None)
    return None


def global_hooks() -> list[Any]:
    """Return the hooks around the forward of all modules."""
    names = "_global_forward_pre_hooks", "_global_forward_hooks"
    return [one for name in names for one in getattr(torch_module, name, {}).values()]


@contextmanager
def steps_noted(note: Callable[..., None]) -> Iterator[None]:
    """Call ``note`` with each optimizer that begins a step inside the block, on any thread.

    It is one of torch's hooks for all steps, but not counted: after each count torch searches
    hundreds of dictionaries for other hooks of modules.
    """
    hooks = getattr(torch_optimizer, "_global_optimizer_pre_hooks", None)
    if not isinstance(hooks, dict):
        handle = torch_optimizer.register_optimizer_step_pre_hook(note)
        try:
            yield
        finally:
            handle.remove()
        return
    # torch's own keys are numbers.
    own = object()
    hooks[own] = note
    try:
        yield
    finally:
        hooks.pop(own, None)


def call_forward(module: torch.nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call the forward of a module; only those that follow modules see it begin and end."""
    pairs = list(_forward_hooks_of_cgraph)
    for enter, _ in pairs:
        enter(module, args)
    try:
        return module.forward(*args, **kwargs)
    finally:
        for _, leave in pairs:
            leave(module, args, None)
