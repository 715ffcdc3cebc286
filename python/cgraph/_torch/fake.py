"""Operators on tensors without contents."""

from __future__ import annotations

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

__all__ = ["CpuFakeMode", "DataDependentOutputException", "DynamicOutputShapeException"]


class CpuFakeMode(FakeTensorMode):
    """A fake mode for the CPU alone.

    Without a GPU, torch's own replaces the guard of CUDA devices in each thread that enters it, by
    one that is gone with the thread, and crashes later.
    """

    @property
    def avoid_device_init(self) -> bool:
        """Whether CUDA devices are imagined as well."""
        return False
