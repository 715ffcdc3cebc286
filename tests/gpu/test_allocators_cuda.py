"""Allocators that cannot serve captures, failed captures of torch, and first uses of cuBLAS."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading

import pytest
import torch
from torch.testing import assert_close

import cgraph
from cgraph import _core
from cgraph.errors import ForeignError

pytestmark = pytest.mark.gpu

CAPTURE = """
import torch, cgraph
x, graph = torch.ones(4, device="cuda"), cgraph.CUDAGraph()
try:
    with cgraph.graph(graph):
        y = x * 2
except cgraph.errors.TorchError as error:
    print(error)
"""


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    environment = {**os.environ, **environment}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync"),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),
    ],
)
def test_an_allocator_that_cannot_serve_captures_is_refused_by_its_setting(
    setting: str, value: str
) -> None:
    done = run(CAPTURE, **{setting: value})
    assert done.returncode == 0, done.stderr
    assert setting in done.stdout


BROKEN = """
import torch, cgraph
x, graph = torch.ones(4, device="cuda"), cgraph.CUDAGraph()
with cgraph.graph(graph):
    y = x * 2
pool = cgraph.MemPool()
theirs = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(theirs):
        (x * 2).sum().item()
except RuntimeError:
    pass
if WHEN == "before the end":
    del pool, graph, y
print("alive")
"""


@pytest.mark.parametrize("when", ["before the end", "at exit"])
def test_pools_bear_a_failed_capture_of_torchs_own_class(when: str) -> None:
    done = run(f"WHEN = {when!r}\n{BROKEN}")
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


def test_the_first_matrix_product_of_a_thread_may_be_captured() -> None:
    a = torch.randn(16, 16, device="cuda")
    found: list[torch.Tensor] = []

    def work() -> None:
        graph = cgraph.CUDAGraph()
        with cgraph.graph(graph):
            product = a @ a
        graph.replay()
        torch.cuda.synchronize()
        found.append(product.clone())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert_close(found[0], a @ a)


def test_a_pool_refuses_memory_of_another_device() -> None:
    pool = _core.Pool(_core.Device.cuda(0))
    _, allocate, _ = pool.functions()
    kind = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
    assert kind(allocate)(1 << 21, 1, None) is None
    with pytest.raises(ForeignError, match="cuda:0, expected cuda:1"):
        raise _core.take_refusal(1 << 21)
    assert pool.reserved == 0
