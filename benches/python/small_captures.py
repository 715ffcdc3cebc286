"""P11: cost of capturing and replaying one small graph, beside torch.

One kernel on 1,024 numbers is captured, replayed and dropped, again and again: with a pool of its
own, and into a pool that other graphs keep.

    python benches/python/small_captures.py [--results folder]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

import cgraph
from common import parsed, publish

CYCLES, ROUNDS = 200, 5


def milliseconds(cycle: Callable[[], None]) -> float:
    """Return the mean milliseconds of a cycle."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CYCLES):
        cycle()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / CYCLES * 1e3


def main() -> None:
    options = parsed(__doc__)
    x = torch.randn(1024, device="cuda")
    # The library and the pool's first graph, which keeps the pool.
    keepers = []

    def cycle(api: object, pool: object = None) -> Callable[[], None]:
        def run() -> None:
            graph = api.CUDAGraph()
            with api.graph(graph, pool=pool):
                x * 3
            graph.replay()

        return run

    rows = []
    for name, shares in (("its own", False), ("shared", True)):
        runs = []
        for api in (torch.cuda, cgraph):
            pool = api.graph_pool_handle() if shares else None
            if shares:
                keepers.append(api.CUDAGraph())
                with api.graph(keepers[-1], pool=pool):
                    x + 1
            runs.append(cycle(api, pool))
            milliseconds(runs[-1])
        rounds = [[milliseconds(run) for run in runs] for _ in range(ROUNDS)]
        theirs, ours = (statistics.median(times) for times in zip(*rounds, strict=True))
        rows.append([name, f"{theirs:.3f}", f"{ours:.3f}", f"{ours / theirs:.2f}"])
    head = ["pool", "torch, ms", "cgraph, ms", "ratio"]
    publish("P11", "capture, replay and end of a small graph", head, rows, options.results)


if __name__ == "__main__":
    main()
