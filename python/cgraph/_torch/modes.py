"""What calls of graphed functions ask torch: modes, signatures, and who waits for whom."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from cgraph import _core
from cgraph._torch.native import tensor_reader

__all__ = [
    "autocast_state",
    "is_any_autocast_enabled",
    "mode_functions",
    "random_devices",
    "signature",
    "wait_between",
    "without_autocast",
    "without_autocast_cache",
    "without_gradients",
]


def is_any_autocast_enabled() -> bool:
    """Whether autocast is on for a kind of device that is captured."""
    return torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")


def autocast_state() -> tuple[Any, ...]:
    """What autocast does on each kind of device that is captured."""
    return tuple(
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cuda", "cpu")
    )


@contextmanager
def without_autocast_cache() -> Iterator[None]:
    """Let autocast keep no copies of weights, which would lie in the graph's memory or be gone.

    An autocast that begins inside lets go of its copies where it ends. Where none is on, all stays
    as it is: what torch has compiled is compiled anew for another setting.
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
    """Let operators of these kinds of device get what they are given, in its own dtype."""
    cache = torch.is_autocast_cache_enabled()
    with ExitStack() as stack:
        for kind in filter(torch.is_autocast_enabled, kinds):
            stack.enter_context(torch.autocast(kind, enabled=False, cache_enabled=cache))
        yield


def without_gradients() -> AbstractContextManager[None]:
    """A context that records no gradients and makes tensors that count who writes them.

    Those of inference mode do not.
    """
    return _outside_inference() if torch.is_inference_mode_enabled() else torch.no_grad()


@contextmanager
def _outside_inference() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


def mode_functions() -> tuple[Any, Any, Any]:
    """What tell gradient mode, inference mode and whether any autocast is on."""
    return torch.is_grad_enabled, torch.is_inference_mode_enabled, is_any_autocast_enabled


def random_devices() -> list[int]:
    """The CUDA devices whose random state a run may move."""
    return [torch.cuda.current_device()] if torch.cuda.is_initialized() else []


def signature(tensor: torch.Tensor) -> _core.Signature:
    """What a tensor in its place has to be like."""
    return _core.Signature(tensor_reader(), tensor)


def wait_between(last: int, now: int) -> None:
    """Let a stream wait for what another one has now; both by their raw handles."""
    stream: Any = torch.cuda.ExternalStream
    stream(now).wait_stream(stream(last))
