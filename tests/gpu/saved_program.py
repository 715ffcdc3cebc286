"""Two processes: ``saved_program.py save FOLDER`` saves graphs, and ``load`` compares them.

The one that saves writes what its own replays return for random inputs; the one that loads wants
the same bits, with memory at other addresses.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import cgraph

INPUTS = 200
ROWS, WIDTH = 8, 256


class Model(nn.Module):
    """Matrices, attention, norms, a cache that is written, dropout, and a constant."""

    def __init__(self, *, drops: bool) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, 3 * WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.out.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.register_buffer("cache", torch.zeros(ROWS, WIDTH))
        self.drops = drops

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (one.view(1, ROWS, 4, -1).transpose(1, 2) for one in self.into(x).chunk(3, -1))
        found = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        hidden = self.norm(x + found.reshape(ROWS, WIDTH))
        self.cache.add_(hidden)
        if self.drops:
            hidden = nn.functional.dropout(hidden, 0.3)
        picked = torch.softmax(self.out(hidden), -1)
        return picked, picked.argmax(-1) if not self.drops else torch.multinomial(picked, 1)


def made(kind: str) -> tuple[Any, Model, Tensor]:
    """Return a function, its model and its input."""
    torch.manual_seed(1)
    model = Model(drops=kind == "drops").cuda().bfloat16()
    x = torch.zeros(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)
    if kind != "compiled":
        return model, model, x
    return torch.compile(model, fullgraph=True), model, x


def results(graph: cgraph.CUDAGraph, model: Model, x: Tensor, out: list[Tensor]) -> list[Tensor]:
    """Replay for random inputs; return copies of all results and of the cache."""
    found = []
    torch.manual_seed(2)
    with torch.no_grad():
        model.cache.zero_()
    for _ in range(INPUTS):
        x.copy_(torch.randn(ROWS, WIDTH).to(x))
        graph.replay()
        found += [one.cpu() for one in (*out, model.cache)]
    return found


@torch.no_grad()
def save(kind: str, folder: Path) -> None:
    cgraph.record_images()
    run, model, x = made(kind)
    for _ in range(3):
        run(x)
    pool = cgraph.MemPool()
    graphs, named = {}, {"model": model, "x": x}
    for number in range(2):
        graphs[f"step {number}"] = graph = cgraph.CUDAGraph(keep_graph=True)
        with cgraph.graph(graph, pool=pool):
            out = run(x)
        named |= {f"out {number}.{place}": one for place, one in enumerate(out)}
        graph.instantiate()
    print(cgraph.save(folder / "graphs", graphs, named))
    found = [results(graph, model, x, list(outs(named, name))) for name, graph in graphs.items()]
    torch.save(found, folder / "results")


def outs(named: dict[str, Any], name: str) -> list[Tensor]:
    """Return the results of a graph in the order of their names."""
    mine = f"out {name.removeprefix('step ')}."
    return [named[one] for one in sorted(named) if one.startswith(mine)]


@torch.no_grad()
def load(kind: str, folder: Path) -> None:
    # Nothing lies where it was.
    moved = [torch.zeros(3 << 20, device="cuda") for _ in range(7)]
    _, model, x = made(kind)
    loaded = cgraph.load(folder / "graphs", {"model": model, "x": x})
    print(loaded.report)
    expected = torch.load(folder / "results")
    for wanted, (name, graph) in zip(expected, loaded.graphs.items(), strict=True):
        for one in loaded.tensors.values():
            one.fill_(77)
        found = results(graph, model, x, outs(loaded.tensors, name))
        for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
            assert torch.equal(one, other), f"{name}, result {number}: {one} and {other}"
    memory = cgraph.memory()
    print(memory)
    del graph, loaded, moved
    print("equal")


if __name__ == "__main__":
    {"save": save, "load": load}[sys.argv[1]](sys.argv[2], Path(sys.argv[3]))
