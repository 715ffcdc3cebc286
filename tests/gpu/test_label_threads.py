"""Labels of nodes recorded by threads other than the capturing one."""

from __future__ import annotations

import threading

import pytest
import torch

import cgraph
from cgraph.labels import Label

pytestmark = pytest.mark.gpu


def test_work_of_another_thread_has_its_scopes_inside_those_of_the_capture() -> None:
    x, side, graph = torch.randn(8, device="cuda"), torch.cuda.Stream(), cgraph.CUDAGraph()

    def work() -> None:
        with torch.cuda.stream(side), cgraph.annotate("thread"):
            x.exp_()

    relaxed = cgraph.graph(graph, capture_error_mode="relaxed", enable_annotations=True)
    with relaxed, cgraph.annotate("main"):
        side.wait_stream(torch.cuda.current_stream())
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        torch.cuda.current_stream().wait_stream(side)
    # A thread does not inherit the mode that sees operators.
    assert list(graph._labels.values()) == [Label(("main", "thread"), None, None, None)]


def test_a_double_backward_pass_never_has_a_wrong_module() -> None:
    class Square(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin()

    class Cube(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.tanh()

    x = torch.randn(8, device="cuda", requires_grad=True)
    square, cube, graph = Square(), Cube(), cgraph.CUDAGraph()

    def run() -> None:
        y = cube(square(x)).sum()
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        torch.autograd.grad(gradient.sum(), x)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.synchronize()
    with cgraph.graph(graph, enable_annotations=True):
        run()
    for label in graph._labels.values():
        if label.operator == "aten.tanh_backward.default":
            assert label.module in (None, "Cube")
        if label.operator == "aten.cos.default":
            assert label.module in (None, "Square")
