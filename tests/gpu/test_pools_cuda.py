"""Pools on a GPU: torch's allocator, the device's memory, and nothing left behind."""

from __future__ import annotations

import ctypes
import gc
import random
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

import cgraph
from cgraph import _core
from cgraph.errors import CgraphError, OutOfMemoryError, StateError
from examples.demo.model import Decoder, Size, Transformer
from lab import CudaLab, fresh

pytestmark = [pytest.mark.gpu, pytest.mark.alone]
lab = CudaLab()
MIB = 1 << 20
KINDS = ("capture", "capture", "share", "fail", "pause", "replay", "destroy")


@pytest.fixture(autouse=True)
def _cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CGRAPH_DRIVER", "cuda")


def free() -> int:
    """Return the unused bytes of the device, after all unused memory has gone back."""
    gc.collect()
    torch.cuda.synchronize()
    _core.Device.cuda(0).collect()
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def resident() -> int:
    """Return the process's host bytes, without the free memory in libc's heap."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def product(matrix: Tensor) -> Tensor:
    """Return a product that takes a library's workspace."""
    return (matrix @ matrix).relu() + matrix


def warm(matrix: Tensor) -> None:
    """Load libraries and their eager workspaces."""
    product(matrix)
    torch.cuda.synchronize()


def test_pausing_ten_graphs_of_a_model_frees_its_pool_and_they_are_right_afterwards() -> None:
    model = Transformer(Size(layers=6, heads=4, width=256, context=128, batch=1), 96).cuda().eval()
    decoders = [Decoder(model) for _ in range(10)]
    prompts = [torch.randint(0, 96, (9,), device="cuda") for _ in decoders]
    eager = Decoder(model)
    eager.step()
    pool, graphs = cgraph.MemPool(), []
    for decoder in decoders:
        decoder.begin(prompts[0])
        graph = cgraph.CUDAGraph()
        with cgraph.graph(graph, pool=pool):
            decoder.step()
        graphs.append(graph)
    bytes_of_pool, before = pool.stats()["mapped"], free()
    assert bytes_of_pool > 0
    pool.pause()
    assert free() - before >= 0.95 * bytes_of_pool
    pool.resume()
    for decoder, graph, prompt in zip(decoders, graphs, prompts, strict=True):
        decoder.begin(prompt)
        eager.begin(prompt)
        for tensor in (*decoder.state()[4:], *eager.state()[4:]):
            tensor.zero_()
        for _ in range(8):  # the places of the prompt: the rest is drawn
            graph.replay()
            eager.step()
            torch.testing.assert_close(decoder.scores, eager.scores, rtol=0, atol=0)


def test_the_ledger_agrees_with_the_device_for_51_batch_sizes() -> None:
    size = Size(layers=8, heads=8, width=512, context=16, batch=1)
    model = Transformer(size, 96).cuda().eval()
    pieces = torch.randint(0, 96, (51, 16), device="cuda")
    with torch.no_grad():
        for batch in (51, 1):
            model(pieces[:batch])
        gc.collect()
        before, pool, kept = free(), cgraph.graph_pool_handle(), []
        with cgraph.record_memory(blocks=False):
            for batch in range(51, 0, -1):
                graph = cgraph.CUDAGraph(keep_graph=batch % 2 == 0)
                with cgraph.graph(graph, pool=pool):
                    out = model(pieces[:batch])
                graph.replay()
                kept.append((graph, batch, out))
        for graph, batch, out in kept:
            graph.replay()
            torch.testing.assert_close(out, model(pieces[:batch]), rtol=0, atol=0)
    del out
    taken = before - free()
    ledger = cgraph.memory()
    assert len(ledger.graphs) == 51
    assert abs(ledger.device - taken) <= max(0.02 * taken, 4 * MIB), f"{ledger}\n{taken}"
    assert all(one.nodes > 50 and len(one.shares_with) == 50 for one in ledger.graphs)


def test_a_dry_run_leaves_the_device_as_it_was() -> None:
    model = Transformer(Size(layers=4, heads=4, width=256, context=64, batch=2), 96).cuda()
    pieces, following = (torch.randint(0, 96, (2, 64), device="cuda") for _ in range(2))
    optimiser = torch.optim.Adam(model.parameters(), capturable=True)

    def step() -> Tensor:
        optimiser.zero_grad(set_to_none=True)
        loss = model.loss(pieces, following)
        loss.backward()
        optimiser.step()
        return loss.detach()

    cgraph.dry_run(step)  # libraries stay loaded
    parameters = [parameter.detach().clone() for parameter in model.parameters()]
    state, before = torch.cuda.get_rng_state(), free()
    found = cgraph.dry_run(step)
    assert abs(before - free()) <= 2 * MIB
    assert torch.equal(torch.cuda.get_rng_state(), state)
    for one, other in zip(model.parameters(), parameters, strict=True):
        assert torch.equal(one, other) and one.grad is None
    graph = cgraph.CUDAGraph()
    for _ in range(2):
        step()
    with cgraph.record_memory(blocks=False), cgraph.graph(graph):
        loss = step()
    assert found.memory.nodes == graph.memory().nodes
    assert found.memory.reserved == graph.memory().reserved
    del loss


def test_random_cycles_of_capture_share_fail_pause_resume_and_destroy_leave_nothing() -> None:
    dice = random.Random(20)
    matrix = fresh(lab, 256, 256)
    warm(matrix)

    class Failure(Exception): ...

    def run(cycles: int) -> None:
        pools: list[cgraph.MemPool] = []
        graphs: list[tuple[cgraph.CUDAGraph, Tensor]] = []
        for _ in range(cycles):
            what = dice.choice(KINDS)
            if len(graphs) > 20:
                what = "destroy"  # CUDA keeps the most memory that execs took
            if what in ("capture", "share", "fail"):
                pool = dice.choice(pools) if pools and what != "capture" else cgraph.MemPool()
                graph = cgraph.CUDAGraph(keep_graph=dice.random() < 0.3)
                try:
                    with cgraph.graph(graph, pool=pool):
                        out = product(matrix)
                        if what == "fail":
                            raise Failure
                except Failure:
                    del out, pool
                    continue
                graphs.append((graph, out))
                if pool not in pools:
                    pools.append(pool)
                del out, pool
            elif what == "pause" and pools:
                pool = dice.choice(pools)
                pool.pause(dice.choice(["discard", "host"]))
                mine = [one for one, _ in graphs if cgraph.MemPool.of(one) is pool]
                for graph in mine[:1]:
                    with pytest.raises(StateError):
                        graph.replay()
                pool.resume()
                del pool, mine
            elif what == "replay" and graphs:
                graph, out = dice.choice(graphs)
                matrix.normal_()
                graph.replay()
                torch.testing.assert_close(out, product(matrix), rtol=0, atol=0)
                del out
            elif what == "destroy" and graphs:
                graphs.pop(dice.randrange(len(graphs)))
                if dice.random() < 0.5:
                    pools.pop(dice.randrange(len(pools)))
            if len(pools) > 12:
                pools.pop(0)

    run(300)  # libraries, Python and the driver have settled
    before, host = free(), resident()
    ranges = _ranges()
    run(1000)
    assert before - free() <= 2 * MIB
    assert resident() - host <= 8 * MIB
    assert _ranges() == ranges
    assert not cgraph.memory().pools and not cgraph.memory().graphs
    free()
    pools = {tuple(one["segment_pool_id"]) for one in torch.cuda.memory_snapshot()}
    assert pools <= {(0, 0)}


def _ranges() -> int:
    """Return the number of cgraph's address ranges in the process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    starts = [int(line.split("-")[0], 16) for line in lines]
    return sum(0x6000_0000_0000 <= start < 0x7000_0000_0000 for start in starts)


def test_issue_193402_a_graph_goes_and_the_workspace_of_another_stays() -> None:
    matrix, stream = fresh(lab, 640, 640), torch.cuda.Stream()
    warm(matrix)
    kept, gone = cgraph.CUDAGraph(), cgraph.CUDAGraph()
    outs = []
    for graph in (gone, kept):
        with cgraph.record_memory(blocks=False), cgraph.graph(graph, stream=stream):
            outs.append(product(matrix))
    # Both have one of their own, in the pool that they keep.
    assert gone.memory().workspace == kept.memory().workspace > 0
    del graph
    gone.reset()
    outs.pop(0)
    torch._C._cuda_clearCublasWorkspaces()
    free()
    trample = [torch.full((MIB,), 7.0, device="cuda") for _ in range(64)]
    for _ in range(3):
        matrix.normal_()
        kept.replay()
        torch.testing.assert_close(outs[0], product(matrix), rtol=0, atol=0)
    assert all(bool((one == 7).all()) for one in trample)


def test_no_eager_work_uses_the_workspace_of_a_capture() -> None:
    matrix, stream = fresh(lab, 512, 512), torch.cuda.Stream()
    pool, graph = cgraph.MemPool(), cgraph.CUDAGraph()
    warm(matrix)
    with cgraph.record_memory(blocks=False), cgraph.graph(graph, pool=pool, stream=stream):
        out = product(matrix)
    in_use = cgraph.memory().pools[0].in_use
    with torch.cuda.stream(stream):
        product(matrix)
    torch.cuda.synchronize()
    assert cgraph.memory().pools[0].in_use == in_use == graph.memory().held
    del out


def test_torchs_snapshot_and_statistics_show_the_pool() -> None:
    free()
    before = torch.cuda.memory_reserved()
    pool = cgraph.MemPool()
    with torch.cuda.use_mem_pool(pool):
        x = torch.randn(3 * MIB, device="cuda")
    (segment,) = pool.snapshot()
    assert segment["address"] <= x.data_ptr() < segment["address"] + segment["total_size"]
    assert [(segment["address"], segment["total_size"])] == pool.segments()
    assert torch.cuda.memory_reserved() - before == pool.stats()["mapped"]
    assert tuple(segment["segment_pool_id"]) == tuple(pool.id)
    torch.cuda.empty_cache()
    assert pool.segments()
    del pool
    del x
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == before


def test_torchs_graphs_capture_into_a_pool_of_cgraph() -> None:
    x, pool, graph = fresh(lab, 1 << 16), cgraph.MemPool(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool.id):
        y = x * 2
    assert lab.in_pool(y, pool.id) and pool.segments()[0][0] <= y.data_ptr()
    pool.pause("host")
    pool.resume()
    x.normal_()
    graph.replay()
    assert torch.equal(y, x * 2)


def test_an_allocation_beyond_the_limit_says_the_numbers_in_any_thread() -> None:
    pool = cgraph.MemPool(limit=32 * MIB)
    errors: list[BaseException] = []

    def allocate() -> None:
        with torch.cuda.use_mem_pool(pool):
            try:
                torch.empty(64 * MIB, device="cuda")
            except torch.OutOfMemoryError as error:
                errors.append(error)

    thread = threading.Thread(target=allocate)
    thread.start()
    thread.join()
    allocate()
    for error in errors:
        assert isinstance(error, OutOfMemoryError) and isinstance(error, MemoryError)
        assert all(word in str(error) for word in ("268435456", "33554432", "limit"))
    with pytest.raises(torch.OutOfMemoryError) as of_torch:
        torch.empty(1 << 44, device="cuda")
    assert not isinstance(of_torch.value, CgraphError)
    with torch.cuda.use_mem_pool(pool):
        assert torch.ones(5, device="cuda").sum().item() == 5


def test_gradients_of_autograds_threads_lie_in_the_pool_and_count() -> None:
    weight = fresh(lab, 1024, 1024).requires_grad_()
    (weight.sin() * 2).sum().backward()
    weight.grad = None
    graph = cgraph.CUDAGraph()
    with cgraph.record_memory(), cgraph.graph(graph):
        (weight.sin() * 2).sum().backward()
    used = graph.memory()
    assert used.held >= 4 * MIB and used.peak is not None and used.peak >= used.held
    assert used.timeline is not None and used.timeline.held == used.held
    weight.grad = None


def test_a_pool_dies_beside_an_open_capture_without_harm() -> None:
    x = fresh(lab, 1 << 10)
    doomed = cgraph.CUDAGraph()
    with cgraph.graph(doomed):
        y = x * 2
    del y
    before, graph = free(), cgraph.CUDAGraph()
    with cgraph.graph(graph):
        z = x * 3
        doomed.reset()
        del doomed
        gc.collect()
    graph.replay()
    assert torch.equal(z, x * 3)
    del z, graph
    assert free() >= before


def test_a_pool_dies_while_a_compiler_allocates_in_another_one_without_harm() -> None:
    # Inductor's trees of graphs do so in their warm-up.
    x, graph = fresh(lab, 1 << 10), cgraph.CUDAGraph()
    with cgraph.graph(graph):
        y = x * 2
    before, other = free(), torch.cuda.graph_pool_handle()
    torch._C._cuda_beginAllocateCurrentThreadToPool(0, other)
    try:
        del y, graph
        gc.collect()
        z = x * 3
    finally:
        torch._C._cuda_endAllocateToPool(0, other)
    assert torch.equal(z, x * 3)
    del z
    torch._C._cuda_releasePool(0, other)
    assert free() >= before


def test_base_addresses_are_kept() -> None:
    base = 0x6A00_0000_0000
    for _ in range(2):
        pool = cgraph.MemPool(base=base)
        with torch.cuda.use_mem_pool(pool):
            x = torch.ones(1000, device="cuda")
        assert pool.segments()[0][0] == base == x.data_ptr()
        del x, pool
        torch.cuda.empty_cache()


def test_the_memory_of_a_graph_goes_with_it_at_once_and_without_emptying_any_cache() -> None:
    x, graph = fresh(lab, 4 * MIB), cgraph.CUDAGraph()
    with cgraph.graph(graph):
        y = x * 2
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    size = graph.memory().reserved
    del y
    graph.reset()
    assert torch.cuda.mem_get_info()[0] - before >= size >= 16 * MIB


def test_a_failed_capture_gives_its_memory_back_at_once() -> None:
    x = fresh(lab, 4 * MIB)
    free()
    before = torch.cuda.mem_get_info()[0]

    def fail() -> None:
        y = x * 2
        del y
        raise KeyError

    with pytest.raises(KeyError), cgraph.graph(cgraph.CUDAGraph()):
        fail()
    assert before - torch.cuda.mem_get_info()[0] <= 2 * MIB


def test_the_token_of_a_pool_that_is_gone_leads_to_no_memory_of_it() -> None:
    x, pool, graph = fresh(lab, 64), cgraph.MemPool(), cgraph.CUDAGraph()
    with cgraph.graph(graph, pool=pool):
        y = x * 2
    token, segments = tuple(pool.id), pool.segments()
    del y, pool, graph
    again = cgraph.CUDAGraph()
    with cgraph.graph(again, pool=token):
        z = x * 3
    assert not any(start <= z.data_ptr() < start + size for start, size in segments)
    x.normal_()
    again.replay()
    assert torch.equal(z, x * 3)


def test_a_pool_dies_beside_a_capture_of_torchs_own_and_inside_use_mem_pool() -> None:
    x, doomed, other = fresh(lab, 64), [], cgraph.MemPool()
    for _ in range(3):
        graph = cgraph.CUDAGraph()
        with cgraph.graph(graph):
            y = x * 2
        doomed.append((graph, y, cgraph.MemPool()))
        del graph, y
    theirs = torch.cuda.CUDAGraph()
    with torch.cuda.graph(theirs):
        z = x * 3
        doomed.pop()
        gc.collect()
        z = z + 1
    with torch.cuda.use_mem_pool(other):
        doomed.pop()
        gc.collect()
        kept = x * 5
    x.normal_()
    theirs.replay()
    assert torch.equal(z, x * 3 + 1)
    assert bool((kept != 0).any())
    doomed.clear()
    del kept, other
    free()
    assert not cgraph.memory().pools


def test_a_pool_of_last_resort_and_one_in_use_are_not_paused() -> None:
    pool, last = cgraph.MemPool(), cgraph.MemPool(use_on_oom=True)
    with pytest.raises(CgraphError, match="use_on_oom"):
        last.pause()
    with torch.cuda.use_mem_pool(pool), pytest.raises(StateError, match="use_mem_pool"):
        pool.pause()
    assert not pool.is_paused
    pool.pause()
    pool.resume()


def test_the_peak_of_a_recorded_capture_is_at_least_what_it_holds() -> None:
    x = fresh(lab, 23 * MIB // 8)
    graph = cgraph.CUDAGraph()
    with cgraph.record_memory(), cgraph.graph(graph):
        y = x * 2  # 11.5 MiB, in a segment of 12
    used = graph.memory()
    assert used.peak == used.held == y.numel() * 4
    assert used.reserved == 12 * MIB


def test_recording_ends_with_each_capture_and_leaves_a_record_of_the_user_alone() -> None:
    matrix, kept = fresh(lab, 256, 256), []
    warm(matrix)
    for mine in (False, True):
        if mine:
            torch.cuda.memory._record_memory_history(context=None)
        graph = cgraph.CUDAGraph()
        with cgraph.record_memory(), cgraph.graph(graph):
            kept.append(product(matrix))
        used = graph.memory()
        assert torch._C._cuda_isHistoryEnabled() is mine
        assert used.timeline is not None and used.timeline.held == used.held == 4 * 256 * 256
        assert used.peak is not None and used.peak >= used.workspace + used.held
    torch.cuda.memory._record_memory_history(None)


def test_a_paused_pool_of_use_mem_pool_inside_a_capture_is_known_to_the_graph() -> None:
    x, other, graph = fresh(lab, 64), cgraph.MemPool(), cgraph.CUDAGraph()
    with cgraph.graph(graph), torch.cuda.use_mem_pool(other):
        y = x * 2
    other.pause()
    del other
    gc.collect()
    with pytest.raises(StateError, match="paused"):
        graph.replay()
    (own, brought) = graph.pools()
    cgraph.MemPool.of(brought).resume()
    x.normal_()
    graph.replay()
    assert torch.equal(y, x * 2)
    assert tuple(own) != tuple(brought)
