"""What calls of graphed functions ask torch: modes, storages, and who waits for whom."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from cgraph import _core
from cgraph._torch.tensors import tensor_reader

__all__ = [
    "autocast_state",
    "fixed",
    "hooks_of",
    "is_any_autocast_enabled",
    "mode_functions",
    "random_devices",
    "signature",
    "storage_of",
    "wait_between",
    "without_autocast_cache",
]

is_any_autocast_enabled = torch._C._is_any_autocast_enabled


def autocast_state() -> tuple[Any, ...]:
    """What autocast does on each kind of device that is captured."""
    return tuple(
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cuda", "cpu")
    )


@contextmanager
def without_autocast_cache() -> Iterator[None]:
    """Let autocast keep no copies of weights, which would lie in the graph's memory or be gone."""
    enabled = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)
        torch.clear_autocast_cache()


def mode_functions() -> tuple[Any, Any, Any]:
    """What tell gradient mode, inference mode and whether any autocast is on."""
    return torch.is_grad_enabled, torch.is_inference_mode_enabled, is_any_autocast_enabled


def random_devices() -> list[int]:
    """The CUDA devices whose random state a run may move."""
    return [torch.cuda.current_device()] if torch.cuda.is_initialized() else []


def signature(tensor: torch.Tensor) -> _core.Signature:
    """What a tensor in its place has to be like."""
    return _core.Signature(tensor_reader(), tensor)


def fixed(
    holders: Sequence[tuple[Any, str, Any]],
    owners: list[dict[str, Any]],
    tensors: list[torch.Tensor],
    addresses: list[int],
    hooks: list[dict[Any, Any]],
) -> _core.Fixed:
    """Modules, where they were found, the dictionaries that hold their tensors, and their hooks."""
    # torch's count of hooks tells of new ones, and not of those that are taken away.
    always, by_count = [one for one in hooks if one], [one for one in hooks if not one]
    return _core.Fixed(
        holders,
        [*owners, *always],
        (RemovableHandle, by_count),
        tensors,
        addresses,
        tensor_reader(),
        torch._C._tensors_data_ptrs_at_indices_equal,
    )


def hooks_of(module: torch.nn.Module | None) -> list[dict[Any, Any]]:
    """The hooks that run around a module's forward and backward, or around those of all modules."""
    if module is None:
        return [getattr(torch_module, f"_global{name}") for name in _HOOKS]
    return [getattr(module, name) for name in _HOOKS]


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def storage_of(tensor: torch.Tensor) -> _core.Storage:
    """The storage of a tensor. The references that it has now count as ours."""
    # The object that stands for it in Python is a reference, which goes at once.
    address = tensor.untyped_storage()._cdata
    return _core.Storage(address, torch._C._storage_Use_Count)


def wait_between(last: int, now: int) -> None:
    """Let a stream wait for what another one has now; both by their raw handles."""
    stream: Any = torch.cuda.ExternalStream
    stream(now).wait_stream(stream(last))
