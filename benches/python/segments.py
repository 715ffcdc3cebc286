"""P6: host time of 33 captured pieces with eager attention between them, for each piece.

A piece is a gated network of two small layers; the attention writes its result in place, as in
inference servers. The loop replays each piece and calls the attention from Python, as home-made
runners do; ``graphed`` replays all of them by one native call. The eager part, the 32 calls of the
attention alone, is subtracted.

    python benches/python/segments.py [--markdown results.md]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

import cgraph
from common import host_us, publish

PIECES = 33
WIDTH = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--markdown", type=Path, help="append the table to this file")
    options = parser.parse_args()
    weights = [torch.randn(WIDTH, WIDTH, device="cuda") / 8 for _ in range(PIECES)]
    mixed = [torch.empty(8, WIDTH, device="cuda") for _ in range(PIECES - 1)]

    def attention(x: Tensor, out: Tensor) -> None:
        torch.add(x, x, out=out)

    broken = cgraph.eager_break(attention)

    def piece(x: Tensor, weight: Tensor) -> Tensor:
        return functional.silu(x @ weight)

    def whole(x: Tensor) -> Tensor:
        for weight, out in zip(weights, mixed, strict=False):
            broken(piece(x, weight), out)
            x = out
        return piece(x, weights[-1])

    x = torch.randn(8, WIDTH, device="cuda")
    with torch.no_grad():
        right = whole(x)
        graphed = cgraph.graphed(whole)
        torch.testing.assert_close(graphed(x), right)
        torch.testing.assert_close(graphed(x), right)
        pool, pieces, results = torch.cuda.graph_pool_handle(), [], []
        source = x
        for weight, out in zip(weights, [*mixed, None], strict=True):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                results.append(piece(source, weight))
            pieces.append(graph)
            source = out

        def loop() -> Tensor:
            for graph, result, out in zip(pieces, results, mixed, strict=False):
                graph.replay()
                attention(result, out)
            pieces[-1].replay()
            return results[-1]

        torch.testing.assert_close(loop(), right)

        def eager() -> None:
            for result, out in zip(results, mixed, strict=False):
                attention(result, out)

        loop_us, our_us, again, eager_us = host_us(
            [loop, lambda: graphed(x), lambda: graphed(x), eager], 5
        )
    parts = [(us - eager_us) / PIECES for us in (loop_us, our_us, again)]
    rows = [
        [
            str(PIECES),
            f"{loop_us:.1f}",
            f"{our_us:.1f} / {again:.1f}",
            f"{eager_us:.1f}",
            f"{parts[0]:.2f}",
            f"{parts[1]:.2f} / {parts[2]:.2f}",
        ]
    ]
    head = ["pieces", "torch loop µs", "cgraph µs (twice)", "eager part µs"]
    head += ["torch µs a piece", "cgraph µs a piece"]
    publish("P6: host time of pieces with eager attention", head, rows, options.markdown)


if __name__ == "__main__":
    main()
