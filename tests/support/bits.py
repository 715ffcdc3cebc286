"""Comparisons bit by bit, and blocks that are undone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from cgraph._operators.rollback import Rollback

__all__ = ["same", "undone"]


def same(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors are identical, including NaN and signs of zero."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    pair = [one.detach().contiguous().reshape(-1).view(torch.uint8) for one in (first, second)]
    return torch.equal(*pair)


@contextmanager
def undone(*tensors: Tensor, **options: Any) -> Iterator[None]:
    """Run a block, undo it, and compare tensors with copies made before."""
    before = [tensor.detach().clone() for tensor in tensors]
    rollback = Rollback(**options)
    with rollback:
        yield
    assert any(not same(*pair) for pair in zip(tensors, before, strict=True)) or not tensors
    rollback.undo()
    assert all(same(*pair) for pair in zip(tensors, before, strict=True))
