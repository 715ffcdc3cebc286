"""Ends of captures on a GPU, where torch's own object keeps the books."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch

import cgraph
from cgraph import _torch
from cgraph.errors import CaptureError
from lab import CudaLab, captured, fresh

pytestmark = pytest.mark.gpu
lab = CudaLab()


def require_all_as_before() -> None:
    """Require random numbers, memory and captures to work as before."""
    assert torch.rand(64, device="cuda").unique().numel() > 32
    x = fresh(lab, 64)
    graph, y = captured(lab, x)
    x.normal_()
    y.fill_(float("nan"))
    graph.replay()
    assert torch.equal(y, x * 2 + 1)


def test_captures_leave_the_filters_of_warnings_alone_which_are_the_process_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def touched(*args: object, **kwargs: object) -> None:
        raise AssertionError

    first, _ = captured(lab, fresh(lab, 64))
    graph, x = cgraph.CUDAGraph(), fresh(lab, 64)
    for name in ("catch_warnings", "simplefilter", "warn"):
        monkeypatch.setattr(warnings, name, touched)
    with cgraph.graph(graph, pool=first.pool()):
        y = x * 2 + 1
    monkeypatch.undo()
    y.fill_(float("nan"))
    graph.replay()
    assert torch.equal(y, x * 2 + 1)


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_at_the_end_of_a_capture_leaves_everything_as_before(
    monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    host: Any = type(_torch.HostGraph())
    end = host.capture_end

    def interrupted(self: Any) -> None:
        if when == "after":
            end(self)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(host, "capture_end", interrupted, raising=False)
    graph, x = cgraph.CUDAGraph(), fresh(lab, 64)
    with pytest.raises(KeyboardInterrupt), cgraph.graph(graph):
        torch.rand(64, device="cuda").add_(x)
    assert not torch.cuda.is_current_stream_capturing()
    require_all_as_before()
    with cgraph.graph(graph):
        y = x * 3
    y.fill_(float("nan"))
    graph.replay()
    assert torch.equal(y, x * 3)


def test_a_capture_that_another_thread_would_have_to_end_leaves_random_numbers_alone() -> None:
    program = """
import threading
from contextlib import suppress
import torch, cgraph
from cgraph.errors import CaptureError
torch.rand(4, device="cuda")
graphs, stream = [], torch.cuda.Stream()
def begin():
    with torch.cuda.stream(stream):
        graphs.append(cgraph.CUDAGraph())
        graphs[0].capture_begin(capture_error_mode="thread_local")
thread = threading.Thread(target=begin)
thread.start()
thread.join()
with suppress(CaptureError):
    graphs.pop().reset()
drawn = torch.rand(64, device="cuda")
assert drawn.unique().numel() > 32
torch.cuda.default_generators[0].get_offset()
print("drawn")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100
    )
    assert (done.stdout.strip(), done.returncode) == ("drawn", 0), done.stderr


def test_a_broken_capture_says_the_drivers_code() -> None:
    x, side = fresh(lab, 64), torch.cuda.Stream()
    with pytest.raises(CaptureError, match="joined") as caught, cgraph.graph(cgraph.CUDAGraph()):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x * 2
    assert caught.value.code == 904  # CUDA_ERROR_STREAM_CAPTURE_UNJOINED
    require_all_as_before()


def test_newer_torchs_host_that_must_be_instantiated_before_its_replay_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host: Any = type(_torch.HostGraph())

    class Newer(host):  # type: ignore[misc]
        """A host as of torch 2.15."""

        has_exec = False

        def instantiate(self) -> None:
            self.has_exec = True
            super().instantiate()

        def replay(self) -> None:
            assert self.has_exec, "Called CUDAGraph::replay before the graph was instantiated"
            super().replay()

    monkeypatch.setattr(_torch, "HostGraph", lambda: Newer(True))
    for is_newer in (False, True):
        told = staticmethod(lambda is_newer=is_newer: not is_newer)
        monkeypatch.setattr(_torch.CapturedDraws, "are_told", told)
        graph = cgraph.CUDAGraph()
        with cgraph.graph(graph):
            y = torch.rand(64, device="cuda")
        torch.manual_seed(5)
        graph.replay()
        found = y.clone()
        torch.manual_seed(5)
        assert torch.equal(found, torch.rand(64, device="cuda"))


def test_generators_of_one_state_draw_once() -> None:
    default = torch.cuda.default_generators[torch.cuda.current_device()]
    graph = cgraph.CUDAGraph()
    for _ in range(2):
        graph.register_generator_state(default)
    with cgraph.graph(graph):
        y = torch.rand(64, device="cuda")
    torch.manual_seed(9)
    found = []
    for _ in range(3):
        graph.replay()
        found.append(y.clone())
    torch.manual_seed(9)
    assert all(torch.equal(one, torch.rand(64, device="cuda")) for one in found)


def test_a_graph_that_is_reset_while_it_is_instantiated_is_not_freed_under_it() -> None:
    x, graph = fresh(lab, 64), cgraph.CUDAGraph(keep_graph=True)
    with cgraph.graph(graph):
        for _ in range(300):
            x.add_(1)
    template = graph._template
    graph.reset()
    assert template.node_count() == 300
