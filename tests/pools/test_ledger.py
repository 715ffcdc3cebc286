"""The ledger: `cgraph.memory()`, `CUDAGraph.memory()`, `cgraph.record_memory()`."""

from __future__ import annotations

import gc
import io
import json
import threading
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor

import cgraph
from cgraph import MemPool
from cgraph._text import short_place
from cgraph.errors import ArgumentError, ForeignError, StateError
from cgraph.ledger import GraphMemory, PoolMemory
from lab import Lab, SimLab, fresh
from pools import MIB, capture, check, fail, handles

SEGMENT = 2 * MIB


def of_pool(pool: MemPool) -> PoolMemory:
    """Return a pool's entry."""
    (found,) = [one for one in cgraph.memory().pools if one.handle == pool.id]
    return found


def names() -> list[str]:
    """Return the graphs of the ledger, without those that are dead and not yet collected."""
    gc.collect()
    return [one.name for one in cgraph.memory().graphs]


def texts(path: Path) -> list[str]:
    """Return all texts of a drawing."""
    return [text for text in ElementTree.parse(path).getroot().itertext() if text.strip()]


def dashes(path: Path) -> int:
    """Return the number of dashed lines of a drawing, one for each capture."""
    return sum("stroke-dasharray" in each.attrib for each in ElementTree.parse(path).iter())


def steps(x: Tensor) -> Tensor:
    """Return steps of 4 KiB: blocks of 4, 8, 4 again, 12 and at the end 8 KiB."""
    a = x + 1
    b = a * 2
    del a
    c = torch.cat([b, b])
    del b
    return c


def test_the_numbers_of_a_known_capture(lab: Lab) -> None:
    x = fresh(lab, 1000)
    graph, y = capture(lambda: (x + 1) * 2)
    used = graph.memory()
    assert (used.reserved, used.held, used.nodes) == (SEGMENT, 4096, 2)
    assert used.workspace == 0 and used.shares_with == () and used.seconds > 0
    assert used.pools == (graph.pool(),) and used.where.rpartition(":")[0].endswith("pools.py")
    pool = of_pool(MemPool.of(graph))
    assert (pool.mapped, pool.reserved, pool.in_use, pool.kept) == (SEGMENT, SEGMENT, 4096, 0)
    assert pool.limit is None and not pool.is_paused and pool.graphs == (used.name,)
    del y


def test_only_what_was_to_be_measured_has_bytes(lab: Lab) -> None:
    x = fresh(lab, 1000)
    plain, measured, scoped = (cgraph.CUDAGraph(keep_graph=True) for _ in range(3))
    with cgraph.graph(plain):
        y = x * 2
    with cgraph.record_memory(blocks=False), cgraph.graph(measured):
        z = x * 2
    with cgraph.capture_scope() as pool, cgraph.graph(scoped, pool=pool):
        w = x * 2
    for graph, is_measured in ((plain, False), (measured, True), (scoped, True)):
        graph.replay()
        used = graph.memory()
        numbers = (used.held, used.workspace, used.exec)
        assert [one is not None for one in numbers] == [is_measured] * 3
        assert used.reserved == SEGMENT
        assert used.peak is None and used.timeline is None and used.seconds > 0
    assert plain.memory().device == SEGMENT and "-" in str(cgraph.memory())
    with cgraph.record_memory(blocks=False):
        plain.instantiate()
    assert plain.memory().exec is not None and plain.memory().held is None
    del y, z, w


@pytest.mark.parametrize(("numbers", "bytes"), [(1, 512), (128, 512), (129, 1024), (4096, 16384)])
def test_held_is_the_outputs_bytes_in_steps_of_512(lab: Lab, numbers: int, bytes: int) -> None:
    x = fresh(lab, numbers)
    graph, y = capture(lambda: torch.relu(x * 2) + 1)
    assert y.numel() == numbers and graph.memory().held == bytes


def test_a_capture_into_a_grown_pool_reserves_nothing_and_one_that_drops_all_holds_nothing(
    lab: Lab,
) -> None:
    x, pool = fresh(lab, 1000), MemPool()
    first, y = capture(lambda: x * 2, pool)
    second = cgraph.CUDAGraph()
    with cgraph.record_memory(blocks=False), cgraph.graph(second, pool=pool):
        x.add_(x * 3)
    assert (first.memory().reserved, first.memory().held) == (SEGMENT, 4096)
    assert (second.memory().reserved, second.memory().held) == (0, 0)
    assert of_pool(pool).in_use == 4096
    del y


@pytest.mark.parametrize("keep", [True, False])
def test_host_bytes_grow_with_nodes_and_with_a_kept_template(lab: Lab, keep: bool) -> None:
    x, used = fresh(lab, 64), []
    for count in (2, 20):
        graph = cgraph.CUDAGraph(keep_graph=keep)
        with cgraph.graph(graph):
            for _ in range(count):
                x.add_(1)
        used.append(graph.memory())
    assert [one.nodes for one in used] == [2, 20] and used[1].host == 10 * used[0].host > 0
    if keep:
        before = graph.memory().host
        graph.instantiate()
        assert graph.memory().host > before


def test_graphs_that_share_a_pool_name_each_other_and_the_pool_names_both(lab: Lab) -> None:
    x, pool = fresh(lab, 64), MemPool()
    (first, y), (second, z) = capture(lambda: x * 2, pool), capture(lambda: x * 3, pool)
    alone, w = capture(lambda: x * 4)
    one, two = first.memory(), second.memory()
    assert one.shares_with == (two.name,) and two.shares_with == (one.name,)
    assert alone.memory().shares_with == ()
    assert of_pool(pool).graphs == (one.name, two.name)
    second.reset()
    assert first.memory().shares_with == () and of_pool(pool).graphs == (one.name,)
    del y, z, w


def test_totals_are_the_sums_of_the_entries(lab: Lab) -> None:
    x, pool = fresh(lab, 1 << 12), MemPool()
    made = [capture(lambda: x * 2, given) for given in (pool, pool, None)]
    pool.pause("host")
    found = cgraph.memory()
    pools, graphs = found.pools, found.graphs
    assert found.device == sum(p.mapped for p in pools) + sum(g.exec or 0 for g in graphs)
    assert found.host == sum(p.kept for p in pools) + sum(g.host for g in graphs)
    assert found.device >= SEGMENT and found.host >= SEGMENT
    pool.resume()
    assert cgraph.memory().device >= found.device + SEGMENT
    graph, y = made[0]
    check(graph, x, y)


def test_a_graphs_own_entry_is_the_one_of_the_whole_ledger(lab: Lab) -> None:
    x, pool = fresh(lab, 64), MemPool()
    made = [capture(lambda: x * 2, given)[0] for given in (pool, None, pool)]
    entries = {one.name: one for one in cgraph.memory().graphs}
    for graph in made:
        assert entries[graph.memory().name] == graph.memory()
    order = [graph.memory().name for graph in made]
    assert [name for name in entries if name in order] == order


@pytest.mark.parametrize(("keep", "kept"), [("discard", 0), ("host", SEGMENT)])
def test_a_paused_pool_counts_no_device_memory_and_what_it_keeps(
    lab: Lab, keep: str, kept: int
) -> None:
    x, pool = fresh(lab, 64), MemPool()
    graph, y = capture(lambda: x * 2, pool)
    device, host = cgraph.memory().device, cgraph.memory().host
    pool.pause(keep)
    entry = of_pool(pool)
    assert entry.is_paused and (entry.mapped, entry.kept) == (0, kept)
    assert entry.reserved == SEGMENT and entry.graphs == (graph.memory().name,)
    assert cgraph.memory().device == device - SEGMENT and cgraph.memory().host == host + kept
    assert "(paused)" in str(cgraph.memory())
    pool.resume()
    assert (cgraph.memory().device, cgraph.memory().host) == (device, host + kept)
    pool.trim()
    assert (cgraph.memory().device, cgraph.memory().host) == (device, host)
    del y


def test_graphs_that_were_reset_or_died_and_failed_captures_are_not_in_the_ledger(lab: Lab) -> None:
    before, pools = names(), handles()
    x = fresh(lab, 64)
    made = [capture(lambda: x * 2)[0] for _ in range(3)]
    fail(x)
    assert len(names()) == len(before) + 3 and len(handles()) == len(pools) + 3
    made[0].reset()
    del made[1]
    (last,) = [graph.memory().name for graph in made[1:]]
    assert names() == [*before, last]
    made.clear()
    assert names() == before and handles() == pools


def test_memory_before_a_capture_and_after_a_reset_is_refused(lab: Lab) -> None:
    x, graph = fresh(lab, 64), cgraph.CUDAGraph()
    with pytest.raises(StateError, match="capture something first"):
        graph.memory()
    graph, _ = capture(lambda: x * 2)
    graph.reset()
    with pytest.raises(StateError, match="capture something first"):
        graph.memory()


def test_the_peak_is_known_under_record_memory_only_and_is_that_of_the_blocks(lab: Lab) -> None:
    x = fresh(lab, 1024)
    plain, y = capture(lambda: steps(x))
    with cgraph.record_memory():
        graph, z = capture(lambda: steps(x))
    assert plain.memory().peak is None and plain.memory().timeline is None
    used = graph.memory()
    assert (used.peak, used.held) == (12 * 1024, 8 * 1024)
    assert used.timeline is not None
    assert [count // 1024 for count in used.timeline.in_use()] == [0, 4, 8, 4, 12, 8]
    after, w = capture(lambda: steps(x))
    assert after.memory().peak is None
    del y, z, w


def test_the_peak_has_the_blocks_that_were_there_before(lab: Lab) -> None:
    x, pool = fresh(lab, 1024), MemPool()
    _first, y = capture(lambda: x * 2, pool)
    with cgraph.record_memory():
        graph, z = capture(lambda: x * 3, pool)
    assert (graph.memory().peak, graph.memory().held) == (8192, 4096)
    del y, z


def test_record_memory_nests(lab: Lab) -> None:
    x, peaks = fresh(lab, 1024), list[int | None]()

    def look() -> None:
        peaks.append(capture(lambda: x * 2)[0].memory().peak)

    with cgraph.record_memory():
        with cgraph.record_memory():
            look()
        look()
        with pytest.raises(ZeroDivisionError), cgraph.record_memory():
            raise ZeroDivisionError
        look()
    look()
    assert peaks == [4096, 4096, 4096, None]


def test_record_memory_of_one_thread_holds_in_all_until_the_last_has_left(lab: Lab) -> None:
    x, peaks = fresh(lab, 1024), list[int | None]()
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with cgraph.record_memory():
            inside.set()
            leave.wait(60)

    def toggle() -> None:
        for _ in range(2000):
            with cgraph.record_memory():
                pass

    def look() -> None:
        peaks.append(capture(lambda: x * 2)[0].memory().peak)

    holder = threading.Thread(target=hold)
    others = [threading.Thread(target=toggle) for _ in range(4)]
    for thread in (holder, *others):
        thread.start()
    assert inside.wait(60)
    for thread in others:
        thread.join()
    look()
    leave.set()
    holder.join()
    look()
    assert peaks == [4096, None]


def test_all_numbers_are_fit_for_json(lab: Lab) -> None:
    x, pool = fresh(lab, 64), MemPool(limit=64 * MIB)
    with cgraph.record_memory():
        graph, _ = capture(lambda: x * 2, pool)
    everything = json.loads(json.dumps(cgraph.memory().as_dict()))
    own = json.loads(json.dumps(graph.memory().as_dict()))
    assert own in everything["graphs"] and own["peak"] == 512
    assert everything["device"] == cgraph.memory().device
    assert 64 * MIB in [one["limit"] for one in everything["pools"]]


def test_the_tables_have_all_pools_and_graphs(lab: Lab) -> None:
    x, pool, text = fresh(lab, 64), MemPool(limit=64 * MIB), io.StringIO()
    made = [capture(lambda: x * 2, given)[0] for given in (pool, pool, None)]
    found = cgraph.memory()
    found.show(text)
    entries: list[PoolMemory | GraphMemory] = [*found.pools, *found.graphs]
    assert all(one.name in text.getvalue() for one in entries)
    assert "64.0 MiB" in text.getvalue() and "pools.py:" in text.getvalue()
    text = io.StringIO()
    made[0].memory().show(text)
    rows = text.getvalue().splitlines()
    assert len(rows) == 3 and rows[2].startswith(made[0].memory().name)


def test_show_prints_to_standard_output(sim: SimLab, capsys: pytest.CaptureFixture[str]) -> None:
    x = fresh(sim, 64)
    graph, _ = capture(lambda: x * 2)
    cgraph.memory().show()
    graph.memory().show()
    assert capsys.readouterr().out.count(graph.memory().name + " ") == 2


def test_a_ledger_without_entries_prints_its_totals(sim: SimLab) -> None:
    assert str(cgraph.memory()) == "device 0 B, host 0 B"


def test_plot_draws_the_blocks_of_a_graph_and_of_a_pool(lab: Lab, tmp_path: Path) -> None:
    x, pool = fresh(lab, 1024), MemPool()
    with cgraph.record_memory():
        graph, _ = capture(lambda: steps(x), pool)
    ways: list[Callable[[Path], None]] = [
        lambda path: graph.memory().plot(path),
        lambda path: cgraph.memory().plot(path),
        lambda path: cgraph.memory().plot(path, pool),
        lambda path: cgraph.memory().plot(path, graph),
        lambda path: cgraph.memory().plot(path, graph.pool()),
    ]
    for number, way in enumerate(ways):
        path = tmp_path / f"{number}.svg"
        way(path)
        assert any("12.0 KiB" in text for text in texts(path))
    with pytest.raises(ArgumentError, match=r"expected \.svg"):
        graph.memory().plot(tmp_path / "pool.txt")


def test_plot_of_what_was_not_recorded_says_how_to_record_it(lab: Lab, tmp_path: Path) -> None:
    x, path = fresh(lab, 64), tmp_path / "pool.svg"
    graph, _ = capture(lambda: x * 2)
    for pool in (MemPool(), graph, graph.pool()):
        with pytest.raises(StateError, match=r"record_memory\(\)"):
            cgraph.memory().plot(path, pool)
    with pytest.raises(StateError, match=r"record_memory\(\)"):
        graph.memory().plot(path)
    with pytest.raises(ForeignError, match=r"no cgraph\.MemPool"):
        cgraph.memory().plot(path, (0, 1 << 40))
    assert not path.exists()


def test_the_timeline_of_a_pool_goes_on_with_each_capture(lab: Lab, tmp_path: Path) -> None:
    x, pool = fresh(lab, 1024), MemPool()
    with cgraph.record_memory():
        first, y = capture(lambda: x * 2, pool)
        other = cgraph.CUDAGraph()
        with cgraph.graph(other, pool=pool):
            z = steps(x)
    cgraph.memory().plot(tmp_path / "pool.svg", pool)
    first.memory().plot(tmp_path / "first.svg")
    assert dashes(tmp_path / "pool.svg") == dashes(tmp_path / "first.svg") + 1
    assert short_place(first.memory().where) in texts(tmp_path / "pool.svg")
    assert other.memory().peak == 16 * 1024  # with the output of the first
    del y, z
