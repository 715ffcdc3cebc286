"""P8, P9 and P12: cost of capturing a ladder of batch sizes, and of pausing a pool.

P8: capture and instantiation of a 16-layer decode model at 51 batch sizes into one pool, beside
torch, in turns; the ledger beside the device's own numbers. P9: pausing and resuming pools of
several sizes and segments; the first pause finds each segment mapped by itself, later ones find
neighbours together. P12: the same with the contents kept on the host, beside copies of as many
bytes to pinned memory of torch's and back; the first pause pins the memory.

    python benches/python/pools.py [--results folder]
"""

from __future__ import annotations

import gc
import statistics
import time

import torch
from decode import SIZES, Decode
from torch import Tensor

import cgraph
from common import parsed, publish

MIB = 1 << 20
PAUSES = 20


def free() -> int:
    """Return free bytes of the device, with torch's workspaces dropped."""
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def ladder(model: Decode, ours: bool) -> list[float]:
    """Return milliseconds of all captures; MiB taken, by the ledger, and the difference."""
    tokens = torch.randint(0, 32_000, (max(SIZES),), device="cuda")
    place = torch.tensor([3], device="cuda")
    api = cgraph if ours else torch.cuda
    pool = api.graph_pool_handle()
    graphs: list[tuple[int, object, Tensor]] = []
    before, seconds = free(), 0.0
    for size in reversed(SIZES):
        graph = api.CUDAGraph()
        start = time.perf_counter()
        with api.graph(graph, pool=pool):
            out = model(tokens[:size], place)
        seconds += time.perf_counter() - start
        graphs.append((size, graph, out))
    for size, graph, out in graphs:
        graph.replay()
        torch.testing.assert_close(out, model(tokens[:size], place), rtol=0.05, atol=0.05)
    taken = (before - free()) / MIB
    ledger = cgraph.memory().device / MIB if ours else float("nan")
    return [seconds * 1e3, taken, ledger, ledger - taken]


def copies(size: int) -> float:
    """Return milliseconds of a copy of so many bytes to pinned memory and back."""
    on_device = torch.empty(size, dtype=torch.uint8, device="cuda")
    on_host = torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def cycle() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        on_host.copy_(on_device)
        on_device.copy_(on_host)
        torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3

    return statistics.median(cycle() for _ in range(4))


def pauses(segments: list[int]) -> list[float]:
    """Return milliseconds of the first and later pauses and resumes, without and with contents."""
    pool = cgraph.MemPool()
    with torch.cuda.use_mem_pool(pool):
        kept = [torch.randn(size // 4, device="cuda") for size in segments]

    def cycle(keep: str) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        pool.pause(keep)
        pool.resume()
        return (time.perf_counter() - start) * 1e3

    first = cycle("discard")
    later = statistics.median(cycle("discard") for _ in range(PAUSES))
    first_host = cycle("host")
    host = statistics.median(cycle("host") for _ in range(3))
    del kept
    return [first, later, first_host, host]


def main() -> None:
    options = parsed(__doc__)
    rows, host_rows = [], []
    for name, segments in {
        "134 MiB in 1 segment": [134 * MIB],
        "140 MiB in 7": [20 * MIB] * 7,
        "1 GiB in 1": [1024 * MIB],
        "1 GiB in 51": [20 * MIB] * 51,
        "8 GiB in 8": [1024 * MIB] * 8,
    }.items():
        gib = sum(segments) / (1 << 30)
        *without, first, later = pauses(segments)
        rows.append([name, f"{gib + 0.3:.2f}", *(f"{ms:.2f}" for ms in without)])
        host = [copies(sum(segments)), first, later]
        host_rows.append([name, *(f"{ms:.1f}" for ms in host), f"{later / gib / 1e3:.3f}"])
    head = ["pool", "target, ms", "first pause + resume", "later"]
    publish("P9", "pause and resume of a pool", head, rows, options.results)
    head = ["pool", "copies, ms", "first pause + resume, ms", "later, ms", "later, s/GiB"]
    publish("P12", "pause and resume with contents", head, host_rows, options.results)
    with torch.no_grad():
        model = Decode().cuda().bfloat16().eval()
        model(torch.zeros(512, dtype=torch.long, device="cuda"), torch.tensor([3], device="cuda"))
        for ours in (False, True):
            ladder(model, ours)
        rows = [
            [name, *(f"{value:.1f}" for value in ladder(model, ours))]
            for name, ours in [("torch", False), ("cgraph", True)] * 3
        ]
    head = ["", "capture + instantiate, ms", "device MiB", "by the ledger", "difference"]
    title = "a decode model at 51 batch sizes in one pool"
    publish("P8-graphs", title, head, rows, options.results)


if __name__ == "__main__":
    main()
