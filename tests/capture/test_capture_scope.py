"""`capture_scope`: one preparation for many captures, and a pool that closes."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import cgraph
from cgraph import _driver, capture_scope
from cgraph.errors import CaptureError, StateError
from lab import Lab, captured, fresh


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Count collections and emptied caches."""
    found = {"collections": 0, "emptied": 0}
    collect, driver = gc.collect, type(_driver.current())
    empty = driver.empty_cache

    def collecting(*args: int) -> int:
        found["collections"] += 1
        return collect(*args)

    def emptying(self: Any) -> None:
        found["emptied"] += 1
        empty(self)

    with monkeypatch.context() as patched:
        patched.setattr(gc, "collect", collecting)
        patched.setattr(driver, "empty_cache", emptying)
        yield found


def into(pool: Any, x: Tensor) -> tuple[cgraph.CUDAGraph, Tensor]:
    """Capture a product into a pool."""
    graph = cgraph.CUDAGraph()
    with cgraph.graph(graph, pool=pool):
        y = x * 3
    return graph, y


def test_many_captures_prepare_once_and_are_right(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_CUDAGRAPH_GC", "1")
    x = fresh(lab, 8)
    with counted(monkeypatch) as found, capture_scope() as pool:
        graphs = [into(pool, x) for _ in range(3)]
        segments, z = cgraph.SegmentedGraph.capture(lambda: x * 5, pool=pool)
    assert found == {"collections": 1, "emptied": 1}
    assert len({graph.pool() for graph, _ in graphs} | {segments.pool()}) == 1
    x.normal_()
    for graph, y in graphs:
        graph.replay()
        assert torch.equal(y, x * 3)
    segments.replay()
    assert torch.equal(z, x * 5)
    with counted(monkeypatch) as found:
        captured(lab, x)
    assert found["emptied"] == 1


def test_no_collection_starts_by_itself_inside(lab: Lab) -> None:
    assert gc.isenabled()
    with capture_scope():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_frozen_pool_takes_no_capture_and_others_do(lab: Lab) -> None:
    x = fresh(lab, 8)
    with capture_scope(freeze=True) as pool:
        graph, y = into(pool, x)
    for late in (lambda: into(pool, x), lambda: cgraph.SegmentedGraph.capture(x.sum, pool=pool)):
        with pytest.raises(StateError, match="CUDA graph capturing detected at an inappropriate"):
            late()
    x.normal_()
    graph.replay()
    assert torch.equal(y, x * 3)
    graph, y = into(None, x)
    graph.replay()
    assert torch.equal(y, x * 3)


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
def test_a_graphed_function_of_a_frozen_pool_runs_eagerly(lab: Lab) -> None:
    with capture_scope(cgraph.MemPool(), freeze=True) as pool:
        pass
    function = cgraph.graphed(lambda x: x * 2, pool=pool)
    for _ in range(3):
        x = fresh(lab, 4)
        assert torch.equal(function(x), x * 2)
    assert function.report().captured == 0


def test_a_block_that_raises_leaves_its_pool_open(lab: Lab) -> None:
    x = fresh(lab, 8)
    with pytest.raises(ZeroDivisionError), capture_scope(freeze=True) as pool:
        _ = 1 / 0
    graph, y = into(pool, x)
    graph.replay()
    assert torch.equal(y, x * 3)


def test_only_the_captures_of_its_own_thread_are_prepared(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, simulator = fresh(lab, 8), getattr(lab, "simulator", None)

    def other() -> None:
        with cgraph.sim.use(simulator) if simulator is not None else torch.no_grad():
            captured(lab, x)

    with capture_scope(), counted(monkeypatch) as found:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert found["emptied"] == 1


def test_a_scope_inside_of_a_capture_is_refused(lab: Lab) -> None:
    with cgraph.graph(cgraph.CUDAGraph()), pytest.raises(CaptureError, match="inside a capture"):
        _ = fresh(lab, 8) if lab.device == "cuda" else torch.ones(8) * 2
        with capture_scope():
            pass
