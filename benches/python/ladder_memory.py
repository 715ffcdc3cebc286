"""P8: memory of a ladder of batch sizes beside that of its largest size.

A language model's head: two wide layers and scores over a vocabulary, which are the largest tensor,
at eight numbers of rows, the largest first. Outputs are kept as a program keeps them to read them
after each replay: by torch's graphs as they are, by cgraph's as weak references or by ``graphed``.

    python benches/python/ladder_memory.py [--results folder]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import cgraph
from common import free_bytes, parsed, publish

MIB = 1 << 20
SIZES = [2048, 1792, 1536, 1280, 1024, 768, 512, 256]
WIDTH = 4096
Capture = Callable[[nn.Module, Sequence[int], Tensor], Any]


class Head(nn.Module):
    """Two layers and scores, with a break between the layers if it is asked for."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.scores = nn.Linear(WIDTH, 65_536)
        self.between = cgraph.eager_break(torch.relu) if breaks else torch.relu

    def forward(self, x: Tensor) -> Tensor:
        """Return the logarithms of the probabilities."""
        for layer in self.layers:
            x = self.between(layer(x))
        return torch.log_softmax(self.scores(x), dim=-1)


def by_torch(model: nn.Module, sizes: Sequence[int], x: Tensor) -> Any:
    """Capture by torch's class, and keep the outputs."""
    pool, kept = torch.cuda.graph_pool_handle(), []
    for size in sizes:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            out = model(x[:size])
        kept.append((graph, out))
    return kept


def by_graph(model: nn.Module, sizes: Sequence[int], x: Tensor) -> Any:
    """Capture by cgraph's class in a scope, and keep weak outputs."""
    kept = []
    with cgraph.capture_scope() as pool:
        for size in sizes:
            graph = cgraph.CUDAGraph()
            with cgraph.graph(graph, pool=pool):
                out = cgraph.weak_ref(model(x[:size]))
            kept.append((graph, out))
    return kept


def by_segments(model: nn.Module, sizes: Sequence[int], x: Tensor) -> Any:
    """Capture segments between breaks in a scope, and keep weak outputs."""
    kept = []
    with cgraph.capture_scope() as pool:
        for size in sizes:
            rows = x[:size]
            graph, out = cgraph.SegmentedGraph.capture(lambda rows=rows: model(rows), pool=pool)
            kept.append((graph, cgraph.weak_ref(out)))
            del out
    return kept


def by_graphed(outputs: Any) -> Capture:
    """Return a capture by ``graphed``."""

    def capture(model: nn.Module, sizes: Sequence[int], x: Tensor) -> Any:
        function = cgraph.graphed(model, sizes=sizes, outputs=outputs)
        return function.capture(x, progress=False)

    return capture


def taken(capture: Capture, breaks: bool, sizes: Sequence[int]) -> tuple[float, float]:
    """Return MiB of the device that a ladder keeps: in torch's segments, and for execs."""
    x = torch.randn(SIZES[0], WIDTH, device="cuda", dtype=torch.bfloat16)
    model = Head(breaks).cuda().bfloat16()
    model(x)
    before, reserved = free_bytes(), torch.cuda.memory_reserved()
    kept = capture(model, sizes, x)
    found = before - free_bytes()
    segments = torch.cuda.memory_reserved() - reserved
    del kept
    return segments / MIB, (found - segments) / MIB


def main() -> None:
    options = parsed(__doc__)
    ways: dict[str, tuple[Capture, bool]] = {
        "torch.cuda.graph": (by_torch, False),
        "cgraph.graph, weak_ref": (by_graph, False),
        "graphed, fresh": (by_graphed("fresh"), False),
        "graphed, static": (by_graphed("static"), False),
        "SegmentedGraph, weak_ref": (by_segments, True),
        "graphed with breaks": (by_graphed("fresh"), True),
    }
    rows = []
    with torch.no_grad():
        for name, (capture, breaks) in ways.items():
            taken(capture, breaks, SIZES[:1])
            one, _ = taken(capture, breaks, SIZES[:1])
            every, execs = taken(capture, breaks, SIZES)
            rows.append([name, *(f"{n:.0f}" for n in (one, every)), f"{every / one:.2f}"])
            rows[-1].append(f"{execs:.0f}")
    head = ["", "largest size, MiB", "all 8 sizes, MiB", "ratio", "execs, MiB"]
    publish("P8-memory", "device memory of a ladder", head, rows, options.results)


if __name__ == "__main__":
    main()
