"""`graph`, `is_current_stream_capturing`."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from torch.testing import assert_close

import cgraph
from cgraph import _driver
from cgraph.errors import CaptureError
from lab import Lab, captured, fresh


def test_capturing_is_said_of_the_current_stream_only(lab: Lab) -> None:
    x, other = fresh(lab, 8), lab.stream()
    assert not cgraph.is_current_stream_capturing()
    with cgraph.graph(cgraph.CUDAGraph()):
        assert cgraph.is_current_stream_capturing()
        with lab.use(other):
            assert not cgraph.is_current_stream_capturing()
        x + 1
    assert not cgraph.is_current_stream_capturing()


def test_work_of_the_block_is_captured_and_not_run(lab: Lab) -> None:
    x = fresh(lab, 64)
    before, graph = x.clone(), cgraph.CUDAGraph()
    with cgraph.graph(graph):
        x.add_(1)
    assert torch.equal(x, before)
    graph.replay()
    graph.replay()
    assert torch.equal(x, before + 1 + 1)


def test_the_default_stream_of_captures_is_made_once(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgraph.graph, "default_capture_stream", None)
    first = cgraph.graph(cgraph.CUDAGraph()).capture_stream
    second = cgraph.graph(cgraph.CUDAGraph()).capture_stream
    assert first is second is cgraph.graph.default_capture_stream


def test_an_explicit_stream_is_current_in_the_block(lab: Lab) -> None:
    stream, x = lab.stream(), fresh(lab, 8)
    before = lab.current()
    with cgraph.graph(cgraph.CUDAGraph(), stream=stream):
        assert lab.current() == stream
        x + 1
    assert lab.current() == before


def test_enter_does_its_steps_in_order(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    # A restored attribute of an object would hide the class's own for good.
    driver = type(_driver.current())

    def spy(owner: object, name: str) -> None:
        original = getattr(owner, name)

        def call(*args: object, **kwargs: object) -> object:
            steps.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    for name in ("synchronize", "empty_cache", "begin"):
        spy(driver, name)
    spy(gc, "collect")
    if hasattr(torch.compiler.config, "force_cudagraph_gc"):
        monkeypatch.setattr(torch.compiler.config, "force_cudagraph_gc", True)
    else:  # older torch has neither the option nor the variable behind it
        monkeypatch.setenv("TORCH_CUDAGRAPH_GC", "1")
    x = fresh(lab, 8)
    with cgraph.graph(cgraph.CUDAGraph()):
        x + 1
    assert steps[:4] == ["synchronize", "collect", "empty_cache", "begin"]


def test_no_collection_unless_it_is_asked_for(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    collections: list[None] = []
    monkeypatch.setattr(gc, "collect", lambda *_: collections.append(None))
    x = fresh(lab, 8)
    with cgraph.graph(cgraph.CUDAGraph()):
        x + 1
    assert not collections


def test_enter_returns_nothing(lab: Lab) -> None:
    x = fresh(lab, 8)
    with cgraph.graph(cgraph.CUDAGraph()) as entered:
        x + 1
    assert entered is None


def test_the_exception_of_the_block_comes_out(lab: Lab) -> None:
    x = fresh(lab, 8)
    with pytest.raises(ValueError, match="mine"), cgraph.graph(cgraph.CUDAGraph()):
        x + 1
        raise ValueError("mine")


def test_captures_on_one_stream_share_the_memory_of_a_pool(lab: Lab) -> None:
    x, stream, handle = fresh(lab, 1 << 16), lab.stream(), cgraph.graph_pool_handle()
    graphs = []
    for _ in range(3):
        graph = cgraph.CUDAGraph()
        with cgraph.graph(graph, pool=handle, stream=stream):
            torch.relu(x * 2)
        graphs.append(graph)
        assert lab.segments(handle) == 1


def test_a_second_capture_in_the_same_thread_is_refused(lab: Lab) -> None:
    x, inner = fresh(lab, 8), cgraph.CUDAGraph()
    graph = cgraph.CUDAGraph()
    with cgraph.graph(graph):
        y = x + 1
        with pytest.raises(CaptureError, match="nested"):
            inner.capture_begin()
    x.normal_()
    graph.replay()
    assert torch.equal(y, x + 1)


def test_captures_of_several_threads_one_after_another_replay_right(lab: Lab) -> None:
    x = fresh(lab, 64)
    results: list[tuple[cgraph.CUDAGraph, torch.Tensor, int]] = []

    def work(factor: int) -> None:
        graph, stream = cgraph.CUDAGraph(), lab.stream()
        with cgraph.graph(graph, stream=stream, capture_error_mode="thread_local"):
            y = x * factor
        results.append((graph, y, factor))

    for factor in range(1, 4):
        thread = threading.Thread(target=work, args=(factor,))
        thread.start()
        thread.join()
    x.normal_()
    for graph, y, factor in results:
        graph.replay()
        assert torch.equal(y, x * factor)


def test_forked_streams_that_are_joined_are_part_of_the_graph(lab: Lab) -> None:
    x, side = fresh(lab, 1 << 12), lab.stream()
    graph = cgraph.CUDAGraph()
    with cgraph.graph(graph):
        a = x + 1
        lab.fork(side)
        with lab.use(side):
            b = x * 2
            inside = lab.in_pool(b, graph.pool())
        c = x * 3
        lab.join(side)
        d = a + b + c
    assert inside
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert torch.equal(d, (x + 1) + x * 2 + x * 3)


def test_replay_reads_its_inputs_where_they_were(lab: Lab) -> None:
    x = fresh(lab, 128)
    graph, y = captured(lab, x)
    for _ in range(4):
        x.normal_()
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, x * 2 + 1)


def test_a_default_capture_stream_of_the_user_is_used(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Own(cgraph.graph):
        default_capture_stream = lab.stream()

    seen = []
    x = fresh(lab, 8)
    with Own(cgraph.CUDAGraph()):
        seen.append(lab.current())
        x + 1
    assert seen == [Own.default_capture_stream]


def test_casts_of_autocasts_cache_from_outside_are_made_anew_inside_a_capture(lab: Lab) -> None:
    weight, x = fresh(lab, 4, 4).requires_grad_(), fresh(lab, 4, 4)
    graph = cgraph.CUDAGraph()
    with torch.autocast(lab.device, dtype=torch.bfloat16):
        outside = x @ weight
        with cgraph.graph(graph), torch.no_grad():
            y = x @ weight
        after = x @ weight
    with torch.no_grad():
        weight.mul_(2)
    graph.replay()
    lab.sync()
    assert_close(y, outside.detach() * 2)
    assert_close(after.detach(), outside.detach())
