"""P7: host cost of a replay of a graph that draws random numbers, for torch and cgraph.

The graphs are chains of dropouts on 4096 floats. Both draw the same numbers from the same seed.

    python benches/python/random_replay.py [--results folder]
"""

from __future__ import annotations

import torch
from torch.nn.functional import dropout

import cgraph
from common import device_us, host_us, parsed, publish


def chain(x: torch.Tensor, nodes: int) -> torch.Tensor:
    """Apply ``nodes`` dropouts, each to the previous result."""
    for _ in range(nodes):
        x = dropout(x, 0.1)
    return x


def measure(nodes: int) -> list[str]:
    """Return one row of the table."""
    x = torch.randn(4096, device="cuda")
    chain(x, nodes)
    theirs, ours = torch.cuda.CUDAGraph(), cgraph.CUDAGraph()
    with torch.cuda.graph(theirs):
        torch_out = chain(x, nodes)
    with cgraph.graph(ours):
        our_out = chain(x, nodes)
    for replay in (theirs.replay, ours.replay):
        torch.manual_seed(7)
        for _ in range(3):
            replay()
    assert torch.equal(torch_out, our_out), "torch's graph and cgraph's draw different numbers"
    per_round = max(5, 1000 // max(nodes, 10))
    torch_us, our_us, again = host_us([theirs.replay, ours.replay, ours.replay], per_round)
    return [
        str(nodes),
        f"{torch_us:.2f}",
        f"{our_us:.2f} / {again:.2f}",
        f"{torch_us / our_us:.2f}",
        f"{device_us(theirs.replay):.1f}",
        f"{device_us(ours.replay):.1f}",
    ]


def main() -> None:
    options = parsed(__doc__)
    head = [
        "dropouts",
        "torch µs",
        "cgraph µs (twice)",
        "torch / cgraph",
        "torch device µs",
        "cgraph device µs",
    ]
    rows = [measure(nodes) for nodes in (1, 10, 100)]
    publish("P7", "host time of a replay with random numbers", head, rows, options.results)


if __name__ == "__main__":
    main()
