"""Features of a GPU alone: torch's allocator, autograd's threads, other threads, memory."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.nn.functional import dropout

import cgraph
from cgraph import _core, _torch
from cgraph.errors import ForeignError
from lab import CudaLab, captured, fresh

pytestmark = pytest.mark.gpu
lab = CudaLab()


def warmed_up(step: Callable[[], object]) -> None:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_forked_streams_and_autograd_threads_allocate_from_the_pool() -> None:
    layers = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)]).cuda()
    x, side = fresh(lab, 64, 256), torch.cuda.Stream()

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        current = torch.cuda.current_stream()
        main = layers(x)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            hidden = layers(x * 2).relu()
        current.wait_stream(side)
        (hidden.sum() + main.sum()).backward()
        return main, hidden

    warmed_up(step)
    eager = [p.grad.clone() for p in layers.parameters() if p.grad is not None]
    layers.zero_grad(set_to_none=True)
    step()
    eager = [p.grad.clone() for p in layers.parameters() if p.grad is not None]
    layers.zero_grad(set_to_none=True)
    graph = cgraph.CUDAGraph()
    with cgraph.graph(graph):
        main, hidden = step()
    gradients = [p.grad for p in layers.parameters() if p.grad is not None]
    assert len(gradients) == 8
    for tensor in (main, hidden, *gradients):
        assert lab.in_pool(tensor, graph.pool())
    for gradient in gradients:
        gradient.fill_(float("nan"))
    graph.replay()
    for gradient, expected in zip(gradients, eager, strict=True):
        assert torch.allclose(gradient, expected, rtol=1e-4, atol=1e-4)


def test_memory_of_another_thread_is_never_touched_by_replays() -> None:
    w, x = fresh(lab, 256, 256), fresh(lab, 64, 256)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    started, stop = threading.Event(), threading.Event()
    x @ w

    def work() -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            value = 0.0
            while not stop.is_set() or len(kept) < 60:
                value += 1.0
                tensor = torch.empty(1 << 14, device="cuda").fill_(value)
                kept.append((tensor, tensor.clone()))
                del kept[:-60]
                started.set()
            stream.synchronize()

    thread = threading.Thread(target=work)
    graph = cgraph.CUDAGraph()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    thread.start()
    started.wait()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        y = x
        for _ in range(100):
            y = (y @ w).tanh()
        graph.capture_end()
    stop.set()
    thread.join()
    for _ in range(1000):
        graph.replay()
    torch.cuda.synchronize()
    assert all(not lab.in_pool(tensor, graph.pool()) for pair in kept for tensor in pair)
    assert all(torch.equal(tensor, copy) for tensor, copy in kept)
    expected = x
    for _ in range(100):
        expected = (expected @ w).tanh()
    assert torch.equal(y, expected)


def test_an_allocation_of_another_thread_breaks_only_a_global_capture() -> None:
    import ctypes

    runtime = ctypes.CDLL(next(Path("/proc/self/maps").read_text().split()[i] for i in _cudart()))
    x = fresh(lab, 64)
    broken: dict[str, bool] = {}
    for mode in ("global", "thread_local", "relaxed"):
        graph = cgraph.CUDAGraph()

        def allocate() -> None:
            pointer = ctypes.c_void_p()
            runtime.cudaMalloc(ctypes.byref(pointer), 1 << 20)
            if pointer.value:
                runtime.cudaFree(pointer)
            runtime.cudaGetLastError()

        try:
            with cgraph.graph(graph, capture_error_mode=mode):
                x + 1
                thread = threading.Thread(target=allocate)
                thread.start()
                thread.join()
            broken[mode] = False
        except RuntimeError:
            broken[mode] = True
    assert broken == {"global": True, "thread_local": False, "relaxed": False}


def _cudart() -> list[int]:
    words = Path("/proc/self/maps").read_text().split()
    return [i for i, word in enumerate(words) if "libcudart.so" in word][:1]


def resident_kib() -> int:
    """Return the host memory of the process, without the free memory in libc's heap."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4


@pytest.mark.alone
def test_2000_cycles_leave_device_and_host_memory_flat() -> None:
    x = fresh(lab, 1 << 10)

    def cycle(draws: bool) -> None:
        graph = cgraph.CUDAGraph()
        with cgraph.graph(graph):
            y = torch.relu(x) * 2
            if draws:
                y = dropout(y, 0.5)
        graph.replay()

    def measure() -> tuple[int, int]:
        gc.collect()
        torch.cuda.synchronize()
        _core.Device.cuda(0).collect()  # else the last graph may still be parked
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0], resident_kib()

    for n in range(100):
        cycle(n % 4 == 0)
    free, resident = measure()
    for n in range(1900):
        cycle(n % 4 == 0)
    free_after, resident_after = measure()
    assert free - free_after <= 2 << 20
    assert resident_after - resident <= 1024


def test_a_graph_that_dies_right_after_its_replay_still_finishes() -> None:
    x = fresh(lab, 1 << 22)
    out = torch.empty_like(x)
    for _ in range(20):
        graph = cgraph.CUDAGraph()
        with cgraph.graph(graph):
            y = x
            for _ in range(20):
                y = y * 1.0001
            out.copy_(y)
        out.fill_(float("nan"))
        graph.replay()
        del graph, y
        gc.collect()
        torch.cuda.empty_cache()
        junk = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(8)]
        expected = x
        for _ in range(20):
            expected = expected * 1.0001
        assert torch.equal(out, expected)
        del junk


def test_a_replay_runs_on_the_device_of_its_capture() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with torch.cuda.device(1):
        x = torch.randn(64, device="cuda:1")
        graph = cgraph.CUDAGraph()
        with cgraph.graph(graph):
            y = x + 1
    x.normal_()
    graph.replay()
    torch.cuda.synchronize(1)
    assert torch.equal(y, x + 1)


def test_a_pool_of_another_gpu_is_refused() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    graph, _ = captured(lab, fresh(lab, 64))
    with torch.cuda.device(1), pytest.raises(ForeignError, match="cuda:0"):
        with cgraph.graph(cgraph.CUDAGraph(), pool=graph.pool()):
            pass
    with torch.cuda.device(1):
        assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_two_gpus_capture_one_after_another_with_the_default_stream_of_each() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    results = []
    for device in (0, 1, 0):
        with torch.cuda.device(device):
            x, graph = torch.randn(64, device=f"cuda:{device}"), cgraph.CUDAGraph()
            with cgraph.graph(graph):
                y = torch.nn.functional.dropout(x, 0.5) + x
            results.append((device, graph, x, y))
    for device, graph, x, y in results:
        torch.manual_seed(11)
        graph.replay()
        torch.manual_seed(11)
        with torch.cuda.device(device):
            assert torch.equal(y, torch.nn.functional.dropout(x, 0.5) + x)


def test_pools_that_use_mem_pool_brings_in_are_kept() -> None:
    x, pool, graph = fresh(lab, 64), torch.cuda.MemPool(), cgraph.CUDAGraph()
    with cgraph.graph(graph):
        a = x * 2
        with torch.cuda.use_mem_pool(pool):
            b = a + 1
    assert [tuple(handle) for handle in graph.pools()][1:] == [tuple(pool.id)]
    del pool
    gc.collect()
    torch.cuda.empty_cache()
    x.normal_()
    graph.replay()
    assert torch.equal(b, x * 2 + 1)


def test_a_mem_pool_is_taken_and_kept() -> None:
    x, pool, graph = fresh(lab, 64), torch.cuda.MemPool(), cgraph.CUDAGraph()
    with cgraph.graph(graph, pool=pool):
        y = x * 2
    assert lab.in_pool(y, pool.id)
    assert tuple(graph.pool()) == tuple(pool.id)
    del pool
    gc.collect()
    torch.cuda.empty_cache()
    x.normal_()
    graph.replay()
    assert torch.equal(y, x * 2)


def test_a_handle_can_be_used_again_after_its_last_graph_died() -> None:
    x, handle = fresh(lab, 64), cgraph.graph_pool_handle()
    for _ in range(3):
        graph = cgraph.CUDAGraph()
        with cgraph.graph(graph, pool=handle):
            y = x * 2
        x.normal_()
        graph.replay()
        assert torch.equal(y, x * 2)
        del graph
        gc.collect()
        torch.cuda.empty_cache()


def test_the_handle_of_torch_is_taken_too() -> None:
    x, handle = fresh(lab, 64), torch.cuda.graph_pool_handle()
    first, _ = captured(lab, x)
    graphs = []
    for _ in range(2):
        graph = cgraph.CUDAGraph()
        with cgraph.graph(graph, pool=handle):
            y = x * 2
        graphs.append((graph, y))
        assert lab.in_pool(y, handle)
    theirs = torch.cuda.CUDAGraph()
    with torch.cuda.graph(theirs, pool=handle):
        z = x * 3
    x.normal_()
    theirs.replay()
    assert torch.equal(z, x * 3)
    del first


def test_pinned_memory_of_a_capture_stays_its_own() -> None:
    source = torch.randn(1 << 10)
    out, graph = torch.empty(1 << 10, device="cuda"), cgraph.CUDAGraph()
    with cgraph.graph(graph):
        staged = torch.empty(1 << 10, pin_memory=True)
        staged.copy_(source)
        out.copy_(staged, non_blocking=True)
    del staged
    gc.collect()
    others = [torch.full((1 << 10,), float("nan"), pin_memory=True) for _ in range(50)]
    graph.replay()
    assert torch.equal(out.cpu(), source)
    del others


def test_a_changed_template_replays_after_instantiate_and_not_before() -> None:
    from cuda.bindings import driver

    x, graph = torch.empty(64, dtype=torch.int32, device="cuda"), cgraph.CUDAGraph(keep_graph=True)
    with cgraph.graph(graph):
        stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
        (code,) = driver.cuMemsetD32Async(x.data_ptr(), 3, 64, stream)
        assert int(code) == 0
    graph.instantiate()
    template = driver.CUgraph(graph.raw_cuda_graph())
    _, nodes, _ = driver.cuGraphGetNodes(template, 1)
    _, params = driver.cuGraphMemsetNodeGetParams(nodes[0])
    params.value = 7
    (code,) = driver.cuGraphMemsetNodeSetParams(nodes[0], params)
    assert int(code) == 0
    x.fill_(-1)
    graph.replay()
    assert (x == 3).all()  # unseen until it is instantiated again
    graph.instantiate()
    x.fill_(-1)
    graph.replay()
    assert (x == 7).all()


def test_the_path_of_newer_torch_draws_like_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch.CapturedDraws, "are_told", staticmethod(lambda: False))
    x, graph = fresh(lab, 1 << 10), cgraph.CUDAGraph()
    with cgraph.graph(graph):
        y = dropout(x, 0.5)
        z = torch.rand(64, device="cuda")
    plain, w = captured(lab, x)
    assert plain._captured is not None
    assert plain._captured.random_step is None
    torch.manual_seed(77)
    drawn = []
    for _ in range(3):
        y.fill_(float("nan"))
        graph.replay()
        plain.replay()
        drawn.append((y.clone(), z.clone()))
    torch.manual_seed(77)
    for dropped, numbers in drawn:
        assert torch.equal(dropped, dropout(x, 0.5))
        assert torch.equal(numbers, torch.rand(64, device="cuda"))
    assert torch.equal(w, x * 2 + 1)


def test_without_dlpack_the_raw_stream_getter_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    getter = torch._C._cuda_getCurrentRawStream
    source = getter, _torch.is_own_stream
    monkeypatch.setattr(_torch, "current_stream_source", lambda: source)
    x = fresh(lab, 64)
    graph, y = captured(lab, x)
    stream = torch.cuda.Stream()
    x.normal_()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.replay()
        z = y + 1
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(z, x * 2 + 1 + 1)


@contextmanager
def stream_of_another_library() -> Iterator[torch.cuda.Stream]:
    """Make a stream current that is destroyed at the end, while its work may be in flight."""
    torch.cuda.synchronize()
    theirs = _core.Stream(_core.Device.cuda(0))
    with torch.cuda.stream(torch.cuda.ExternalStream(theirs.handle)):
        yield torch.cuda.current_stream()


def test_the_stream_of_the_last_replay_may_be_destroyed_before_the_graph() -> None:
    x = fresh(lab, 64)
    graph, y = captured(lab, x)
    for _ in range(3):
        x.normal_()
        with stream_of_another_library():
            graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, x * 2 + 1)
    graph.reset()


def test_a_graphed_function_waits_for_a_replay_on_a_stream_that_is_gone() -> None:
    function = cgraph.graphed(lambda x: x @ x, outputs="static")
    x = fresh(lab, 2048, 2048)
    for _ in range(3):
        function(x)
    torch.cuda.synchronize()
    other = fresh(lab, 2048, 2048)
    with stream_of_another_library():
        for _ in range(20):
            function(x)
    assert torch.equal(function(other).clone(), other @ other)
    # The handle of a stream that is gone may be that of a new one.
    with stream_of_another_library():
        assert torch.equal(function(x).clone(), x @ x)


def test_a_captured_training_step_equals_eager() -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(128, 8)
    ).cuda()
    twin = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(128, 8)
    ).cuda()
    twin.load_state_dict(model.state_dict())
    x, target = fresh(lab, 32, 64), torch.randint(8, (32,), device="cuda")

    def stepper(of: torch.nn.Module) -> Callable[[], torch.Tensor]:
        optimizer = torch.optim.Adam(of.parameters(), lr=1e-2, capturable=True)

        def step() -> torch.Tensor:
            optimizer.zero_grad(set_to_none=True)
            loss = torch.nn.functional.cross_entropy(of(x), target)
            loss.backward()
            optimizer.step()
            return loss

        return step

    ours, eager = stepper(model), stepper(twin)
    for step in (ours, eager):
        torch.manual_seed(2)
        warmed_up(step)
    graph = cgraph.CUDAGraph()
    with cgraph.graph(graph):
        loss = ours()
    torch.manual_seed(3)
    losses = []
    for seed in range(20):
        x.copy_(torch.randn(32, 64, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        losses.append(loss.item())
    torch.manual_seed(3)
    for seed, replayed in enumerate(losses):
        x.copy_(torch.randn(32, 64, generator=torch.Generator().manual_seed(seed)))
        assert abs(eager().item() - replayed) <= 1e-5 * abs(replayed)


@pytest.mark.parametrize("seed", [0, 1, 2**63 + 11])
def test_random_state_is_stored_by_a_node_of_the_graph(seed: int) -> None:
    if not _torch.CapturedDraws.are_told():
        pytest.skip("the host is replayed there")
    torch.cuda.manual_seed(seed)
    for _ in range(2):  # with the offset at zero, and further on
        graph = cgraph.CUDAGraph(keep_graph=True)
        with cgraph.graph(graph):
            y = torch.rand(64, device="cuda")
        assert graph._captured is not None
        assert graph._captured.random_step is None
        assert [step for _, step in graph._captured.generators] == [4]
        state = torch.cuda.get_rng_state()
        graph.replay()
        found = y.clone()
        torch.cuda.set_rng_state(state)
        assert torch.equal(found, torch.rand(64, device="cuda"))
