"""Traps of torch's graphs that only a GPU shows."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import cgraph
from cgraph.errors import CaptureError
from lab import CudaLab, captured, fresh

pytestmark = pytest.mark.gpu
lab = CudaLab()


@contextmanager
def capture_of_another_thread(mode: str) -> Iterator[tuple[cgraph.CUDAGraph, torch.Tensor]]:
    """Keep a capture open on another thread; yield its graph and its result."""
    begun, may_end = threading.Event(), threading.Event()
    graph, x = cgraph.CUDAGraph(), fresh(lab, 64)
    results: list[torch.Tensor] = []

    def work() -> None:
        with cgraph.graph(graph, capture_error_mode=mode):
            results.append(x * 2)
            begun.set()
            may_end.wait(20)
            results.append(results[0] + x)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert begun.wait(20)
        yield graph, x
    finally:
        may_end.set()
        thread.join()
    x.normal_()
    graph.replay()
    assert torch.equal(results[1], x * 2 + x)


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_a_capture_that_begins_breaks_no_other_threads_capture(mode: str) -> None:
    x = fresh(lab, 64)
    with capture_of_another_thread(mode):
        with pytest.raises(CaptureError, match="is capturing"):
            captured(lab, x)
    graph, y = captured(lab, x)
    graph.replay()
    assert torch.equal(y, x * 2 + 1)


def test_memory_that_a_graph_allocates_is_freed_before_its_next_replay() -> None:
    driver = ctypes.CDLL("libcuda.so.1")
    address, size = ctypes.c_uint64(), ctypes.c_size_t(64 << 20)
    graph = cgraph.CUDAGraph(keep_graph=True)
    with cgraph.graph(graph):
        handle = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        assert driver.cuMemAllocAsync(ctypes.byref(address), size, handle) == 0
    for _ in range(3):
        # Without the flag the second launch is refused.
        graph.replay()
    torch.cuda.synchronize()
    graph.reset()


def test_a_reset_leaves_the_generator_as_if_nothing_was_captured() -> None:
    generator = torch.Generator("cuda")
    for _ in range(3):
        graph = cgraph.CUDAGraph()
        graph.register_generator_state(generator)
        with cgraph.graph(graph):
            y = torch.rand(64, device="cuda", generator=generator)
        generator.manual_seed(5)
        graph.replay()
        first = y.clone()
        graph.reset()
        generator.manual_seed(5)
        assert torch.equal(torch.rand(64, device="cuda", generator=generator), first)
        other = generator.clone_state()
        assert other.get_offset() == generator.get_offset()


def test_a_launch_of_the_raw_exec_repeats_the_numbers_of_the_last_replay() -> None:
    graph, y = cgraph.CUDAGraph(keep_graph=True), None
    with cgraph.graph(graph):
        y = torch.rand(64, device="cuda")
    assert y is not None
    graph.replay()
    first = y.clone()
    graph.replay()
    second = y.clone()
    assert not torch.equal(first, second)
    driver = ctypes.CDLL("libcuda.so.1")
    stream = torch.cuda.current_stream().cuda_stream
    exec_ = ctypes.c_void_p(graph.raw_cuda_graph_exec())
    for _ in range(2):
        y.zero_()
        assert driver.cuGraphLaunch(exec_, ctypes.c_void_p(stream)) == 0
        assert torch.equal(y, second)
    graph.replay()
    assert not torch.equal(y, second)


def test_warm_ups_run_on_a_side_stream_as_often_as_asked() -> None:
    seen: list[int] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.cuda.current_stream().cuda_stream)
        return x * 2

    x = fresh(lab, 64).requires_grad_()
    cgraph.make_graphed_callables(forward, (x,), num_warmup_iters=11)
    *warm_ups, _capture = seen
    assert len(warm_ups) == 11
    assert torch.cuda.current_stream().cuda_stream not in warm_ups
