"""Graphs of functions that torch's own compiler has compiled."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cgraph
from broken import scaled
from cgraph.errors import LivenessError
from graphed_calls import same_gradients
from lab import CudaLab, fresh

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),  # the first compilation of a process
    pytest.mark.filterwarnings("ignore"),  # warnings of Inductor and others
]


@pytest.fixture(autouse=True)
def _compiled_anew() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def close(one: Any, other: Any) -> None:
    """Compare up to the rounding of other kernels."""
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def pointwise(x: torch.Tensor) -> torch.Tensor:
    """Compute ten operators, which Inductor fuses into one kernel."""
    for _ in range(5):
        x = (x * 1.5).sin()
    return x


@pytest.mark.parametrize("sizes", [None, [8, 16]])
def test_a_graph_of_a_compiled_function_has_the_fused_kernel(sizes: list[int] | None) -> None:
    plain = cgraph.graphed(pointwise, sizes=sizes)
    fused = cgraph.graphed(torch.compile(pointwise), sizes=sizes)
    with torch.no_grad():
        for rows in (16, 8, 5, 13) * 3:
            x = fresh(CudaLab(), rows, 64)
            close(fused(x), pointwise(x))
            plain(x)
    nodes = [function.report().keys[0].nodes for function in (plain, fused)]
    # The kernels and the copies of input and result.
    assert nodes == [12, 3]


def test_a_compiled_function_stays_compiled_for_its_other_callers() -> None:
    compiled = torch.compile(pointwise)
    graphed = cgraph.graphed(lambda x: compiled(x) + 1)
    with torch.no_grad():
        x = fresh(CudaLab(), 64)
        close(graphed(x), pointwise(x) + 1)
        alone = cgraph.CUDAGraph(keep_graph=True)
        with cgraph.graph(alone):
            compiled(x)
    assert alone.memory().nodes == 1


def test_liveness_checks_know_what_compiled_code_allocates() -> None:
    weight = fresh(CudaLab(), 64, 64)
    compiled = torch.compile(lambda x: ((x * 2).sin() @ weight).cos())
    with torch.no_grad():
        x = fresh(CudaLab(), 8, 64)
        compiled(x)
        captured = cgraph.CUDAGraph()
        with cgraph.graph(captured, check_input_liveness=True):
            total = (compiled(x) @ weight).sum()
        for _ in range(2):
            x.copy_(fresh(CudaLab(), 8, 64))
            captured.replay()
            close(total, (((x * 2).sin() @ weight).cos() @ weight).sum())
        gone, weight = weight.data_ptr(), weight.clone()
        assert gone != weight.data_ptr()
        del compiled
        with pytest.raises(LivenessError, match="freed"):
            captured.replay()


def test_what_is_recomputed_in_a_backward_pass_stays_compiled() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).cuda()
    eager = copy.deepcopy(net)
    runs = 0

    def counting(module: torch.fx.GraphModule, _: Any) -> Any:
        def run(*args: Any) -> Any:
            nonlocal runs
            runs += 1
            return module.forward(*args)

        return run

    compiled = torch.compile(net, backend=counting)

    def step(model: Any, parameters: nn.Module, x: torch.Tensor) -> torch.Tensor:
        parameters.zero_grad()
        loss = checkpoint(model, x, use_reentrant=False).square().sum()
        loss.backward()
        return loss.detach()

    graphed = cgraph.graphed(lambda x: step(compiled, net, x))
    for _ in range(3):
        x = fresh(CudaLab(), 4, 8)
        close(graphed(x), step(eager, eager, x))
        close([one.grad for one in net.parameters()], [one.grad for one in eager.parameters()])
    before = runs
    step(compiled, net, x)
    assert runs > before > 0


def test_a_function_with_graphs_of_its_own_inside_runs_eagerly() -> None:
    compiled = torch.compile(pointwise, mode="reduce-overhead")
    graphed = cgraph.graphed(lambda x: compiled(x) + 1)
    with torch.no_grad():
        for _ in range(4):
            x = fresh(CudaLab(), 64)
            close(graphed(x), pointwise(x) + 1)
    assert graphed.report().captured == 0


def norm(net: nn.Module) -> list[torch.Tensor]:
    """Return the buffers of a network."""
    return list(net.buffers())


def test_statistics_that_compiled_kernels_write_are_as_after_eager_calls() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()).cuda()
    eager = copy.deepcopy(net)
    graphed = cgraph.graphed(torch.compile(net))
    with torch.no_grad():
        for _ in range(4):
            x = fresh(CudaLab(), 16, 8)
            close(graphed(x), eager(x))
            close(norm(net), norm(eager))
    assert graphed.report().captured == 1


def test_a_cache_and_an_argument_that_compiled_kernels_write_are_written() -> None:
    cache = torch.zeros(4, 8, device="cuda")
    other = torch.zeros_like(cache)

    def step(cache: torch.Tensor, x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(0, place, x * 2)
        x.mul_(3)
        return cache.sum(0)

    compiled = torch.compile(step)
    graphed = cgraph.graphed(lambda x, place: compiled(cache, x, place))
    with torch.no_grad():
        for at in (0, 2, 1, 2):
            x, place = fresh(CudaLab(), 1, 8), torch.tensor([at], device="cuda")
            same = x.clone()
            close(graphed(x, place), step(other, same, place))
            close((cache, x), (other, same))
    assert graphed.report().captured == 1


def test_a_compiled_network_is_trained_as_in_eager() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 4)).cuda()
    eager = copy.deepcopy(net)
    graphed = cgraph.graphed(torch.compile(net))
    for _ in range(3):
        x = fresh(CudaLab(), 16, 8).requires_grad_()
        same = x.detach().clone().requires_grad_()
        graphed(x).square().sum().backward()
        eager(same).square().sum().backward()
        close(x.grad, same.grad)
        close([one.grad for one in net.parameters()], [one.grad for one in eager.parameters()])
        close(norm(net), norm(eager))
        net.zero_grad(), eager.zero_grad()
    assert graphed.report().captured == 1
    assert same_gradients(net, eager)


def test_compiled_parts_around_a_break_are_trained_as_in_eager() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Sequential(nn.Linear(8, 8), nn.GELU())
            self.last = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            return self.last(scaled(self.first(x)))

    net = Broken().cuda()
    eager = copy.deepcopy(net)
    net.first, net.last = torch.compile(net.first), torch.compile(net.last)
    graphed = cgraph.graphed(net)
    for _ in range(6):  # compiling sets random states
        x = fresh(CudaLab(), 16, 8).requires_grad_()
        same = x.detach().clone().requires_grad_()
        for run, given in ((graphed, x), (eager, same)):
            run(given).square().sum().backward()
        close(x.grad, same.grad)
        close([one.grad for one in net.parameters()], [one.grad for one in eager.parameters()])
        net.zero_grad(), eager.zero_grad()
    (key,) = graphed.report().keys
    assert (key.state, len(key.breaks)) == ("captured", 1)
    assert key.replays > 1


def test_a_whole_step_with_a_compiled_network_leaves_the_parameters_of_eager() -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).cuda()
    nets = [net, copy.deepcopy(net)]
    optimizers = [torch.optim.Adam(one.parameters(), capturable=True) for one in nets]
    models = [torch.compile(nets[0]), nets[1]]

    def step(place: int, x: torch.Tensor) -> torch.Tensor:
        optimizers[place].zero_grad()
        loss = models[place](x).square().mean()
        loss.backward()
        optimizers[place].step()
        return loss.detach()

    graphed = cgraph.graphed(lambda x: step(0, x))
    for _ in range(5):
        x = fresh(CudaLab(), 32, 8)
        close(graphed(x), step(1, x))
        close(list(nets[0].parameters()), list(nets[1].parameters()))
    assert graphed.report().captured == 1
