"""Kernels that a function launches by hand with Triton, which are not operators of torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import CodeType, FrameType
from typing import Any

import torch

from cgraph import _torch

__all__ = ["Launch", "Suspects", "is_launcher", "launch_of"]

_LAUNCHER = os.path.join("triton", "runtime", "jit.py")


Launch = tuple[str, tuple[Any, ...], dict[str, Any]]
"""The name of a kernel that is about to be launched, and its arguments."""


def is_launcher(code: CodeType) -> bool:
    """Return whether code is Triton's launcher."""
    return code.co_name == "run" and code.co_filename.endswith(_LAUNCHER)


def launch_of(frame: FrameType) -> Launch | None:
    """Return the launch of the launcher that begins in a frame; None if it only compiles."""
    found = frame.f_locals
    if found.get("warmup") or not isinstance(found.get("args"), tuple):
        return None
    name = getattr(found.get("self"), "__name__", "kernel")
    return f"the Triton kernel {name}", found["args"], dict(found.get("kwargs") or {})


class Suspects:
    """Inputs that kernels may have written without saying so.

    Args:
        inputs: The inputs of the call.
        written: The places of the inputs that the previous call has written, for a call whose
            kernels do not run when they are launched; None for a call whose kernels do.
    """

    def __init__(self, inputs: Sequence[torch.Tensor], written: frozenset[int] | None) -> None:
        self._inputs = inputs
        self._written = written
        self._before: dict[int, torch.Tensor | None] = {}

    def add(self, place: int) -> None:
        """Note that a kernel is about to get the memory of an input."""
        if place in self._before:
            return
        before = None
        if self._written is None:
            with torch.no_grad(), _torch.without_modes():
                before = _torch.bytes_of(self._inputs[place]).clone()
        self._before[place] = before

    def has_written(self, place: int) -> bool:
        """Return whether one of the kernels wrote to an input."""
        if place not in self._before:
            return False
        before = self._before[place]
        if before is None:
            return self._written is not None and place in self._written
        with torch.no_grad(), _torch.without_modes():
            return not torch.equal(_torch.bytes_of(self._inputs[place]), before)
