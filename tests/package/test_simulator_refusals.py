"""The simulator refuses inside of captures what a GPU refuses."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import cgraph
from cgraph.errors import CaptureError, ForeignError
from lab import SimLab, fresh


@pytest.mark.parametrize("read", [print, repr, Tensor.tolist, Tensor.numpy, np.asarray])
def test_a_read_of_a_tensor_on_the_host_is_refused_inside_a_capture(sim: SimLab, read: Any) -> None:
    x, graph = fresh(sim, 4), cgraph.CUDAGraph()
    with pytest.raises(CaptureError, match="reads a value from the device"):
        with cgraph.graph(graph):
            read(x * 2)
    read(x)
    with cgraph.graph(graph):
        y = x * 2
    graph.replay()
    assert torch.equal(y, x * 2)


def test_a_checkpoint_that_recomputes_dropout_is_refused(sim: SimLab) -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(lambda v: functional.dropout(v, 0.5), x, use_reentrant=False)

    with pytest.raises(CaptureError, match="sets their state"):
        cgraph.make_graphed_callables(Net(), (fresh(sim, 8).requires_grad_(),))


def test_random_numbers_of_other_threads_are_their_own_affair(sim: SimLab) -> None:
    drawn, stop = threading.Event(), threading.Event()

    def draw() -> None:
        while not stop.is_set():
            torch.randn(8)
            drawn.set()

    thread = threading.Thread(target=draw, daemon=True)
    x, graph = fresh(sim, 4), cgraph.CUDAGraph()
    with cgraph.graph(graph, capture_error_mode="thread_local"):
        thread.start()
        y = x * 2
        drawn.wait()
    stop.set()
    thread.join()
    graph.replay()
    assert torch.equal(y, x * 2)


def quantized() -> Tensor:
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: torch.eye(3).to_sparse_coo(), "sparse_coo"),
        (lambda: torch.eye(3).to_sparse_csr(), "sparse_csr"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
        (lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "nested"),
        (quantized, "quantized"),
    ],
)
def test_operators_of_tensors_without_one_memory_are_refused_by_their_kind(
    sim: SimLab, make: Any, kind: str
) -> None:
    tensor = make()
    run = tensor.dequantize if kind == "quantized" else lambda: tensor * 2
    with pytest.raises(CaptureError, match=f"of a {kind} tensor"):
        with cgraph.graph(cgraph.CUDAGraph()):
            run()


def test_a_graph_of_the_default_simulator_is_replayed_where_no_other_is_in_force(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CGRAPH_DRIVER", "sim")
    x, graph = torch.ones(3), cgraph.CUDAGraph()
    with cgraph.graph(graph):
        y = x * 2
    graph.replay()
    monkeypatch.delenv("CGRAPH_DRIVER")
    with cgraph.sim.use():
        with pytest.raises(ForeignError, match="is not in force"):
            graph.replay()
    x.fill_(4)
    graph.replay()
    assert torch.equal(y, x * 2)
