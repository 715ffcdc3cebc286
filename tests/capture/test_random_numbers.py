"""Random numbers: a replay draws what eager would have drawn."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch.nn.functional import dropout

import cgraph
from cgraph import _core
from cgraph._driver import Captured
from cgraph.errors import DriverError
from lab import Lab, captured, fresh


def state(lab: Lab) -> torch.Tensor:
    return torch.cuda.get_rng_state() if lab.device == "cuda" else torch.get_rng_state()


def test_replays_of_dropout_and_rand_equal_eager_with_the_same_seed(lab: Lab) -> None:
    x, graph = fresh(lab, 1 << 10), cgraph.CUDAGraph()
    with cgraph.graph(graph):
        y = dropout(x, 0.5)
        z = torch.rand(64, device=lab.device)
    torch.manual_seed(1234)
    replayed = []
    for _ in range(3):
        y.fill_(float("nan"))
        z.fill_(float("nan"))
        graph.replay()
        replayed.append((y.clone(), z.clone()))
    after = state(lab)
    torch.manual_seed(1234)
    for dropped, drawn in replayed:
        assert torch.equal(dropped, dropout(x, 0.5))
        assert torch.equal(drawn, torch.rand(64, device=lab.device))
    assert torch.equal(after, state(lab))


def test_consecutive_replays_draw_different_numbers(lab: Lab) -> None:
    graph = cgraph.CUDAGraph()
    with cgraph.graph(graph):
        y = torch.rand(64, device=lab.device)
    graph.replay()
    first = y.clone()
    graph.replay()
    assert not torch.equal(first, y)


def test_a_capture_leaves_the_generator_alone(lab: Lab) -> None:
    x, graph = fresh(lab, 64), cgraph.CUDAGraph()
    before = state(lab)
    with cgraph.graph(graph):
        dropout(x, 0.5)
    assert torch.equal(before, state(lab))


def test_a_graph_without_randomness_leaves_the_generator_alone(lab: Lab) -> None:
    graph, _ = captured(lab, x := fresh(lab, 64))
    before = state(lab)
    graph.replay()
    assert torch.equal(before, state(lab))
    assert graph._captured is not None
    assert graph._captured.random_step is None
    del x


def test_a_failed_capture_leaves_the_generator_usable(lab: Lab) -> None:
    x = fresh(lab, 64)
    torch.manual_seed(5)
    expected = torch.rand(8, device=lab.device)
    torch.manual_seed(5)
    with pytest.raises(ValueError), cgraph.graph(cgraph.CUDAGraph()):
        dropout(x, 0.5)
        raise ValueError
    assert torch.equal(expected, torch.rand(8, device=lab.device))


def test_two_graphs_and_eager_share_one_generator(lab: Lab) -> None:
    graphs = []
    for _ in range(2):
        graph = cgraph.CUDAGraph()
        with cgraph.graph(graph):
            y = torch.rand(16, device=lab.device)
        graphs.append((graph, y))
    torch.manual_seed(9)
    drawn = []
    for graph, y in [*graphs, graphs[0]]:
        graph.replay()
        drawn += [y.clone(), torch.rand(16, device=lab.device)]
    torch.manual_seed(9)
    for numbers in drawn:
        assert torch.equal(numbers, torch.rand(16, device=lab.device))


def generators(lab: Lab, count: int) -> list[torch.Generator]:
    return [torch.Generator(device=lab.device).manual_seed(100 + i) for i in range(count)]


def test_any_number_of_registered_generators_draws_what_eager_draws(lab: Lab) -> None:
    own, twins = generators(lab, 3), generators(lab, 3)
    graph = cgraph.CUDAGraph()
    for generator in own:
        graph.register_generator_state(generator)
    with cgraph.graph(graph):
        drawn = [torch.rand(32, device=lab.device, generator=one) for one in own[:2]]
        drawn.append(torch.randn(32, device=lab.device))
    torch.manual_seed(31)
    replayed = []
    for _ in range(4):
        graph.replay()
        replayed.append([tensor.clone() for tensor in drawn])
    after = state(lab)
    torch.manual_seed(31)
    for numbers in replayed:
        for found, twin in zip(numbers, twins[:2], strict=False):
            assert torch.equal(found, torch.rand(32, device=lab.device, generator=twin))
        assert torch.equal(numbers[2], torch.randn(32, device=lab.device))
    assert torch.equal(after, state(lab))
    for one, twin in zip(own, twins, strict=True):
        assert torch.equal(one.get_state(), twin.get_state())


def test_a_generator_that_was_not_registered_is_refused(lab: Lab) -> None:
    (generator,) = generators(lab, 1)
    x = fresh(lab, 8)
    if lab.device == "cuda" and hasattr(torch._C._CUDAGraph, "capture_end_pre"):
        return  # newer torch registers generators by itself
    with pytest.raises(RuntimeError), cgraph.graph(cgraph.CUDAGraph()):
        x.uniform_(generator=generator)
    assert torch.equal(x.uniform_(generator=generator), x)


def test_a_new_seed_between_replays_counts_from_the_next_replay_on(lab: Lab) -> None:
    graph = cgraph.CUDAGraph()
    with cgraph.graph(graph):
        y = torch.rand(64, device=lab.device)
    for seed in (3, 2**40 + 1, 3):
        torch.manual_seed(seed)
        graph.replay()
        found = y.clone()
        torch.manual_seed(seed)
        assert torch.equal(found, torch.rand(64, device=lab.device))


def test_a_saved_state_brings_the_same_numbers_back(lab: Lab) -> None:
    graph = cgraph.CUDAGraph()
    with cgraph.graph(graph):
        y = dropout(torch.ones(512, device=lab.device), 0.5)
    saved = state(lab)
    graph.replay()
    first = y.clone()
    graph.replay()
    assert not torch.equal(first, y)
    if lab.device == "cuda":
        torch.cuda.set_rng_state(saved)
    else:
        torch.set_rng_state(saved)
    graph.replay()
    assert torch.equal(first, y)


def test_replays_inside_fork_rng_leave_the_state_outside_alone(lab: Lab) -> None:
    graph = cgraph.CUDAGraph()
    with cgraph.graph(graph):
        y = torch.rand(64, device=lab.device)
    before = state(lab)
    devices = [torch.cuda.current_device()] if lab.device == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(8)
        graph.replay()
        found = y.clone()
        torch.manual_seed(8)
        assert torch.equal(found, torch.rand(64, device=lab.device))
    assert torch.equal(before, state(lab))


def test_a_checkpointed_block_draws_the_same_numbers_forwards_and_backwards(lab: Lab) -> None:
    x = fresh(lab, 256).requires_grad_()

    def block(x: torch.Tensor) -> torch.Tensor:
        return dropout(x, 0.5) * 3

    graph = cgraph.CUDAGraph()
    with cgraph.graph(graph):
        y = block(x)
        (grad,) = torch.autograd.grad(y.sum(), x)
    graph.replay()
    # Where the mask has kept a value, its gradient is 6, and elsewhere 0.
    assert torch.equal(grad, torch.where(y == 0, 0.0, 6.0))
    graph.replay()
    assert torch.equal(grad, torch.where(y == 0, 0.0, 6.0))


def test_a_re_instantiated_graph_goes_on_drawing(lab: Lab) -> None:
    graph = cgraph.CUDAGraph(keep_graph=True)
    with cgraph.graph(graph):
        y = torch.rand(64, device=lab.device)
    torch.manual_seed(4)
    found = []
    for _ in range(3):
        graph.instantiate()
        graph.replay()
        found.append(y.clone())
    torch.manual_seed(4)
    for numbers in found:
        assert torch.equal(numbers, torch.rand(64, device=lab.device))


class Counter:
    """A generator whose draws are all visible."""

    def __init__(self, seed: int, offset: int) -> None:
        self.seed, self.offset = seed, offset

    def initial_seed(self) -> int:
        return self.seed

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        self.offset = offset


def test_the_native_step_stores_seed_and_offset_and_moves_the_offset_by_its_step() -> None:
    sim = _core.Sim()
    device = _core.Device.sim(sim)
    stream, pool = _core.Stream(device), _core.Pool(device, sim=sim)
    words = pool.allocate(stream, 32)
    memory = (ctypes.c_uint64 * 4).from_address(words.host_address)
    seen: list[list[int]] = []
    capture = _core.Capture.begin(stream, "global")
    sim.launch(stream, "draw", lambda: seen.append(list(memory)))
    template = capture.finish()
    addresses = [words.address + 8 * i for i in range(4)]
    reader = _core.TensorReader(torch.Tensor, None)
    counters = [Counter(2**63 + 5, 8), Counter(7, 400)]
    graph = _core.Graph()
    graph._adopt(
        Captured(
            template,
            pools=[],
            current=(lambda ordinal: stream.handle, lambda ordinal: False),
            ordinal=0,
            inputs=_core.Inputs(template, reader, [], addresses),
            generators=[(counters[0], 4), (counters[1], 12)],
        )
    )
    graph._instantiate(False)
    for _ in range(2):
        graph.replay()
        sim.drive()
    sim.fail_next("cuGraphLaunch", 999)
    with pytest.raises(DriverError, match="cuGraphLaunch"):
        graph.replay()
    assert [counter.offset for counter in counters] == [16, 424]
    graph.replay()
    sim.drive()
    assert seen == [
        [2**63 + 5, 8, 7, 400],
        [2**63 + 5, 12, 7, 412],
        [2**63 + 5, 16, 7, 424],
    ]
    graph._clear()
