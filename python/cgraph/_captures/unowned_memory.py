"""Memory of pools that its tensors do not own, so that captures to come use it, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cgraph import _torch
from cgraph._driver import Driver, Handle

__all__ = ["unowned_in"]


def unowned_in(driver: Driver, pool: Handle, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors over the memory of others in a pool, which keep the pool and no block of it.

    Args:
        driver: The driver of the pool.
        pool: The token of the pool, as its captures have it, which keeps the pool alive.
        tensors: The tensors, each as ``_torch.can_be_unowned`` has found it.
    """
    mem_pool = driver.mem_pool(pool)
    core: Any = None if mem_pool is None else mem_pool._core
    return _torch.unowned(tensors, pool, core)
