"""Random numbers: a replay draws what eager would have drawn."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import dropout

import cgraph
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


def test_trap_T83_two_graphs_and_eager_share_one_generator(lab: Lab) -> None:
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
