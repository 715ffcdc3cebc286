"""Whether somebody has to see each operator of a call: transforms, modes, tracers."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch.fx import _symbolic_trace
from torch.overrides import _get_current_function_mode_stack

__all__ = ["interception_keys", "is_intercepted", "is_traced_by_fx", "is_transformed"]

is_transformed = torch._C._are_functorch_transforms_active
# Of the user's and of torch's own, such as those of `torch.export` and of fake tensors.
_dispatch_modes = torch._C._len_torch_dispatch_stack
_tracing_state = torch._C._get_tracing_state
# torch 2.8 has only the latter, which warns on newer torch.
_is_fx_tracing: Any = getattr(_symbolic_trace, "is_fx_symbolic_tracing", None) or (
    _symbolic_trace.is_fx_tracing
)


def is_intercepted() -> bool:
    """Whether a transform, a mode or ``torch.jit.trace`` has to see the operators of this thread.

    A default device is a mode as well, which only sees what makes tensors.
    """
    return (
        is_transformed()
        or _dispatch_modes() > 0
        or _tracing_state() is not None
        or not all(map(_is_default_device, _get_current_function_mode_stack()))
    )


def is_traced_by_fx() -> bool:
    """Whether ``torch.fx`` traces, whose values are no tensors."""
    return bool(_is_fx_tracing())


@functools.cache
def interception_keys() -> list[int]:
    """The numbers of the dispatch keys of which one is included in a thread that is followed.

    But for modes of functions, which have none.
    """
    names = ("FuncTorchDynamicLayerFrontMode", "FuncTorchDynamicLayerBackMode", "Python", "Tracer")
    parse: Any = torch._C._dispatch_key_parse
    try:
        return [int(parse(name)) for name in names]
    except RuntimeError:  # one is called otherwise
        return []


def _is_default_device(mode: object) -> bool:
    """Whether a mode of functions is that of ``torch.set_default_device`` or ``with device``."""
    # What nobody has imported has made no mode.
    module = sys.modules.get("torch.utils._device")
    return module is not None and type(mode) is module.DeviceContext
