"""The simulator with torch's CPU tensors: errors that show up on it as on a GPU."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import cgraph
from cgraph import _core, _driver
from cgraph.errors import CaptureError, DriverError, LivenessError
from fresh_results import capture
from lab import Lab, SimLab, captured, fresh


def test_outputs_hold_poison_until_a_replay(sim: SimLab) -> None:
    x = fresh(sim, 16)
    graph, y = captured(sim, x)
    assert y.isnan().all()
    graph.replay()
    assert torch.equal(y, x * 2 + 1)


def test_a_stale_input_raises_and_names_the_operator(sim: SimLab) -> None:
    x = fresh(sim, 16)
    graph, _ = captured(sim, x)
    del x
    gc.collect()
    with pytest.raises(LivenessError, match=r"\(16,\).*aten.mul.*freed"):
        graph.replay()


def test_after_a_stale_input_the_simulator_goes_on(sim: SimLab) -> None:
    x = fresh(sim, 16)
    graph, _ = captured(sim, x)
    del x
    gc.collect()
    with pytest.raises(LivenessError):
        graph.replay()
    z = fresh(sim, 16)
    other, w = captured(sim, z)
    other.replay()
    assert torch.equal(w, z * 2 + 1)


def test_a_moved_input_raises(sim: SimLab) -> None:
    x = fresh(sim, 16)
    graph, _ = captured(sim, x)
    x.untyped_storage().resize_(1 << 20)
    with pytest.raises(LivenessError, match="moved"):
        graph.replay()


def test_a_later_capture_overwrites_what_an_earlier_one_used_only_inside(sim: SimLab) -> None:
    x, handle, stream = fresh(sim, 1 << 10), cgraph.graph_pool_handle(), sim.stream()
    first, second = cgraph.CUDAGraph(), cgraph.CUDAGraph()
    with cgraph.graph(first, pool=handle, stream=stream):
        kept = torch.relu(x * 2)
    address = kept.data_ptr()
    del kept
    with cgraph.graph(second, pool=handle, stream=stream):
        y = x - 1
        z = y * 3
    assert address in {y.data_ptr(), z.data_ptr()}
    second.replay()
    expected = (x - 1) * 3
    assert torch.equal(z, expected)
    first.replay()
    assert not (torch.equal(z, expected) and torch.equal(y, x - 1))


@pytest.mark.parametrize("operator", [torch.nonzero, torch.Tensor.item, torch.unique])
def test_operators_that_wait_for_the_device_break_the_capture(
    sim: SimLab, operator: object
) -> None:
    x = torch.ones(1)
    with pytest.raises(CaptureError, match="value from the device") as caught:
        with cgraph.graph(cgraph.CUDAGraph()):
            operator(x * 2)  # type: ignore[operator]
    assert caught.value.code == 900


def test_nothing_can_be_captured_after_the_break(sim: SimLab) -> None:
    x = torch.ones(1)
    with pytest.raises(DriverError, match="901"), cgraph.graph(cgraph.CUDAGraph()):
        with pytest.raises(CaptureError):
            (x * 2).item()
        x * 3


def test_views_and_in_place_operators_work_on_captured_memory(sim: SimLab) -> None:
    x, graph = fresh(sim, 6, 4), cgraph.CUDAGraph()
    with cgraph.graph(graph):
        y = x.t().contiguous()
        y[1:, ::2].mul_(3)
        z = y.view(-1)[3:9] + x.select(0, 2).sum()
    graph.replay()
    expected = x.t().contiguous()
    expected[1:, ::2].mul_(3)
    assert torch.equal(y, expected)
    assert torch.equal(z, expected.view(-1)[3:9] + x.select(0, 2).sum())


def test_factories_and_literals_are_captured(sim: SimLab) -> None:
    x, graph = fresh(sim, 8), cgraph.CUDAGraph()
    with cgraph.graph(graph):
        y = torch.arange(8) * x + torch.tensor(2.5) + torch.full((8,), 3.0)
        y[0] = 7
    x.normal_()
    graph.replay()
    expected = torch.arange(8) * x + torch.tensor(2.5) + torch.full((8,), 3.0)
    expected[0] = 7
    assert torch.equal(y, expected)


def test_a_backward_inside_the_capture_gives_eagers_gradients(sim: SimLab) -> None:
    layer, x = torch.nn.Linear(8, 8), fresh(sim, 4, 8)
    graph = cgraph.CUDAGraph()
    with cgraph.graph(graph):
        layer(x).square().sum().backward()
    gradient = layer.weight.grad
    assert gradient is not None and sim.in_pool(gradient, graph.pool())
    x.normal_()
    graph.replay()
    (expected,) = torch.autograd.grad(layer(x).square().sum(), [layer.weight])
    assert torch.equal(gradient, expected)


def test_adam_with_capturable_steps_as_on_a_gpu(sim: SimLab) -> None:
    layer = torch.nn.Linear(4, 4)
    twin = torch.nn.Linear(4, 4)
    twin.load_state_dict(layer.state_dict())
    x = fresh(sim, 2, 4)
    steps = []
    for module in (layer, twin):
        optimizer = torch.optim.Adam(module.parameters(), lr=0.1, capturable=True)

        def step(module: torch.nn.Linear = module, optimizer: torch.optim.Adam = optimizer) -> None:
            optimizer.zero_grad(set_to_none=True)
            module(x).square().sum().backward()
            optimizer.step()

        steps.append(step)
        step()
    graph = cgraph.CUDAGraph()
    with cgraph.graph(graph):
        steps[0]()
    for _ in range(5):
        x.normal_()
        graph.replay()
        steps[1]()
    assert torch.equal(layer.weight, twin.weight)
    assert torch.equal(layer.bias, twin.bias)


def test_an_asynchronous_simulator_leaves_replays_in_flight() -> None:
    with cgraph.sim.use(asynchronous=True) as simulator:
        x, graph = torch.ones(4), cgraph.CUDAGraph()
        with cgraph.graph(graph):
            y = x + 1
        graph.replay()
        assert y.isnan().all()
        assert simulator.step()
        assert torch.equal(y, x + 1)
        graph.replay()
        del graph
        gc.collect()
        simulator.synchronize()


def test_an_asynchronous_simulator_finishes_a_replay_that_moves_tensors() -> None:
    with cgraph.sim.use(asynchronous=True) as simulator:
        graph, _ = capture(lambda x: [x.cumsum(0)], torch.randn(4, 3))
        for _ in range(3):
            x = torch.randn(4, 3)
            assert torch.equal(graph._replay_fresh((x,))[0], x.cumsum(0))
        assert not simulator.step()
        graph.replay()
        assert simulator.step()
        simulator.synchronize()


def test_what_torch_copies_to_a_static_input_comes_behind_replays_in_flight() -> None:
    with cgraph.sim.use(asynchronous=True) as simulator:
        static, total = torch.randn(2, 3), torch.zeros(2, 3)
        graph, _ = capture(lambda x: [total.add_(x)], static)
        before, x = static.clone(), torch.randn(3, 2)
        graph.replay()
        graph._replay_with((x.t(),))  # of other strides
        assert torch.equal(total, before + x.t())
        simulator.synchronize()


def test_the_same_seed_runs_forked_work_in_the_same_order() -> None:
    def order(seed: int) -> list[int]:
        ran: list[int] = []
        with cgraph.sim.use(seed=seed) as simulator:
            streams = [simulator.new_stream() for _ in range(4)]
            for n, stream in enumerate(streams):
                for step in range(4):
                    simulator.core.launch(
                        stream, "k", lambda n=n, step=step: ran.append(4 * n + step)
                    )
            simulator.synchronize()
        return ran

    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(8)}) > 1


def test_memory_is_limited() -> None:
    with cgraph.sim.use(memory=4 << 20):
        with pytest.raises(MemoryError, match=r"requested.*limit 4194304"):
            with cgraph.graph(cgraph.CUDAGraph()):
                torch.zeros(8 << 20)


def test_outside_a_capture_operators_run_at_once(sim: SimLab) -> None:
    with cgraph.graph(cgraph.CUDAGraph()):
        torch.ones(3) + 1
        with sim.use(sim.stream()):
            eager = torch.ones(3) + 1
    assert torch.equal(eager, torch.full((3,), 2.0))


def test_a_kernel_that_raises_raises_from_the_replay(sim: SimLab) -> None:
    x, index = torch.randn(4), torch.tensor([1, 2])
    graph = cgraph.CUDAGraph()
    with cgraph.graph(graph):
        y = x.index_select(0, index)
    index.fill_(99)
    with pytest.raises((IndexError, RuntimeError), match="index"):
        graph.replay()
    index.fill_(1)
    graph.replay()
    assert torch.equal(y, x[[1, 1]])


def test_a_literal_has_its_value_again_in_each_replay(sim: SimLab) -> None:
    x, graph = fresh(sim, 4), cgraph.CUDAGraph()
    with cgraph.graph(graph):
        literal = torch.tensor(0.0)
        literal += 1
        y = literal * x
    for _ in range(3):
        graph.replay()
        assert torch.equal(y, x)


def test_a_replay_in_flight_is_not_recorded_into_a_later_capture() -> None:
    with cgraph.sim.use(asynchronous=True) as simulator:
        x, first, second = torch.randn(4), cgraph.CUDAGraph(), cgraph.CUDAGraph(keep_graph=True)
        with cgraph.graph(first):
            y = x * 2 + 1
        first.replay()
        with simulator.stream(simulator.new_stream()):
            second.capture_begin(capture_error_mode="relaxed")
            z = x - 1
            simulator.drive()
            second.capture_end()
        assert torch.equal(y, x * 2 + 1)
        assert second._template.count() == 1
        second.replay()
        simulator.synchronize()
        assert torch.equal(z, x - 1)


def test_a_generator_must_be_registered(sim: SimLab) -> None:
    generator = torch.Generator()
    with pytest.raises(CaptureError, match="register_generator_state"):
        with cgraph.graph(cgraph.CUDAGraph()):
            torch.rand(4, generator=generator)
    graph = cgraph.CUDAGraph()
    graph.register_generator_state(generator)
    with cgraph.graph(graph):
        y = torch.rand(4, generator=generator)
    generator.manual_seed(3)
    graph.replay()
    assert torch.equal(y, torch.rand(4, generator=torch.Generator().manual_seed(3)))


def test_a_capture_ended_on_another_thread_is_abandoned(sim: SimLab) -> None:
    x, graph, errors = fresh(sim, 4), cgraph.CUDAGraph(), []

    def end() -> None:
        with sim.use(stream):
            try:
                graph.capture_end()
            except CaptureError as error:
                errors.append(str(error))

    stream = sim.stream()
    with sim.use(stream):
        graph.capture_begin(capture_error_mode="relaxed")
        x + 1
        thread = threading.Thread(target=end)
        thread.start()
        thread.join()
    assert "another thread" in errors[0]
    assert torch.equal(x + 1, torch.add(x, 1))
    other, y = captured(sim, x)
    other.replay()
    assert torch.equal(y, x * 2 + 1)


def test_a_mode_that_the_user_left_open_stays_open(sim: SimLab) -> None:
    class Counting(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            type(self).count += 1
            return func(*args, **(kwargs or {}))

    x, graph, mode = fresh(sim, 4), cgraph.CUDAGraph(), Counting()
    with sim.use(sim.stream()):
        graph.capture_begin()
        mode.__enter__()
        y = x + 1
        graph.capture_end()
        before = Counting.count
        assert torch.equal(x + 2, torch.add(x, 2))
        assert Counting.count > before
        mode.__exit__(None, None, None)
    graph.replay()
    assert torch.equal(y, x + 1)


def test_a_capture_while_another_thread_is_capturing_is_refused_and_that_one_is_right(
    sim: SimLab,
) -> None:
    x, graph, refused = torch.randn(16), cgraph.CUDAGraph(), []

    def work() -> None:
        with sim.use(sim.stream()):
            with pytest.raises(CaptureError, match="is capturing on the simulator") as error:
                cgraph.CUDAGraph().capture_begin(capture_error_mode="thread_local")
        refused.append(error)

    with cgraph.graph(graph):
        y = torch.relu(x * 2)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        y = y + 1
    assert refused
    graph.replay()
    assert torch.equal(y, torch.relu(x * 2) + 1)
    with cgraph.graph(again := cgraph.CUDAGraph()):
        z = x + 1
    again.replay()
    assert torch.equal(z, x + 1)


def test_a_graph_that_its_simulator_refers_to_is_collected() -> None:
    with cgraph.sim.use() as simulator:
        graph, _ = captured(SimLab(simulator), x := torch.randn(4))
        simulator.graph = graph  # type: ignore[attr-defined]
    dead = weakref.ref(graph)
    del graph, simulator, x
    gc.collect()
    assert dead() is None


def test_events_order_streams_and_fork_captures(sim: SimLab) -> None:
    x, side, graph = fresh(sim, 8), sim.stream(), cgraph.CUDAGraph()
    forked, joined = _core.Event(sim.simulator.device), _core.Event(sim.simulator.device)
    with cgraph.graph(graph):
        y = x * 2
        sim.current().record_event(forked)
        side.wait_event(forked)
        with sim.use(side):
            z = y + 1
        side.record_event(joined)
        sim.current().wait_event(joined)
        total = y + z
    x.normal_()
    graph.replay()
    assert torch.equal(total, x * 2 + (x * 2 + 1))
    event, ran = _core.Event(sim.simulator.device), []
    sim.simulator.core.launch(side, "kernel", lambda: ran.append(1))
    side.record_event(event)
    assert not event.query() and not side.query()
    event.synchronize()
    assert ran == [1] and event.query() and side.query()


def test_operators_that_need_no_value_are_captured_whatever_they_return(lab: Lab) -> None:
    x, y = fresh(lab, 4), fresh(lab, 4)
    graph = cgraph.CUDAGraph()
    with cgraph.graph(graph):
        known = x.is_same_size(y), x.is_set_to(x), x.is_set_to(y), x.is_pinned()
        z = x * 2
    z.fill_(77)
    graph.replay()
    assert known == (True, True, False, False) and torch.equal(z, x * 2)


@pytest.mark.parametrize("seed", ["seed", "state", "own"])
def test_a_capture_that_sets_a_random_state_is_refused(sim: SimLab, seed: str) -> None:
    generator = torch.Generator()
    other = torch.Generator().manual_seed(7).get_state()
    graph = cgraph.CUDAGraph()
    graph.register_generator_state(generator)
    with (
        pytest.raises(CaptureError, match="seeds random numbers or sets their state"),
        cgraph.graph(graph),
    ):
        if seed == "seed":
            torch.manual_seed(torch.initial_seed() + 1)
        elif seed == "state":
            torch.set_rng_state(other)
        else:
            generator.set_state(other)
    x = fresh(sim, 4)
    with cgraph.graph(graph):
        y = x * 2
    graph.replay()
    assert torch.equal(y, x * 2)


def test_a_capture_of_a_sparse_result_is_refused(sim: SimLab) -> None:
    table = torch.nn.Embedding(10, 3, sparse=True)
    function = cgraph.graphed(table)
    with pytest.warns(UserWarning, match="its result is torch.sparse_coo"):
        for _ in range(2):
            function(torch.tensor([1, 2])).sum().backward()
    assert table.weight.grad is not None and table.weight.grad.is_sparse
    other = cgraph.graphed(lambda x: x.to_sparse())
    with pytest.warns(UserWarning, match="runs eagerly"):
        assert all(other(torch.ones(2)).is_sparse for _ in range(3))


def test_a_replay_computes_in_the_dtypes_of_the_capture_under_autocast(lab: Lab) -> None:
    x, weight = fresh(lab, 8, 8), fresh(lab, 8, 8)
    torch.mm(x, weight)  # loads its library
    graph = cgraph.CUDAGraph()
    with cgraph.graph(graph):
        y = x @ weight
    graph.replay()
    lab.sync()
    expected = y.clone()
    y.fill_(77)
    with torch.autocast(lab.device, torch.bfloat16):
        graph.replay()
    lab.sync()
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, expected, rtol=0, atol=0)


@pytest.mark.parametrize("norm", [nn.LayerNorm(8), nn.GroupNorm(2, 8), nn.BatchNorm1d(8)])
@pytest.mark.parametrize("is_mixed", [False, True])
def test_norms_of_mixed_types_have_the_results_and_gradients_of_eager(
    lab: Lab, norm: nn.Module, is_mixed: bool
) -> None:
    # On CUDA only that of batches takes two types.
    is_mixed &= lab.device == "cpu" or isinstance(norm, nn.BatchNorm1d)
    kind = torch.bfloat16
    mine = nn.Sequential(nn.Linear(6, 8), copy.deepcopy(norm), nn.Linear(8, 6)).to(lab.device)
    mine[0].to(kind)
    mine[1].to(torch.float32 if is_mixed else kind)
    mine[2].to(kind)
    eager = copy.deepcopy(mine)
    graphed = cgraph.graphed(mine, on_fail="raise")
    for _ in range(3):
        x = fresh(lab, 5, 6).to(kind)
        found = [run(x) for run in (graphed, eager)]
        assert torch.allclose(*found, rtol=2e-2, atol=2e-2)
        for one, net in zip(found, (mine, eager), strict=True):
            net.zero_grad()
            one.float().square().mean().backward()
        for one, other in zip(mine.parameters(), eager.parameters(), strict=True):
            assert one.grad is not None and other.grad is not None
            assert one.grad.dtype == one.dtype
            assert torch.allclose(one.grad, other.grad, rtol=5e-2, atol=5e-2)
        del found, one


def test_simulators_in_force_in_any_order_leave_what_was_before() -> None:
    before = _driver.current()
    first, second = cgraph.sim.use(), cgraph.sim.use()
    one, other = first.__enter__(), second.__enter__()
    assert _driver.current() is other
    first.__exit__(None, None, None)
    assert _driver.current() is other is not one
    second.__exit__(None, None, None)
    assert _driver.current() is before
