"""P15: a decode model's 128 graphs from a file, beside captures.

Each part runs in a process of its own, as a server's start does, after its context and weights are
there: torch's loop; a ladder that captures and writes its file, and one that loads it; graphs that
are captured and saved one by one, and loaded by ``cgraph.load``. The files' kernels are loaded
beside the weights, which the second table counts. Ready is the time until the last graph has an
exec; first token that until the result of the first replay is on the host. Then the device time of
a replay at 128 rows and the memory of the graphs: their pools, and what the device lost besides.
Loaded graphs must return the same bits as captured ones.

    python benches/python/saved_graphs.py [--results folder]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from decode import Decode

import cgraph
from cgraph.saved import Kernels
from common import device_us, parsed, publish

SIZES = range(512, 0, -4)
SIZE = 128
CHECKED = (512, 260, 128, 4)


def model() -> tuple[Decode, torch.Tensor, torch.Tensor]:
    """Return the model and its inputs, the same in each process."""
    # cuDNN's attention returns other bits from run to run here, and compiles for each size.
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.manual_seed(1)
    with torch.device("cuda"):
        made = Decode(max(SIZES)).bfloat16().eval()
        tokens = torch.randint(0, 32_000, (max(SIZES),))
        place = torch.tensor([3])
    torch.cuda.synchronize()
    return made, tokens, place


def numbers(graph: Any, result: torch.Tensor) -> torch.Tensor:
    """Replay; return the result on the host."""
    graph.replay()
    return result.cpu()


class Start:
    """The clock and the memory of one start.

    Args:
        kernels: The kernels of a file, if one is loaded.
    """

    def __init__(self, kernels: Kernels | None = None) -> None:
        self.model, self.tokens, self.place = model()
        self.names = {"model": self.model, "tokens": self.tokens, "place": self.place}
        self.found = dict(kernels._opened().seconds) if kernels is not None else {}
        torch.cuda.empty_cache()
        self._free = torch.cuda.mem_get_info()[0]
        self._begin = time.perf_counter()

    def note(self, what: str) -> None:
        """Note the seconds since the weights were there."""
        torch.cuda.synchronize()
        self.found[what] = time.perf_counter() - self._begin

    def end(self, replay: Any) -> dict[str, float]:
        """Return all numbers, with those of a replay at 128 rows."""
        self.found["device"] = device_us(replay)
        torch.cuda.empty_cache()
        self.found["memory"] = self._free - torch.cuda.mem_get_info()[0]
        return self.found


def by_torch(_: Path) -> dict[str, float]:
    """Capture by torch's loop."""
    start = Start()
    start.model(start.tokens, start.place)
    pool, kept = torch.cuda.graph_pool_handle(), {}
    for size in SIZES:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            result = start.model(start.tokens[:size], start.place)
        kept[size] = graph, result
    start.note("ready")
    numbers(*kept[SIZE])
    start.note("first")
    return start.end(kept[SIZE][0].replay)


def by_ladder(folder: Path) -> dict[str, float]:
    """Capture by a ladder, which keeps its graphs in a file, or load them."""
    file = folder / "ladder"
    cgraph.record_images(unless=file)
    kernels = cgraph.load_kernels(file) if file.exists() else None
    start = Start(kernels)
    ladder = cgraph.GraphLadder()
    if kernels is None:
        start.model(start.tokens, start.place)
    with ladder.kept_in(kernels or file) as kept:
        for size in SIZES:
            ladder.capture(size, start.model, start.tokens[:size], start.place, run=False)
        start.note("captured")
    start.note("ready")
    assert kept.is_written if kernels is None else len(kept.loaded) == len(SIZES), kept
    ladder(SIZE).cpu()
    start.note("first")
    same_bits(folder, lambda size: ladder(size).cpu())
    if kernels is None:
        start.found["save"] = start.found["ready"] - start.found["captured"]
        start.found["ready"] = start.found["captured"]
    start.found["bytes"] = file.stat().st_size
    return start.end(lambda: ladder(SIZE))


def saving(folder: Path) -> dict[str, float]:
    """Capture by cgraph, and save."""
    cgraph.record_images()
    start = Start()
    start.model(start.tokens, start.place)
    pool, graphs, results = cgraph.graph_pool_handle(), {}, {}
    for size in SIZES:
        graphs[str(size)] = graph = cgraph.CUDAGraph(keep_graph=True)
        with cgraph.graph(graph, pool=pool):
            results[f"result {size}"] = start.model(start.tokens[:size], start.place)
        graph.instantiate()
    start.note("ready")
    start.found["bytes"] = cgraph.save(folder / "graphs", graphs, {**start.names, **results}).size
    start.note("save")
    start.found["save"] -= start.found["ready"]
    same_bits(folder, lambda size: numbers(graphs[str(size)], results[f"result {size}"]))
    return start.end(graphs[str(SIZE)].replay)


def loading(folder: Path) -> dict[str, float]:
    """Load, the kernels beside the weights."""
    kernels = cgraph.load_kernels(folder / "graphs")
    start = Start(kernels)
    loaded = cgraph.load(kernels, start.names)
    start.note("ready")
    graphs, results = loaded.graphs, loaded.tensors
    numbers(graphs[str(SIZE)], results[f"result {SIZE}"])
    start.note("first")
    same_bits(folder, lambda size: numbers(graphs[str(size)], results[f"result {size}"]))
    return start.end(graphs[str(SIZE)].replay)


def same_bits(folder: Path, result: Callable[[int], torch.Tensor]) -> None:
    """Raise if results at some sizes differ from those of the first process."""
    bits, file = {size: result(size) for size in CHECKED}, folder / "bits"
    if not file.exists():
        torch.save(bits, file)
    for size, one in torch.load(file).items():
        assert torch.equal(one, bits[size]), f"{size} rows differ"


PARTS = {
    "torch": ("torch's loop", by_torch),
    "captured ladder": ("a ladder, captured", by_ladder),
    "loaded ladder": ("a ladder, loaded", by_ladder),
    "save": ("cgraph's captures", saving),
    "load": ("cgraph.load", loading),
}


def main() -> None:
    options = parsed(__doc__)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for part in PARTS:
            command = [sys.executable, __file__, part, folder]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            found[part] = json.loads(done.stdout.splitlines()[-1])
    rows = [
        [
            PARTS[part][0],
            f"{one['ready'] * 1e3:.0f}",
            f"{one['first'] * 1e3:.0f}" if "first" in one and "save" not in one else "",
            f"{one['device']:.0f}",
            f"{one['memory'] / (1 << 20):.0f}",
        ]
        for part, one in found.items()
    ]
    head = [
        "128 graphs",
        "ready ms",
        "first token ms",
        "device µs at 128 rows",
        "MiB of the device",
    ]
    title = "128 graphs of a decode model, after context and weights"
    publish("P15", title, head, rows, options.results)
    rows = [
        [
            name,
            f"{found[write]['save'] * 1e3:.0f}",
            f"{found[write]['bytes'] / (1 << 20):.1f}",
            *(f"{found[read][part] * 1e3:.0f}" for part in ("file", "kernels")),
        ]
        for name, write, read in (
            ("a ladder's", "captured ladder", "loaded ladder"),
            ("cgraph.save's", "save", "load"),
        )
    ]
    head = ["file", "writing ms", "MiB", "reading ms", "loading its kernels ms"]
    title = "the file: what is done beside the weights, and saving"
    publish("P15", title, head, rows, options.results)


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] in PARTS:
        with torch.no_grad():
            print(json.dumps(PARTS[sys.argv[1]][1](Path(sys.argv[2]))))
    else:
        main()
