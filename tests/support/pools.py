"""Captures into pools, for the tests of `MemPool`, the ledger and `dry_run`."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import cgraph

__all__ = ["MIB", "capture", "check", "fail", "handles"]

MIB = 1 << 20


def capture(work: Callable[[], Tensor], pool: Any = None) -> tuple[cgraph.CUDAGraph, Tensor]:
    """Return a graph of some work, whose bytes are measured, and its output."""
    graph = cgraph.CUDAGraph()
    with cgraph.record_memory(blocks=False), cgraph.graph(graph, pool=pool):
        output = work()
    return graph, output


def fail(x: Tensor, pool: Any = None) -> None:
    """Make a capture whose body raises after it has allocated."""
    with pytest.raises(ValueError, match="mine"), cgraph.graph(cgraph.CUDAGraph(), pool=pool):
        x * 2
        raise ValueError("mine")


def handles() -> set[tuple[int, int]]:
    """Return the tokens of the existing pools."""
    gc.collect()
    return {one.handle for one in cgraph.memory().pools}


def check(graph: cgraph.CUDAGraph, x: Tensor, y: Tensor, factor: float = 2) -> None:
    """Compare a replay with fresh numbers and eager."""
    x.normal_()
    graph.replay()
    assert torch.equal(y, x * factor)
