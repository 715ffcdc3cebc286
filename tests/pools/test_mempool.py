"""`MemPool`: sharing, lifetime, limits, addresses and numbers."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import cgraph
from cgraph import MemPool
from cgraph.errors import (
    ArgumentError,
    ForeignError,
    OutOfMemoryError,
    StateError,
)
from lab import Lab, SimLab, fresh
from pools import MIB, capture, check, fail, handles

SEGMENT = 2 * MIB
NAMES = {"in_use", "peak", "reserved", "mapped", "leaving", "kept", "addresses"}


@pytest.mark.parametrize("begin", ["graph", "capture_begin"])
def test_outputs_lie_in_the_pool_that_a_capture_was_given(lab: Lab, begin: str) -> None:
    x, pool, graph = fresh(lab, 64), MemPool(), cgraph.CUDAGraph()
    lab.sync()
    if begin == "graph":
        with cgraph.graph(graph, pool=pool):
            y = x * 2
    else:
        with lab.use(lab.stream()):
            graph.capture_begin(pool=pool)
            y = x * 2
            graph.capture_end()
    assert lab.in_pool(y, pool.id)
    assert graph.pools() == [pool.id]
    check(graph, x, y)


def test_captures_without_a_pool_have_one_each(lab: Lab) -> None:
    x = fresh(lab, 64)
    (first, y), (second, z) = capture(lambda: x * 2), capture(lambda: x * 3)
    assert MemPool.of(first) is not MemPool.of(second)
    assert lab.in_pool(y, MemPool.of(first).id) and lab.in_pool(z, MemPool.of(second).id)


def test_the_token_of_a_pool_has_one_half_that_is_not_zero(lab: Lab) -> None:
    x = fresh(lab, 64)
    graph, _ = capture(lambda: x * 2)
    for token in (MemPool().id, graph.pool(), cgraph.graph_pool_handle()):
        assert sorted(map(bool, token)) == [False, True]


def test_the_pool_of_a_capture_is_known_inside_it(lab: Lab) -> None:
    x, graph, seen = fresh(lab, 64), cgraph.CUDAGraph(), list[MemPool]()
    with cgraph.graph(graph):
        y = x * 2
        seen.append(MemPool.of(graph))
    assert seen == [MemPool.of(graph)]
    check(graph, x, y)


def test_memory_that_one_capture_used_only_inside_serves_the_next(lab: Lab) -> None:
    x, pool, first = fresh(lab, 64), MemPool(), cgraph.CUDAGraph()
    with cgraph.graph(first, pool=pool):
        torch.empty(MIB, device=lab.device)
        x.add_(0)
    before = pool.stats()["reserved"]
    large = fresh(lab, MIB)
    graph, y = capture(lambda: large * 2, pool)
    assert pool.stats()["reserved"] == before
    check(graph, large, y)


def test_of_finds_the_pool_of_a_graph_a_token_and_a_pool(lab: Lab) -> None:
    x, pool, token = fresh(lab, 64), MemPool(), cgraph.graph_pool_handle()
    graph, _ = capture(lambda: x * 2, pool)
    assert all(MemPool.of(one) is pool for one in (graph, graph.pool(), pool.id, pool))
    assert MemPool.of(token).id == token


def test_of_refuses_a_token_of_no_pool_and_a_graph_without_a_capture(lab: Lab) -> None:
    with pytest.raises(ForeignError, match=r"1099511627776.*MemPool"):
        MemPool.of((0, 1 << 40))
    with pytest.raises(StateError, match="before a successful capture"):
        MemPool.of(cgraph.CUDAGraph())


def test_graphs_that_share_a_pool_replay_right_with_outputs_that_are_alive(lab: Lab) -> None:
    x, pool = fresh(lab, 1 << 12), MemPool()
    made = [capture(lambda factor=factor: x * factor, pool) for factor in range(2, 6)]
    assert len(pool.segments()) == 1
    x.normal_()
    for graph, _ in made:
        graph.replay()
    assert all(torch.equal(y, x * (2 + place)) for place, (_, y) in enumerate(made))


def test_a_pool_is_captured_into_again_after_its_last_graph_died(lab: Lab) -> None:
    x, pool = fresh(lab, 64), MemPool()
    for token in (pool, pool.id, cgraph.graph_pool_handle()):
        for _ in range(3):
            graph, y = capture(lambda: x * 2, token)
            check(graph, x, y)
            graph.reset()
            del graph, y
            gc.collect()


def test_a_graph_keeps_its_pool_when_the_object_dies_first(lab: Lab) -> None:
    x, pool = fresh(lab, 1 << 12), MemPool()
    graph, y = capture(lambda: torch.relu(x * 2) * 2, pool)
    token = pool.id
    del pool
    other = [fresh(lab, 1 << 12) for _ in range(4)]
    assert token in handles()
    x.normal_()
    graph.replay()
    assert torch.equal(y, torch.relu(x * 2) * 2) and len(other) == 4


def test_the_bytes_reserved_are_those_of_the_statistics(lab: Lab) -> None:
    pool = cgraph.MemPool()
    graph, x = cgraph.CUDAGraph(), fresh(lab, 1 << 18)
    assert pool._core.reserved == pool.stats()["reserved"] == 0
    with cgraph.graph(graph, pool=pool):
        y = x * 2
    assert pool._core.reserved == pool.stats()["reserved"] >= y.nbytes


@pytest.mark.parametrize("kept", [True, False], ids=["with the object", "without the object"])
def test_outputs_outlive_their_graph(lab: Lab, kept: bool) -> None:
    x = fresh(lab, 1 << 12)
    pool = MemPool() if kept else None
    graph, y = capture(lambda: x * 2, pool)
    graph.replay()
    graph.reset()
    del graph
    gc.collect()
    others = [capture(lambda: x * 3) for _ in range(3)]
    for other, _ in others:
        other.replay()
    assert torch.equal(y, x * 2)


def test_a_pool_goes_with_its_last_graph_tensor_and_object(lab: Lab) -> None:
    before = handles()
    x, pool = fresh(lab, 64), MemPool()
    first, y = capture(lambda: x * 2, pool)
    second, z = capture(lambda: x * 3, pool)
    assert handles() == before | {pool.id}
    first.reset()
    token = pool.id
    del pool, y, z
    assert token in handles()
    del second
    assert handles() == before


def test_a_failed_capture_leaves_no_pool_and_the_given_one_usable(lab: Lab) -> None:
    x, pool = fresh(lab, 1 << 12), MemPool(limit=SEGMENT)
    before = handles()
    for _ in range(3):
        fail(x)
        fail(x, pool)
    assert handles() == before
    graph, y = capture(lambda: x * 2, pool)
    check(graph, x, y)
    assert pool.stats()["reserved"] == SEGMENT


def test_a_capture_that_needs_more_than_the_limit_names_the_numbers(lab: Lab) -> None:
    x, small = fresh(lab, 4 * MIB), MemPool(limit=8 * MIB)
    before = small.stats()
    with pytest.raises(OutOfMemoryError, match=r"16777216 .*requested.*in use.*reserved") as caught:
        capture(lambda: x * 2, small)
    assert isinstance(caught.value, MemoryError) and f"limit {8 * MIB}" in str(caught.value)
    del caught
    gc.collect()
    assert small.stats()["reserved"] == before["reserved"] == 0
    assert not cgraph.is_current_stream_capturing()
    graph, y = capture(lambda: x * 2, MemPool(limit=32 * MIB))
    check(graph, x, y)


def test_a_limit_that_is_just_enough_is_enough(lab: Lab) -> None:
    x, pool = fresh(lab, 3 * MIB), MemPool(limit=12 * MIB)
    assert pool.limit == 12 * MIB
    graph, y = capture(lambda: x * 2, pool)
    check(graph, x, y)
    with pytest.raises(OutOfMemoryError):
        capture(lambda: x * 3, pool)
    gc.collect()
    check(graph, x, y)


def test_segments_begin_at_the_base(sim: SimLab) -> None:
    x, base = fresh(sim, 64), 1 << 40
    pool = MemPool(base=base)
    graph, y = capture(lambda: x * 2, pool)
    assert pool.segments() == [(base, SEGMENT)] and pool.ranges()[0][0] == base
    check(graph, x, y)


def test_segments_lie_at_multiples_of_two_mebibytes_inside_the_ranges(lab: Lab) -> None:
    x, pool = fresh(lab, 4 * MIB), MemPool(base=0x5000_0000_0000)
    _made = [capture(lambda: x * 2, pool), capture(lambda: x[:64] * 2, pool)]
    for start, size in pool.segments():
        assert start % SEGMENT == size % SEGMENT == 0
        assert any(a <= start and start + size <= a + n for a, n in pool.ranges())


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "x", 1 << 70])
@pytest.mark.parametrize("name", ["limit", "base"])
def test_a_limit_or_base_that_cannot_be_is_refused_by_its_value(
    lab: Lab, name: str, value: Any
) -> None:
    before = handles()
    with pytest.raises(ArgumentError) as caught:
        MemPool(**{name: value})
    assert str(caught.value).startswith(f"{name} is {value!r}, expected")
    del caught
    assert handles() == before


@pytest.mark.parametrize("base", [1, (1 << 40) + 4096, 1 << 47])
def test_a_base_that_is_misaligned_or_too_high_is_refused(lab: Lab, base: int) -> None:
    with pytest.raises(ArgumentError, match=f"base is {base}, .*multiple of 2 MiB"):
        MemPool(base=base)


def test_a_pool_of_another_simulator_is_refused(sim: SimLab) -> None:
    x, pool = fresh(sim, 64), MemPool()
    with cgraph.sim.use():
        with pytest.raises(ForeignError, match="another device"):
            capture(lambda: x * 2, pool)
        graph, y = capture(lambda: x * 2)
        check(graph, x, y)
    graph, y = capture(lambda: x * 3, pool)
    check(graph, x, y, 3)


@pytest.mark.gpu
def test_a_pool_of_the_simulator_is_refused_on_cuda() -> None:
    with cgraph.sim.use():
        pool = MemPool()
    x = torch.randn(64, device="cuda")
    with pytest.raises(ForeignError, match="simulator"):
        capture(lambda: x * 2, pool)


def test_trim_gives_back_what_nothing_uses_and_only_that(sim: SimLab) -> None:
    x, pool = fresh(sim, MIB), MemPool()
    graph, y = capture(lambda: x * 2, pool)
    assert pool.trim() == 0
    graph.reset()
    assert pool.trim() == 0  # the output is alive
    del y
    assert pool.trim() == 4 * MIB
    assert pool.stats()["mapped"] == 0 and sim.simulator.live()["pages"] == 0
    graph, y = capture(lambda: x * 3, pool)
    check(graph, x, y, 3)


def test_stats_have_their_names_and_agree_with_the_segments(lab: Lab) -> None:
    x, pool = fresh(lab, MIB), MemPool()
    assert set(pool.stats()) == NAMES
    assert all(type(value) is int and value == 0 for value in pool.stats().values())
    _made = [capture(lambda: torch.relu(x * 2), pool) for _ in range(2)]
    stats = pool.stats()
    assert stats["reserved"] == stats["mapped"] == sum(size for _, size in pool.segments()) > 0
    assert 2 * 4 * MIB <= stats["in_use"] <= stats["peak"] <= stats["reserved"]
    assert stats["addresses"] == sum(size for _, size in pool.ranges())
    assert f"{stats['mapped']} bytes" in repr(pool) and "MemPool" in repr(pool)


def test_a_pool_that_a_capture_uses_is_refused_to_another(sim: SimLab) -> None:
    x, pool = fresh(sim, 64), MemPool()
    first = cgraph.CUDAGraph()
    with cgraph.graph(first, pool=pool, capture_error_mode="thread_local"):
        y = x * 2
        with sim.use(sim.stream()), pytest.raises(ForeignError, match="another capture"):
            cgraph.CUDAGraph().capture_begin(pool=pool, capture_error_mode="thread_local")
    first.replay()
    sim.sync()
    assert torch.equal(y, x * 2)


def test_what_looks_at_a_paused_pool_says_that_it_is_paused(lab: Lab) -> None:
    pool, graph, x = MemPool(), cgraph.CUDAGraph(), fresh(lab, 4)
    with cgraph.graph(graph, pool=pool):
        y = x * 2
    lab.sync()
    pool.pause()
    with pytest.raises(cgraph.errors.StateError, match=r"paused.*resume\(\)"):
        cgraph.GraphLadder(pool).capture(1, lambda x: x * 2, x)
    other = fresh(lab, 4)
    assert cgraph.weak_ref(other) is not None
    pool.resume()
    graph.replay()
    assert torch.equal(y, x * 2)


def test_a_second_trim_after_a_ladder_was_cleared_finds_nothing_more_to_give_back(lab: Lab) -> None:
    pool = MemPool()
    ladder = cgraph.GraphLadder(pool)
    with torch.no_grad():
        ladder.capture(1, lambda x: (x @ x.t()).relu() @ x, fresh(lab, 512, 64))
        ladder.clear()
    given_back = pool.trim()
    assert pool.trim() == 0
    if lab.device == "cpu":
        # On CUDA, torch keeps what it has freed for the next capture.
        assert given_back > 0
        assert pool.stats()["mapped"] == 0


def test_a_replay_that_reads_memory_of_a_paused_pool_is_refused_until_that_goes_on(
    lab: Lab,
) -> None:
    weights, others = MemPool(), MemPool()
    x, made = fresh(lab, 8), cgraph.CUDAGraph()
    with cgraph.graph(made, pool=weights):
        weight = x * 2
    made.replay()
    graphs = [cgraph.CUDAGraph() for _ in range(2)]
    with cgraph.graph(graphs[0]):
        y = x + weight
    with cgraph.graph(graphs[1], pool=others):
        z = x + 1
    lab.sync()
    right = x + x * 2
    weights.pause("host")
    with pytest.raises(cgraph.errors.StateError, match=r"paused.*resume"):
        graphs[0].replay()
    graphs[1].replay()
    weights.resume()
    graphs[0].replay()
    lab.sync()
    assert torch.equal(y, right)
    assert torch.equal(z, x + 1)
    # The graph that reads it keeps no segment of the pool.
    del made, weight
    lab.sync()
    assert weights.stats()["in_use"] == 0 or lab.device == "cuda"


def test_a_replay_that_reads_what_a_paused_graph_has_computed_is_refused(lab: Lab) -> None:
    x, first, second = fresh(lab, 8), cgraph.CUDAGraph(), cgraph.CUDAGraph()
    with cgraph.graph(first):
        y = x * 2
    first.replay()
    with cgraph.graph(second):
        z = y + 1
    lab.sync()
    pool = MemPool.of(first)
    pool.pause("host")
    with pytest.raises(cgraph.errors.StateError, match=r"paused.*resume"):
        second.replay()
    pool.resume()
    second.replay()
    lab.sync()
    assert torch.equal(z, x * 2 + 1)
