"""`MemPool.pause` and `resume`: memory goes and comes, addresses and graphs stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cgraph
from bits import same
from cgraph import MemPool
from cgraph.errors import ArgumentError, CaptureError, StateError
from lab import Lab, SimLab, fresh
from pools import capture, check


def test_a_pool_paused_with_discard_has_no_memory_and_then_right_outputs(lab: Lab) -> None:
    x, pool = fresh(lab, 1 << 12), MemPool()
    made = [capture(lambda factor=factor: x * factor, pool) for factor in (2, 3)]
    before, places = pool.segments(), [y.data_ptr() for _, y in made]
    pool.pause()
    assert pool.is_paused and "paused" in repr(pool)
    assert pool.stats()["mapped"] == pool.stats()["kept"] == 0
    pool.resume()
    assert not pool.is_paused and pool.segments() == before
    assert [y.data_ptr() for _, y in made] == places
    for (graph, y), factor in zip(made, (2, 3), strict=True):
        check(graph, x, y, factor)


def test_contents_that_were_discarded_are_poison_until_a_replay(sim: SimLab) -> None:
    x = fresh(sim, 64)
    graph, y = capture(lambda: x * 2)
    graph.replay()
    MemPool.of(graph).pause()
    MemPool.of(graph).resume()
    assert y.isnan().all()
    check(graph, x, y)


def test_a_pool_paused_with_host_has_its_contents_again_without_a_replay(lab: Lab) -> None:
    x, pool = fresh(lab, 1 << 18), MemPool()
    made = [capture(lambda factor=factor: x * factor, pool) for factor in (2, 3, 4)]
    for graph, _ in made:
        graph.replay()
    before = [y.clone() for _, y in made]
    for _ in range(2):
        pool.pause("host")
        stats = pool.stats()
        assert stats["mapped"] == 0 and stats["kept"] == stats["reserved"] > 0
        pool.resume()
        # The next pause uses it again.
        assert pool.stats()["kept"] == stats["kept"]
        assert all(same(y, copy) for (_, y), copy in zip(made, before, strict=True))
    assert pool.trim() == pool.stats()["kept"] == 0
    check(made[1][0], x, made[1][1], 3)


def test_a_static_input_in_a_paused_pool_is_read_right_after_host(lab: Lab) -> None:
    x, home = fresh(lab, 256), MemPool()
    maker, static = capture(lambda: x * 1, home)
    reader, y = capture(lambda: static * 2)
    static.copy_(fresh(lab, 256))
    expected = static * 2
    home.pause("host")
    home.resume()
    reader.replay()
    assert torch.equal(y, expected)
    maker.replay()
    assert torch.equal(static, x)


def test_pausing_one_pool_leaves_the_graphs_of_another_replayable(lab: Lab) -> None:
    x = fresh(lab, 256)
    (first, y), (second, z) = capture(lambda: x * 2), capture(lambda: x * 3)
    MemPool.of(first).pause()
    check(second, x, z, 3)
    MemPool.of(first).resume()
    check(first, x, y)


@pytest.mark.gpu
def test_a_graph_of_several_pools_is_not_replayed_while_one_of_them_is_paused() -> None:
    x, other, graph = torch.randn(256, device="cuda"), MemPool(), cgraph.CUDAGraph()
    with cgraph.graph(graph):
        y = x * 2
        with torch.cuda.use_mem_pool(other):
            z = y * 2
    assert graph.pools() == [MemPool.of(graph).id, other.id]
    for pool in (MemPool.of(graph), other):
        pool.pause()
        with pytest.raises(StateError, match="paused"):
            graph.replay()
        pool.resume()
    x.normal_()
    graph.replay()
    assert torch.equal(z, x * 2 * 2)


def test_a_paused_pool_refuses_replays_and_captures_and_stays_whole(lab: Lab) -> None:
    x, pool = fresh(lab, 64), MemPool()
    graph, y = capture(lambda: x * 2, pool)
    graph.replay()
    before = y.clone()
    pool.pause("host")
    with pytest.raises(StateError, match=r"paused.*resume"):
        graph.replay()
    for given in (pool, pool.id, graph.pool()):
        with pytest.raises(StateError, match="resume"):
            capture(lambda: x * 3, given)
    with pytest.raises(StateError, match="paused"):
        pool.pause()
    with pytest.raises(StateError, match="paused"):
        pool.trim()
    assert pool.is_paused and pool.stats()["kept"] == pool.stats()["reserved"]
    pool.resume()
    assert same(y, before)
    check(graph, x, y)


def test_a_paused_pool_gives_out_no_block(sim: SimLab) -> None:
    x, pool = fresh(sim, 64), MemPool()
    graph, y = capture(lambda: x * 2, pool)
    pool.pause()
    before = pool.stats()
    with pytest.raises(StateError, match="paused"):
        pool._core.allocate(sim.current(), 512)
    assert pool.stats() == before
    pool.resume()
    check(graph, x, y)


def test_resume_of_a_pool_that_runs_is_refused(lab: Lab) -> None:
    x, pool = fresh(lab, 64), MemPool()
    with pytest.raises(StateError, match="paused"):
        pool.resume()
    graph, y = capture(lambda: x * 2, pool)
    pool.pause()
    pool.resume()
    with pytest.raises(StateError, match="paused"):
        pool.resume()
    check(graph, x, y)


@pytest.mark.parametrize("keep", ["discard", "host"])
def test_a_pause_inside_a_capture_is_refused_and_the_capture_goes_on(lab: Lab, keep: str) -> None:
    x, idle = fresh(lab, 64), MemPool()
    other, z = capture(lambda: x * 3, idle)
    graph = cgraph.CUDAGraph()
    with cgraph.graph(graph):
        y = x + x
        for pool in (MemPool.of(graph.pool()), idle):
            with pytest.raises(CaptureError, match="captur"):
                pool.pause(keep)
            assert not pool.is_paused
        y = y * 2
    check(graph, x, y, 4)
    check(other, x, z, 3)


@pytest.mark.parametrize("keep", ["", "HOST", "device", None, 1])
def test_an_unknown_keep_is_refused_by_its_value(lab: Lab, keep: Any) -> None:
    x = fresh(lab, 64)
    graph, y = capture(lambda: x * 2)
    pool = MemPool.of(graph)
    with pytest.raises(ArgumentError, match=r"keep is .*\"discard\" or \"host\"") as caught:
        pool.pause(keep)
    assert str(keep) in str(caught.value)
    assert not pool.is_paused
    check(graph, x, y)
