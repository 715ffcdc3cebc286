"""Collectives of torch.distributed, whose results others wait for."""

from __future__ import annotations

import sys
from typing import Any

import torch

__all__ = ["wait_for_collectives"]


def wait_for_collectives(value: Any) -> None:
    """Let the current stream wait for collectives that write to tensors of a sequence.

    Who asks for one of these outside of the capture that it is in would wait for an event of the
    capture.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return
    for one in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(one, torch.Tensor):
            torch.ops._c10d_functional.wait_tensor(one)
