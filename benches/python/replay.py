"""P1: host cost of a replay, for torch, cgraph and a native loop over the driver's launch.

One process, the same work in each graph: chains of 1, 10, 100 and 1000 elementwise kernels on 64
floats. A figure is the median over rounds of a round's mean; the device is idle when a round
starts, and a round enqueues little enough not to fill the driver's queue. Device time is that of
one replay between two events.

    python benches/python/replay.py [--results folder]
"""

from __future__ import annotations

from pathlib import Path

import torch

import cgraph
from common import device_us, host_us, native_us, parsed, publish

NODES = (1, 10, 100, 1000)


def chain(x: torch.Tensor, nodes: int) -> torch.Tensor:
    """Run ``nodes`` kernels, each after the previous one."""
    for _ in range(nodes):
        x = x + 1
    return x


def measure(nodes: int, library: Path) -> list[str]:
    """Return one row of the table."""
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
    options = parsed(__doc__)
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
    publish("P1", "host time of replay()", head, rows, options.results)


if __name__ == "__main__":
    main()
