"""Garbage that CUDA frees, which the collector finds at a bad time."""

from __future__ import annotations

import gc

import pytest
import torch

import cgraph
from cgraph import _torch
from lab import CudaLab, fresh

pytestmark = pytest.mark.gpu
lab = CudaLab()


@pytest.fixture(autouse=True)
def _cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CGRAPH_DRIVER", "cuda")
    # Captures that other tests have left in cycles may not be collected inside these.
    gc.collect()


def test_a_graph_of_torchs_in_a_cycle_does_not_end_a_capture() -> None:
    x = fresh(lab, 1 << 10)
    theirs = torch.cuda.CUDAGraph()
    with torch.cuda.graph(theirs):
        y = x + 1
    cycle: list[object] = [theirs, y]
    cycle.append(cycle)
    graph = cgraph.CUDAGraph()
    with cgraph.graph(graph):
        del theirs, y, cycle
        # So many objects that a collection is due.
        due = [[] for _ in range(20_000)]  # type: ignore[var-annotated]
        z = x * 3
    del due
    graph.replay()
    assert torch.equal(z, x * 3)


def test_a_pool_in_a_cycle_may_outlive_its_keeper_inside_a_capture() -> None:
    x = fresh(lab, 1 << 10)
    for _ in range(3):
        pool = cgraph.MemPool()
        cycle: list[object] = [pool, _torch.PoolKeeper(pool.id, torch.cuda.Stream())]
        # The collector asks the pool first, and then frees the last of the list.
        cycle.append(cycle)
        del pool, cycle
        graph = cgraph.CUDAGraph()
        with cgraph.graph(graph):
            z = x * 3
            gc.collect()
        graph.replay()
        assert torch.equal(z, x * 3)


def test_a_graph_with_random_numbers_may_die_inside_another_capture() -> None:
    x = fresh(lab, 16, 16)
    for ends in ("by reset", "by its last reference"):
        old, new = cgraph.CUDAGraph(), cgraph.CUDAGraph()
        with cgraph.graph(old):
            y = x @ x + torch.rand(16, 16, device="cuda")
        old.replay()
        held = [old]
        del old
        with cgraph.graph(new, capture_error_mode="thread_local"):
            z = x + 1
            if ends == "by reset":
                held[0].reset()
            held.clear()
            # A library asks for its workspace.
            w = z @ z
        del y
        new.replay()
        torch.testing.assert_close(w, (x + 1) @ (x + 1), rtol=1e-2, atol=1e-1)
