"""Operators on tensors without contents."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from cgraph._torch.private_names import (
    DataDependentOutput,
    DynamicOutputShape,
    FakeTensor,
    FakeTensorMode,
)

__all__ = [
    "CpuFakeMode",
    "DataDependentOutput",
    "DynamicOutputShape",
    "as_computed",
    "is_imagined",
    "load_fake_mode",
]

_NORMS = {
    *("native_layer_norm", "native_group_norm", "native_batch_norm"),
    *("_native_batch_norm_legit", "_native_batch_norm_legit_no_training"),
}
_HALVES = {torch.bfloat16, torch.float16}


def load_fake_mode() -> None:
    """Import what a first fake mode does, for seconds; a capture says what is missing."""
    with suppress(ImportError):
        CpuFakeMode()


class CpuFakeMode(FakeTensorMode):
    """A fake mode for the CPU alone.

    Without a GPU, torch's own fake mode replaces the guard of CUDA devices in each thread that
    enters it. The replacement is gone with the thread, and torch crashes later.
    """

    @property
    def avoid_device_init(self) -> bool:
        """True if the mode imagines CUDA devices as well."""
        return False


def as_computed(func: Any, args: Any, imagined: Any) -> Any:
    """Return an operator's results without contents, in the types of the CPU's kernels.

    Norms of 16 bits with weights or statistics of 32 return statistics of 32, which torch's fake
    tensors do not.
    """
    name = getattr(func, "_opname", "")
    if name not in _NORMS or not isinstance(imagined, tuple) or args[0].dtype not in _HALVES:
        return imagined
    others = (one for one in args[1:] if isinstance(one, torch.Tensor))
    if all(one.dtype != torch.float32 for one in others):
        return imagined
    return imagined[0], *(one.float() for one in imagined[1:])


def is_imagined(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has no contents: if it is fake, or on the device ``meta``."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)
