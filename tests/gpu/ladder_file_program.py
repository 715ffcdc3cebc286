"""One program, run twice: ``ladder_file_program.py KIND FOLDER`` keeps a ladder's graphs there.

The first process captures, and writes what its replays return for random inputs; the second one
wants the same bits, with memory at other addresses.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from saved_program import WIDTH, Model
from torch import Tensor

import cgraph
from cgraph.piecewise import PiecewiseBackend, mark_size

SIZES = (8, 4, 2)


class Rows(Model):
    """The model for any number of rows, with a cache that is written."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.norm(x + self.out(x))
        self.cache[: len(x)].add_(hidden)
        if self.drops:
            hidden = torch.nn.functional.dropout(hidden, 0.3)
        picked = torch.softmax(self.out(hidden), -1)
        return picked, picked.argmax(-1)


class Pieces(torch.nn.Module):
    """A model that torch compiles for any number of rows, with a buffer that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shift", torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.softmax(self.out(self.into(x).relu() + self.shift), -1)
        return found


@torch.no_grad()
def pieces(folder: Path) -> None:
    """Warm up a backend, and compare its calls with the model's own."""
    file = folder / "graphs"
    cgraph.record_images(unless=file)
    torch.manual_seed(1)
    model = Pieces().cuda()
    backend = PiecewiseBackend(capture_sizes=SIZES, graph_file=str(file))
    fast, x = torch.compile(model, backend=backend), torch.randn(8, WIDTH, device="cuda")

    def warm_up_and_check() -> None:
        backend.warm_up(lambda rows: fast(mark_size(x[:rows])), progress=False)
        for rows in SIZES:
            x.normal_()
            assert torch.allclose(fast(x[:rows]), model(x[:rows]), rtol=1e-4, atol=1e-5)

    warm_up_and_check()
    print(backend.counters)
    model.out.weight.data = torch.randn_like(model.out.weight)
    backend.clear()
    warm_up_and_check()


@torch.no_grad()
def main(kind: str, folder: Path) -> None:
    if kind == "pieces":
        pieces(folder)
        return
    file, results = folder / "graphs", folder / "results"
    cgraph.record_images(unless=file)
    moved = [torch.zeros(3 << 20, device="cuda") for _ in range(7 if results.exists() else 0)]
    torch.manual_seed(1)
    model = Rows(drops=kind == "drops").cuda().bfloat16()
    x = torch.zeros(8, WIDTH, device="cuda", dtype=torch.bfloat16)
    run = torch.compile(model, fullgraph=True, dynamic=True) if kind == "compiled" else model
    ladder = cgraph.GraphLadder(cgraph.MemPool(), fresh_outputs=kind != "plain")
    with ladder.kept_in(file) as kept:
        for rows in SIZES:
            ladder.capture(rows, run, x[:rows], before=lambda n=rows: run(x[:n]), run=False)
    print(kept)
    found = []
    torch.manual_seed(2)
    model.cache.zero_()
    for _ in range(20):
        for rows in SIZES:
            given = torch.randn(rows, WIDTH).to(x)
            found += [one.cpu() for one in (*ladder(rows, given), model.cache)]
    if not results.exists():
        torch.save(found, results)
    for number, (one, other) in enumerate(zip(found, torch.load(results), strict=True)):
        assert torch.equal(one, other), f"result {number}: {one} and {other}"
    print(cgraph.memory())
    del moved


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
