"""Torch's modes, tensor signatures and waits of streams, for calls of graphed functions."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from cgraph import _core
from cgraph._torch.native import tensor_reader
from cgraph._torch.private_names import of_torch

__all__ = [
    "autocast_state",
    "in_thread",
    "is_any_autocast_enabled",
    "mode_functions",
    "put_in_thread",
    "random_devices",
    "settings_in_words",
    "signature",
    "wait_between",
    "without_autocast",
    "without_autocast_cache",
    "without_gradients",
]


def in_thread(name: str) -> Any:
    """Return an object of this thread; those that autograd runs for it have the same one."""
    return of_torch._get_obj_in_tls(name) if of_torch._is_key_in_tls(name) else None


def put_in_thread(name: str, value: object) -> None:
    """Give this thread an object, for :func:`in_thread`; it lives as long as the thread."""
    before = sys.getrefcount(value)
    of_torch._stash_obj_in_tls(name, value)
    if sys.getrefcount(value) == before:
        # torch takes the reference of its caller.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def is_any_autocast_enabled() -> bool:
    """Return whether autocast is on for a kind of device that is captured."""
    return torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")


def autocast_state() -> tuple[Any, ...]:
    """Return the autocast settings of each kind of device that is captured."""
    return tuple(
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cuda", "cpu")
    )


def settings_in_words() -> dict[str, str]:
    """Return torch's settings that decide what operators a call runs, by their names.

    Those that all threads have in common, and the modes of this thread.
    """
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    values = {
        "flash_sdp": cuda.flash_sdp_enabled(),
        "mem_efficient_sdp": cuda.mem_efficient_sdp_enabled(),
        "math_sdp": cuda.math_sdp_enabled(),
        "cudnn_sdp": cuda.cudnn_sdp_enabled(),
        "cudnn.enabled": cudnn.enabled,
        "cudnn.benchmark": cudnn.benchmark,
        "cudnn.deterministic": cudnn.deterministic,
        "deterministic_debug_mode": torch.get_deterministic_debug_mode(),
        "default_dtype": torch.get_default_dtype(),
        "float32_precision": _float32_precision(),
        "fp16_reduced_precision": cuda.matmul.allow_fp16_reduced_precision_reduction,
        "bf16_reduced_precision": cuda.matmul.allow_bf16_reduced_precision_reduction,
        "fp16_accumulation": getattr(cuda.matmul, "allow_fp16_accumulation", None),
        "default device": torch.get_default_device(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": autocast_state(),
    }
    return {f"torch's {name}": str(value) for name, value in values.items()}


def _float32_precision() -> object:
    backends: Any = torch.backends
    try:
        return torch.get_float32_matmul_precision(), backends.cudnn.allow_tf32
    except RuntimeError:  # some were set by their new names, to what the old ones cannot say
        found = backends.cuda.matmul.fp32_precision, backends.cudnn.fp32_precision
        return (*found, backends.cudnn.conv.fp32_precision)


@contextmanager
def without_autocast_cache() -> Iterator[None]:
    """Keep autocast from caching weights, whose copies would lie in the graph's memory or be gone.

    An autocast that begins inside drops its copies at its end. If none is on, nothing changes:
    torch compiles its code anew for another setting.
    """
    if not is_any_autocast_enabled():
        yield
        return
    enabled = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)
        torch.clear_autocast_cache()


@contextmanager
def without_autocast(*kinds: str) -> Iterator[None]:
    """Turn autocast off for these kinds of device: operators get tensors in their own dtype."""
    cache = torch.is_autocast_cache_enabled()
    with ExitStack() as stack:
        for kind in filter(torch.is_autocast_enabled, kinds):
            stack.enter_context(torch.autocast(kind, enabled=False, cache_enabled=cache))
        yield


def without_gradients() -> AbstractContextManager[None]:
    """Return a context that records no gradients and makes tensors that count their writes.

    Tensors of inference mode do not count them.
    """
    return _outside_inference() if torch.is_inference_mode_enabled() else torch.no_grad()


@contextmanager
def _outside_inference() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


def mode_functions() -> tuple[Any, Any, Any]:
    """Return the functions that tell gradient mode, inference mode and whether autocast is on."""
    return torch.is_grad_enabled, torch.is_inference_mode_enabled, is_any_autocast_enabled


def random_devices() -> list[int]:
    """Return the CUDA devices whose random state a run may move."""
    return [torch.cuda.current_device()] if torch.cuda.is_initialized() else []


def signature(tensor: torch.Tensor) -> _core.Signature:
    """Return the requirements on a tensor in this one's place."""
    return _core.Signature(tensor_reader(), tensor)


def wait_between(last: int, now: int) -> None:
    """Let a stream wait for the present work of another; both are raw handles."""
    stream: Any = torch.cuda.ExternalStream
    stream(now).wait_stream(stream(last))
