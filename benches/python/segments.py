"""P6 and training: captured pieces with eager work between them.

P6 is the host time of 33 captured pieces with eager attention between them, for each piece.

A piece is a gated network of two small layers; the attention writes its result in place, as in
inference servers. The loop replays each piece and calls the attention from Python, as home-made
runners do; ``graphed`` replays all of them by one native call. The eager part, the 32 calls of the
attention alone, is subtracted.

The training step is forward and backward pass of four blocks of dense layers with experts between
them, which get their rows one by one: eagerly, with each block given to torch's
``make_graphed_callables``, and as one graphed function with the experts as breaks.

    python benches/python/segments.py [--results folder]
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import cgraph
from common import host_us, parsed, publish

PIECES = 33
WIDTH = 64
BLOCKS = 4


def main() -> None:
    options = parsed(__doc__)
    pieces(options.results)
    training(options.results)


def pieces(file: Path | None) -> None:
    """Return the table of P6."""
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
        pool, graphs, results = torch.cuda.graph_pool_handle(), [], []
        source = x
        for weight, out in zip(weights, [*mixed, None], strict=True):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                results.append(piece(source, weight))
            graphs.append(graph)
            source = out

        def loop() -> Tensor:
            for graph, result, out in zip(graphs, results, mixed, strict=False):
                graph.replay()
                attention(result, out)
            graphs[-1].replay()
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
    publish("P6", "host time of pieces with eager attention", head, rows, file)


class Experts(nn.Module):
    """Two experts; each row goes to one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(256, 256) for _ in range(2))

    @cgraph.eager_break(materialize_grads=True)
    def forward(self, x: Tensor, choice: Tensor) -> Tensor:
        """Route rows [batch, 256] by expert numbers [batch] → [batch, 256]."""
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (rows,) = (choice == number).nonzero(as_tuple=True)
            out = out.index_add(0, rows, expert(x[rows]))
        return out


class Mixture(nn.Module):
    """Blocks of dense layers, and experts between them."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU())
        self.blocks = nn.ModuleList(
            nn.Sequential(*(copy.deepcopy(layer) for _ in range(4) for layer in layers))
            for _ in range(BLOCKS)
        )
        self.between = nn.ModuleList(Experts() for _ in range(BLOCKS - 1))

    def forward(self, x: Tensor, choice: Tensor) -> Tensor:
        """Run the blocks and the experts, with arguments as for one of the experts."""
        for block, experts in zip(self.blocks, self.between, strict=False):
            x = experts(block(x), choice)
        found: Tensor = self.blocks[-1](x)
        return found


def training(file: Path | None) -> None:
    """Return the table of the training step."""
    x, choice = torch.randn(64, 256, device="cuda"), torch.randint(0, 2, (64,), device="cuda")
    eager = Mixture().cuda()
    theirs, ours, whole = (copy.deepcopy(eager) for _ in range(3))
    for number, block in enumerate(theirs.blocks):
        sample = torch.randn(64, 256, device="cuda", requires_grad=number > 0)
        torch.cuda.make_graphed_callables(block, (sample,))
    graphed = cgraph.graphed(ours)

    def step(model: nn.Module, run: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], object]:
        def call() -> None:
            model.zero_grad()
            run(x, choice).square().mean().backward()

        return call

    stepped = cgraph.graphed(step(whole, whole))
    steps = [step(eager, eager), step(theirs, theirs), step(ours, graphed), stepped]
    for one in steps:
        for _ in range(4):  # to observe, to capture what a break comes back through, to replay
            one()
    for model in (theirs, ours, whole):
        for mine, right in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, right.grad, rtol=1e-3, atol=1e-6)
    assert graphed.report().captured == stepped.report().captured == 1
    times = host_us([*steps, *steps[2:]], 5)
    eager_us, torch_us, our_us, step_us, again, step_again = (f"{us:.0f}" for us in times)
    row = [str(BLOCKS), eager_us, torch_us, f"{our_us} / {again}", f"{step_us} / {step_again}"]
    head = ["blocks", "eager µs", "torch, graphed blocks: µs", "cgraph µs (twice)"]
    head += ["cgraph, whole step: µs (twice)"]
    publish("P6", "a training step with experts as breaks", head, [row], file)


if __name__ == "__main__":
    main()
