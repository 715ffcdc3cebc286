"""P1: what a replay costs the host, for torch, cgraph and a native loop over the driver's launch.

One process, the same work in each graph: chains of 1, 10, 100 and 1000 elementwise kernels on 64
floats. A figure is the median over rounds of a round's mean; the device is idle when a round
starts, and a round enqueues little enough not to fill the driver's queue. Device time is that of
one replay between two events.

    python benches/python/replay.py [--markdown results.md]
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
from pathlib import Path

import torch

import cgraph
from common import ROUNDS, device_us, host_us, publish

NODES = (1, 10, 100, 1000)


def chain(x: torch.Tensor, nodes: int) -> torch.Tensor:
    """``nodes`` kernels, each after the one before."""
    for _ in range(nodes):
        x = x + 1
    return x


def native_us(library: Path, graph: cgraph.CUDAGraph, per_round: int) -> float:
    """Median host time of the driver's launch in a native loop, in µs; NaN without the library."""
    if not library.exists():
        return float("nan")
    launch = ctypes.CDLL(str(library)).cg_bench_launch
    launch.restype = ctypes.c_double
    launch.argtypes = [ctypes.c_uint32, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32]
    stream = torch.cuda.current_stream().cuda_stream
    rounds = []
    for _ in range(ROUNDS):
        rounds.append(launch(0, graph.raw_cuda_graph_exec(), stream, per_round) / 1e3)
        torch.cuda.synchronize()
    assert min(rounds) > 0, "a native launch failed"
    return statistics.median(rounds)


def measure(nodes: int, library: Path) -> list[str]:
    """One row of the table."""
    x = torch.randn(64, device="cuda")
    chain(x, nodes)
    theirs, ours = torch.cuda.CUDAGraph(), cgraph.CUDAGraph()
    with torch.cuda.graph(theirs):
        torch_out = chain(x, nodes)
    with cgraph.graph(ours):
        our_out = chain(x, nodes)
    x.normal_()
    theirs.replay()
    ours.replay()
    assert torch.equal(torch_out, our_out), "torch's graph and cgraph's differ"
    per_round = max(5, min(200, 2000 // nodes))
    torch_us, our_us, again = host_us([theirs.replay, ours.replay, ours.replay], per_round)
    native = native_us(library, ours, per_round)
    return [
        str(nodes),
        f"{torch_us:.2f}",
        f"{our_us:.2f} / {again:.2f}",
        f"{native:.2f}",
        f"{torch_us / our_us:.2f}",
        f"{device_us(theirs.replay):.1f}",
        f"{device_us(ours.replay):.1f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", type=Path, default=Path(__file__).parent / "libcg_bench.so")
    parser.add_argument("--markdown", type=Path, help="append the table to this file")
    options = parser.parse_args()
    head = [
        "nodes",
        "torch µs",
        "cgraph µs (twice)",
        "native loop µs",
        "torch / cgraph",
        "torch device µs",
        "cgraph device µs",
    ]
    rows = [measure(nodes, options.library) for nodes in NODES]
    publish("P1: host time of replay()", head, rows, options.markdown)


if __name__ == "__main__":
    main()
