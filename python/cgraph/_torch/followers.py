"""Whether somebody has to see each operator of a call: transforms, modes, tracers."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.fx import _symbolic_trace
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

__all__ = ["follower_keys", "is_followed", "is_traced_by_fx", "is_transformed"]

is_transformed = torch._C._are_functorch_transforms_active
# Of the user's and of torch's own, such as those of `torch.export` and of fake tensors.
_dispatch_modes = torch._C._len_torch_dispatch_stack
_tracing_state = torch._C._get_tracing_state
# On newer torch the other one warns.
_is_fx_tracing: Any = getattr(
    _symbolic_trace, "is_fx_symbolic_tracing", _symbolic_trace.is_fx_tracing
)


def is_followed() -> bool:
    """Whether a transform, a mode or ``torch.jit.trace`` has to see the operators of this thread.

    A default device is a mode as well, which only sees what makes tensors.
    """
    return (
        is_transformed()
        or _dispatch_modes() > 0
        or _tracing_state() is not None
        or any(type(one) is not DeviceContext for one in _get_current_function_mode_stack())
    )


def is_traced_by_fx() -> bool:
    """Whether ``torch.fx`` traces, whose values are no tensors."""
    return bool(_is_fx_tracing())


@functools.cache
def follower_keys() -> list[int]:
    """The numbers of the dispatch keys of which one is included in a thread that is followed.

    But for modes of functions, which have none.
    """
    names = ("FuncTorchDynamicLayerFrontMode", "FuncTorchDynamicLayerBackMode", "Python", "Tracer")
    parse: Any = torch._C._dispatch_key_parse
    try:
        return [int(parse(name)) for name in names]
    except RuntimeError:  # one is called otherwise
        return []
