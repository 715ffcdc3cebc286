"""State after a failed capture, which is as before."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

import cgraph
from cgraph.errors import CaptureError, CgraphError, InstantiateError
from lab import Lab, SimLab, captured, fresh

Body = Callable[[Lab, torch.Tensor], object]


def raises(lab: Lab, x: torch.Tensor) -> None:
    raise ValueError("the body's own")


def syncs(lab: Lab, x: torch.Tensor) -> float:
    return x.sum().item()


def waits_for_the_device(lab: Lab, x: torch.Tensor) -> None:
    lab.sync()


def needs_a_shape(lab: Lab, x: torch.Tensor) -> torch.Tensor:
    return x.nonzero()


def forks(lab: Lab, x: torch.Tensor) -> None:
    side = lab.stream()
    lab.fork(side)
    with lab.use(side):
        x + 1


def allocates_too_much(lab: Lab, x: torch.Tensor) -> torch.Tensor:
    return torch.empty(1 << 44, device=lab.device)


def draws_and_raises(lab: Lab, x: torch.Tensor) -> None:
    torch.nn.functional.dropout(x, 0.5)
    torch.rand(4, device=lab.device)
    raise ValueError("the body's own")


BODIES: list[tuple[Body, type[BaseException], str]] = [
    (raises, ValueError, "the body's own"),
    (draws_and_raises, ValueError, "the body's own"),
    (syncs, RuntimeError, "captur"),
    (waits_for_the_device, RuntimeError, "captur"),
    (needs_a_shape, RuntimeError, "captur"),
    (forks, CaptureError, "joined"),
    (allocates_too_much, (MemoryError, RuntimeError), "memory"),
]


def check_that_all_is_as_before(lab: Lab, before: object, handle: object) -> None:
    assert lab.current() == before
    assert not cgraph.is_current_stream_capturing()
    torch.rand(8, device=lab.device)
    four_mb = torch.empty(1 << 20, device=lab.device)
    assert not lab.in_pool(four_mb, handle)
    x = fresh(lab, 64)
    graph, y = captured(lab, x)
    x.normal_()
    graph.replay()
    assert torch.equal(y, x * 2 + 1)


@pytest.mark.parametrize(
    ("body", "error", "text"), BODIES, ids=lambda b: getattr(b, "__name__", "")
)
def test_a_failing_body_leaves_everything_as_before(
    lab: Lab, body: Body, error: type[BaseException], text: str
) -> None:
    x, graph, before = fresh(lab, 1 << 10), cgraph.CUDAGraph(), lab.current()
    handle = cgraph.graph_pool_handle()
    with pytest.raises(error, match=text), cgraph.graph(graph, pool=handle):
        y = x * 2
        body(lab, y)
    check_that_all_is_as_before(lab, before, handle)
    with cgraph.graph(graph, pool=handle):
        z = x - 3
    x.normal_()
    graph.replay()
    assert torch.equal(z, x - 3)


@pytest.mark.parametrize("body", [syncs, needs_a_shape])
def test_the_drivers_reason_is_a_note_of_the_bodys_exception(lab: Lab, body: Body) -> None:
    x = fresh(lab, 64)
    with pytest.raises(RuntimeError) as caught, cgraph.graph(cgraph.CUDAGraph()):
        body(lab, x)
    (note,) = caught.value.__notes__
    assert "the driver says" in note


def test_a_healthy_capture_that_is_abandoned_has_no_note(lab: Lab) -> None:
    x = fresh(lab, 64)
    with pytest.raises(ValueError) as caught, cgraph.graph(cgraph.CUDAGraph()):
        x + 1
        raise ValueError
    assert not hasattr(caught.value, "__notes__")


def test_an_exception_in_a_hook_leaves_everything_as_before(lab: Lab) -> None:
    x, graph, before = fresh(lab, 64), cgraph.CUDAGraph(), lab.current()
    handle = cgraph.graph_pool_handle()

    def broken(_: cgraph.CUDAGraph) -> None:
        raise OSError("hook")

    graph.register_capture_end_hook(broken)
    with pytest.raises(OSError, match="hook"), cgraph.graph(graph, pool=handle):
        x + 1
    check_that_all_is_as_before(lab, before, handle)


def test_an_exception_in_an_instantiate_hook_leaves_everything_as_before(lab: Lab) -> None:
    x, graph, before = fresh(lab, 64), cgraph.CUDAGraph(), lab.current()
    handle = cgraph.graph_pool_handle()

    def broken(_: cgraph.CUDAGraph) -> None:
        raise OSError("hook")

    graph.register_post_instantiate_hook(broken)
    with pytest.raises(OSError, match="hook"), cgraph.graph(graph, pool=handle):
        x + 1
    check_that_all_is_as_before(lab, before, handle)
    graph.reset()


def test_a_failing_instantiate_leaves_everything_as_before(sim: SimLab) -> None:
    x, graph, before = fresh(sim, 64), cgraph.CUDAGraph(), sim.current()
    handle = cgraph.graph_pool_handle()
    sim.simulator.fail_next("cuGraphInstantiate", 2)
    with pytest.raises(InstantiateError, match="OUT_OF_MEMORY") as caught:
        with cgraph.graph(graph, pool=handle):
            x + 1
    assert caught.value.code == 2
    check_that_all_is_as_before(sim, before, handle)
    with cgraph.graph(graph):
        y = x + 2
    x.normal_()
    graph.replay()
    assert torch.equal(y, x + 2)


@pytest.mark.parametrize("code", [2, 801])
def test_a_failing_second_instantiate_leaves_the_exec(sim: SimLab, code: int) -> None:
    x, graph = fresh(sim, 64), cgraph.CUDAGraph(keep_graph=True)
    with cgraph.graph(graph):
        y = x + 1
    graph.instantiate()
    before = graph.raw_cuda_graph_exec()
    sim.simulator.fail_next("cuGraphInstantiate", code)
    with pytest.raises(InstantiateError):
        graph.instantiate()
    assert graph.raw_cuda_graph_exec() == before
    graph.replay()
    assert torch.equal(y, x + 1)


@pytest.mark.gpu
def test_a_failing_instantiate_leaves_everything_as_before_on_cuda() -> None:
    from cuda.bindings import driver

    from lab import CudaLab

    lab, graph = CudaLab(), cgraph.CUDAGraph(keep_graph=True)
    x, before = fresh(lab, 64), lab.current()
    with cgraph.graph(graph):
        y = (x + 1) * 2
    template = driver.CUgraph(graph.raw_cuda_graph())
    (_, nodes, count) = driver.cuGraphGetNodes(template, 8)
    assert count == 2
    # A cycle: the driver finds it when it instantiates.
    try:
        (code,) = driver.cuGraphAddDependencies(
            template, [nodes[1]], [nodes[0]], [driver.CUgraphEdgeData()], 1
        )
    except TypeError:
        (code,) = driver.cuGraphAddDependencies(template, [nodes[1]], [nodes[0]], 1)
    assert int(code) == 0
    with pytest.raises(InstantiateError):
        graph.instantiate()
    with pytest.raises(InstantiateError):
        graph.replay()
    handle = graph.pool()
    graph.reset()
    check_that_all_is_as_before(lab, before, handle)
    del y


def test_an_object_that_dies_inside_its_capture_ends_it(lab: Lab) -> None:
    x, stream = fresh(lab, 64), lab.stream()
    with lab.use(stream):
        graph = cgraph.CUDAGraph()
        graph.capture_begin()
        x + 1
        del graph
        gc.collect()
        assert not cgraph.is_current_stream_capturing()


def test_reset_inside_a_capture_ends_it(lab: Lab) -> None:
    x, graph = fresh(lab, 64), cgraph.CUDAGraph()
    with lab.use(lab.stream()):
        graph.capture_begin()
        x + 1
        graph.reset()
        assert not cgraph.is_current_stream_capturing()
    with cgraph.graph(graph):
        y = x + 1
    x.normal_()
    graph.replay()
    assert torch.equal(y, x + 1)


def scenario(x: torch.Tensor) -> None:
    graph = cgraph.CUDAGraph(keep_graph=True)
    with cgraph.graph(graph):
        y = torch.relu(x * 2) + 1
    graph.instantiate()
    graph.replay()
    assert torch.equal(y, torch.relu(x * 2) + 1)


def test_each_driver_call_failing_once_leaves_nothing_and_is_named(sim: SimLab) -> None:
    simulator, x = sim.simulator, torch.randn(64)
    scenario(x)
    start = len(simulator.calls())
    scenario(x)
    calls = len(simulator.calls()) - start
    gc.collect()
    simulator.synchronize()
    baseline = simulator.live()
    failures = 0
    for n in range(calls):
        simulator.fail_call(n, 719)
        try:
            scenario(x)
        except CgraphError as error:
            assert "719" in str(error) or "cu" in str(error), error
            failures += 1
            error.__traceback__ = None
            del error
        simulator.clear_faults()
        gc.collect()
        simulator.core.drive()
        simulator.device.collect()
        assert not cgraph.is_current_stream_capturing()
        assert simulator.live() == baseline
        scenario(x)
        gc.collect()
    assert failures > 5


@pytest.mark.parametrize("is_graphed", [False, True])
def test_a_stream_that_is_not_joined_is_said_with_the_fix_and_what_names_the_line(
    lab: Lab, is_graphed: bool
) -> None:
    side = lab.stream()

    def forks(x: torch.Tensor) -> torch.Tensor:
        lab.fork(side)
        with lab.use(side):
            x * 2
        return x + 1

    x = fresh(lab, 4)
    with pytest.raises(CaptureError, match="not joined") as caught:
        if is_graphed:
            graphed = cgraph.graphed(forks, on_fail="raise")
            graphed(x), graphed(x)
        else:
            with cgraph.graph(cgraph.CUDAGraph()):
                forks(x)
    notes = "\n".join(caught.value.__notes__)
    assert "stream.wait_stream(side); cgraph.explain(function, ...) names the operator" in notes
    (finding,) = cgraph.explain(forks, x).findings
    assert finding.line == forks.__code__.co_firstlineno + 3
    caught.value.__traceback__ = None
    assert torch.equal(cgraph.graphed(lambda x: x + 1)(x), x + 1)
