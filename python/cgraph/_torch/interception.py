"""Checks for transforms, modes and tracers, which must see each operator of a call."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch.fx import _symbolic_trace

from cgraph._torch.private_names import of_overrides, of_torch
from cgraph.errors import TorchError

__all__ = ["interception_keys", "is_intercepted", "is_traced_by_fx", "is_transformed"]

is_transformed: Callable[[], bool] = of_torch.function("_are_functorch_transforms_active")
# torch 2.8 has only the latter, which warns on newer torch.
_is_fx_tracing: Any = getattr(_symbolic_trace, "is_fx_symbolic_tracing", None) or (
    _symbolic_trace.is_fx_tracing
)


def is_intercepted() -> bool:
    """Return whether a transform, a mode or ``torch.jit.trace`` must see this thread's operators.

    The mode of a default device does not count: it only sees functions that make tensors.
    """
    return (
        is_transformed()
        # The user's modes and torch's own, such as those of `torch.export` and of fake tensors.
        or of_torch._len_torch_dispatch_stack() > 0
        or of_torch._get_tracing_state() is not None
        or not all(map(_is_default_device, of_overrides._get_current_function_mode_stack()))
    )


def is_traced_by_fx() -> bool:
    """Return whether ``torch.fx`` traces, whose values are not tensors."""
    return bool(_is_fx_tracing())


@functools.cache
def interception_keys() -> list[int]:
    """Return the numbers of the dispatch keys; an intercepted thread includes one of them.

    Modes of functions have no dispatch key.
    """
    names = ("FuncTorchDynamicLayerFrontMode", "FuncTorchDynamicLayerBackMode", "Python", "Tracer")
    try:
        return [int(of_torch._dispatch_key_parse(name)) for name in names]
    except (RuntimeError, TorchError):  # one has another name, or torch cannot tell
        return []


def _is_default_device(mode: object) -> bool:
    """Return whether ``torch.set_default_device`` or ``with device`` made a mode of functions."""
    # A module that is not imported has made no mode.
    module = sys.modules.get("torch.utils._device")
    return module is not None and type(mode) is module.DeviceContext
