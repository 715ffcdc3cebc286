"""The garbage collector during a capture."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import cgraph
from lab import Lab, fresh


class Node:
    """An object that can be part of a cycle."""

    me: Node


class Litter:
    """An object that leaves garbage, and notes what was collected at once."""

    def __init__(self) -> None:
        self.collected = 0

    def leave(self) -> None:
        """Drop a cycle, and make so many objects that a collection is due."""
        dead: list[int] = []
        node = Node()
        node.me = node
        weakref.finalize(node, dead.append, 1)
        del node
        due = [[] for _ in range(20_000)]  # type: ignore[var-annotated]
        self.collected += len(dead)
        del due


@pytest.fixture(autouse=True)
def _enabled() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.enable()
    yield
    if not was_enabled:
        gc.disable()


def test_without_a_capture_litter_is_collected() -> None:
    litter = Litter()
    litter.leave()
    assert litter.collected == 1


def test_no_collection_starts_in_a_graph_block(lab: Lab) -> None:
    litter, x = Litter(), fresh(lab, 8)
    graph = cgraph.CUDAGraph()
    with cgraph.graph(graph):
        litter.leave()
        y = x + 1
        litter.leave()
    assert gc.isenabled()
    assert litter.collected == 0
    graph.replay()
    assert torch.equal(y, x + 1)


@pytest.mark.parametrize("needs_grad", [False, True])
def test_no_collection_starts_in_the_capture_of_a_graphed_function(
    lab: Lab, needs_grad: bool
) -> None:
    litter = Litter()

    @cgraph.graphed(on_fail="raise")
    def double(x: Tensor) -> Tensor:
        if cgraph.is_current_stream_capturing():
            litter.leave()
        return x * 2

    x = fresh(lab, 8).requires_grad_(needs_grad)
    for _ in range(2):
        assert torch.equal(double(x), x * 2)
    assert gc.isenabled()
    assert litter.collected == 0
    assert double.report().captured == 1


def test_no_collection_starts_between_the_segments_of_a_capture(lab: Lab) -> None:
    litter = Litter()

    @cgraph.eager_break
    def host(x: Tensor) -> Tensor:
        assert not gc.isenabled()
        litter.leave()
        return x + 1

    x = fresh(lab, 8)
    made, y = cgraph.SegmentedGraph.capture(lambda: host(x * 2) * 3)
    assert gc.isenabled()
    assert litter.collected == 0
    assert torch.equal(y, (x * 2 + 1) * 3)
    made.reset()


def test_the_collector_is_enabled_again_after_a_capture_that_failed(lab: Lab) -> None:
    x = fresh(lab, 8)
    with pytest.raises(ValueError, match="mine"), cgraph.graph(cgraph.CUDAGraph()):
        x + 1
        raise ValueError("mine")
    assert gc.isenabled()


def test_a_collector_that_was_disabled_stays_so(lab: Lab) -> None:
    x = fresh(lab, 8)
    gc.disable()
    try:
        with cgraph.graph(cgraph.CUDAGraph()):
            x + 1
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_block_that_is_entered_and_dropped_lets_the_collector_go_on(lab: Lab) -> None:
    x, block = fresh(lab, 8), cgraph.graph(cgraph.CUDAGraph())
    # The stream of a block that is not left stays current, as torch's does.
    with lab.use(lab.current()):
        block.__enter__()
        x + 1
        assert not gc.isenabled()
        del block
        assert gc.isenabled()
    assert not cgraph.is_current_stream_capturing()


def test_the_collector_waits_for_a_capture_of_another_thread(lab: Lab) -> None:
    x, stream = fresh(lab, 8), lab.stream()
    lab.sync()
    begun, over = threading.Event(), threading.Event()

    def capture() -> None:
        with cgraph.graph(cgraph.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
            x + 1
            begun.set()
            over.wait(60)

    thread = threading.Thread(target=capture)
    thread.start()
    begun.wait(60)
    try:
        assert not gc.isenabled()
    finally:
        over.set()
        thread.join()
    assert gc.isenabled()
