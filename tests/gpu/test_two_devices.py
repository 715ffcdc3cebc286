"""Captures on two devices at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

import cgraph

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def test_two_threads_capture_on_two_devices_at_the_same_time() -> None:
    both = threading.Barrier(2, timeout=60)
    failures: list[BaseException] = []

    def work(ordinal: int) -> None:
        try:
            with torch.cuda.device(ordinal):
                for _ in range(5):
                    x, graph = torch.randn(256, device="cuda"), cgraph.CUDAGraph()
                    both.wait()
                    with cgraph.graph(graph, capture_error_mode="thread_local"):
                        y = torch.relu(x) * 2
                        both.wait()
                        y = y + x
                    x.normal_()
                    graph.replay()
                    torch.cuda.synchronize()
                    assert torch.equal(y, torch.relu(x) * 2 + x)
                    both.wait()
        except BaseException as error:
            failures.append(error)
            both.abort()

    threads = [threading.Thread(target=work, args=(ordinal,)) for ordinal in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def test_random_numbers_of_two_devices_are_those_of_eager() -> None:
    graphs = []
    for ordinal in range(2):
        with torch.cuda.device(ordinal):
            graph = cgraph.CUDAGraph()
            with cgraph.graph(graph):
                y = torch.rand(64, device="cuda")
            graphs.append((ordinal, graph, y))
    torch.cuda.manual_seed_all(77)
    drawn = []
    for _ in range(3):
        for ordinal, graph, y in graphs:
            with torch.cuda.device(ordinal):
                graph.replay()
                drawn.append((ordinal, y.clone()))
    torch.cuda.manual_seed_all(77)
    for ordinal, numbers in drawn:
        assert torch.equal(numbers, torch.rand(64, device=f"cuda:{ordinal}"))


def test_a_graphed_module_copies_inputs_from_the_other_device() -> None:
    with torch.cuda.device(1):
        model = nn.Linear(8, 8).to("cuda:1")
        cgraph.make_graphed_callables(model, (torch.randn(4, 8, device="cuda:1"),))
        for device in ("cuda:0", "cuda:1"):
            x = torch.randn(4, 8, device=device)
            right = nn.functional.linear(x.to("cuda:1"), model.weight, model.bias)
            assert torch.equal(model(x), right)


def test_a_pool_of_a_capturing_device_dies_while_another_device_is_current() -> None:
    x, doomed, graph = torch.randn(64, device="cuda:0"), cgraph.MemPool(), cgraph.CUDAGraph()
    with torch.cuda.use_mem_pool(doomed):
        kept = x * 5
    with cgraph.graph(graph):
        y = x * 2
        with torch.cuda.device(1):
            del doomed
        y = y + 1
    x.normal_()
    graph.replay()
    assert torch.equal(y, x * 2 + 1)
    assert kept.shape == x.shape


def test_a_capture_that_is_abandoned_on_another_device_leaves_that_one_current() -> None:
    x, graph = torch.randn(64, device="cuda:0"), cgraph.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        x * 2
        with torch.cuda.device(1):
            graph.reset()
            assert torch.cuda.current_device() == 1
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("kind", ["inference", "training", "break", "padded", "ahead", "step"])
def test_a_graphed_function_runs_on_the_device_of_its_arguments(kind: str) -> None:
    model, other = (nn.Linear(8, 8).to("cuda:1") for _ in range(2))
    other.load_state_dict(model.state_dict())
    first = cgraph.eager_break(torch.relu) if kind == "break" else torch.relu

    def over(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def run(x: torch.Tensor) -> torch.Tensor:
            y = model(first(x)) + torch.ones(8, device=x.device)
            if kind == "step":
                optimizer.zero_grad()
                y.square().sum().backward()
                optimizer.step()
                return y.detach()
            return y

        return run

    graphed, eager = (
        cgraph.graphed(over(model), sizes=[4] if kind == "padded" else None),
        over(other),
    )
    with torch.set_grad_enabled(kind in ("training", "step")):
        if kind == "ahead":
            graphed.capture(torch.randn(4, 8, device="cuda:1"), progress=False)
        for rows in (4, 4, 3, 3) if kind == "padded" else (4, 4, 4):
            x = torch.randn(rows, 8, device="cuda:1")
            y, right = graphed(x), eager(x)
            torch.testing.assert_close(y, right)
            if kind == "training":
                model.zero_grad(), other.zero_grad()
                y.sum().backward(), right.sum().backward()
                torch.testing.assert_close(model.weight.grad, other.weight.grad)
            del y, right
            with torch.cuda.device(1):
                torch.testing.assert_close(graphed(x).detach(), eager(x).detach())
    assert torch.cuda.current_device() == 0
    assert {key.state for key in graphed.report().keys} == {"captured"}


@pytest.mark.parametrize("are_joined", [False, True])
def test_a_function_that_works_on_two_devices_runs_eagerly(are_joined: bool) -> None:
    first, second = nn.Linear(8, 8).to("cuda:0"), nn.Linear(8, 8).to("cuda:1")
    other = torch.randn(4, 8, device="cuda:1")

    def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = first(x)
        return y, second(y.to("cuda:1") if are_joined else other)

    graphed = cgraph.graphed(run)
    with torch.no_grad(), pytest.warns(UserWarning, match="works on several devices"):
        for _ in range(3):
            x = torch.randn(4, 8, device="cuda:0")
            other.normal_()
            for one, right in zip(graphed(x), run(x), strict=True):
                assert torch.equal(one, right)
    assert {key.state for key in graphed.report().keys} == {"eager"}


@pytest.mark.parametrize("backend", ["cgraph", "cgraph_aot"])
def test_compiled_models_on_two_devices_have_trees_of_their_own(backend: str) -> None:
    torch.compiler.reset()
    models = [nn.Sequential(nn.Linear(8, 16), nn.GELU()).to(f"cuda:{one}") for one in range(2)]
    compiled = [torch.compile(model, backend=backend) for model in models]
    for _ in range(6):
        for ordinal, (model, fast) in enumerate(zip(models, compiled, strict=True)):
            x = torch.randn(4, 8, device=f"cuda:{ordinal}")
            want = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
            got = torch.autograd.grad(fast(x).square().sum(), list(model.parameters()))
            for one, other in zip(got, want, strict=True):
                assert torch.allclose(one, other, atol=1e-4)
            assert torch.cuda.current_device() == 0
    assert {one.device for one in cgraph.trees.report().functions if one.replays} == {0, 1}
    torch.compiler.reset()


@pytest.mark.parametrize("backend", ["cgraph", "cgraph_aot"])
def test_a_compiled_function_of_two_devices_runs_without_a_graph(backend: str) -> None:
    torch.compiler.reset()

    def body(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x * 2).to(y.device) + y.sin()

    fast = torch.compile(body, backend=backend)
    with torch.no_grad(), pytest.warns(cgraph.errors.EagerWarning, match="devices"):
        for _ in range(4):
            x, y = torch.randn(8, device="cuda:0"), torch.randn(8, device="cuda:1")
            assert torch.allclose(fast(x, y), body(x, y), atol=1e-5)
    torch.compiler.reset()
