"""What graphed functions ask torch about modules: their tensors and their hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from cgraph import _core
from cgraph._torch.tensors import tensor_reader

__all__ = ["HooksOf", "fixed", "follow_modules", "hooks_of", "hooks_of_users"]

HooksOf = tuple[dict[str, Any], str]
"""A dictionary, and the name of its item that is a dictionary of hooks."""

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# The numbers of cgraph's own hooks of all modules.
_own: set[int] = set()


def fixed(
    holders: Sequence[tuple[Any, str, Any]],
    owners: Sequence[dict[str, Any]],
    hooks: Sequence[tuple[dict[str, Any], str, dict[int, Any]]],
    tensors: list[torch.Tensor],
    addresses: list[int],
) -> _core.Fixed:
    """Modules: where they were found, the dictionaries that hold their tensors, and their hooks."""
    are_equal = torch._C._tensors_data_ptrs_at_indices_equal
    counted = RemovableHandle, hooks
    return _core.Fixed(holders, owners, counted, tensors, addresses, tensor_reader(), are_equal)


def hooks_of(module: torch.nn.Module | None) -> list[HooksOf]:
    """Where the hooks are that run around a module's passes, or around those of all modules."""
    owner, prefix = (vars(torch_module), "_global") if module is None else (vars(module), "")
    names = [f"{prefix}{name}" for name in _HOOKS]
    return [(owner, name) for name in names if isinstance(owner.get(name), dict)]


def hooks_of_users(hooks: HooksOf) -> dict[int, Any]:
    """The hooks that are not cgraph's own, by their numbers."""
    owner, name = hooks
    return {number: hook for number, hook in owner.get(name, {}).items() if number not in _own}


def follow_modules(enter: Callable[..., None], leave: Callable[..., None]) -> Callable[[], None]:
    """Call functions before and after the forward of each module; what is returned stops that."""
    hooks = [
        torch_module.register_module_forward_pre_hook(enter),
        torch_module.register_module_forward_hook(leave, always_call=True),
    ]
    _own.update(hook.id for hook in hooks)

    def stop() -> None:
        for hook in hooks:
            hook.remove()
            _own.discard(hook.id)

    return stop
