"""P15: a decode model's 128 graphs from a file, beside captures.

Each part runs in a process of its own, as a server's start does: one captures with cgraph and
saves, one loads, and one captures with torch's loop, each after its context and weights are there.
The file's kernels are loaded beside the weights, which the second table counts. Ready is the time
until the last graph has an exec; first token that until the result of the first replay is on the
host. Then the device time of a replay at 128 rows, and whether the loaded graphs return the same
bits.

    python benches/python/saved_graphs.py [--results folder]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from decode import Decode

import cgraph
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


def by_torch(_: Path) -> dict[str, float]:
    """Capture by torch's loop."""
    made, tokens, place = model()
    begin = time.perf_counter()
    made(tokens, place)
    pool, kept = torch.cuda.graph_pool_handle(), {}
    for size in SIZES:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            result = made(tokens[:size], place)
        kept[size] = graph, result
    torch.cuda.synchronize()
    ready = time.perf_counter()
    numbers(*kept[SIZE])
    first = time.perf_counter()
    return {
        "ready": ready - begin,
        "first": first - begin,
        "device": device_us(kept[SIZE][0].replay),
    }


def saving(folder: Path) -> dict[str, float]:
    """Capture by cgraph, and save."""
    cgraph.record_images()
    made, tokens, place = model()
    begin = time.perf_counter()
    made(tokens, place)
    pool, graphs, results = cgraph.graph_pool_handle(), {}, {}
    for size in SIZES:
        graphs[str(size)] = graph = cgraph.CUDAGraph(keep_graph=True)
        with cgraph.graph(graph, pool=pool):
            results[f"result {size}"] = made(tokens[:size], place)
        graph.instantiate()
    torch.cuda.synchronize()
    ready = time.perf_counter()
    names = {"model": made, "tokens": tokens, "place": place, **results}
    report = cgraph.save(folder / "graphs", graphs, names)
    saved = time.perf_counter()
    bits = {size: numbers(graphs[str(size)], results[f"result {size}"]) for size in CHECKED}
    torch.save(bits, folder / "bits")
    device = device_us(graphs[str(SIZE)].replay)
    took = saved - ready
    return {"ready": ready - begin, "save": took, "device": device, "bytes": report.size}


def loading(folder: Path) -> dict[str, float]:
    """Load, the kernels beside the weights."""
    kernels = cgraph.load_kernels(folder / "graphs")
    made, tokens, place = model()
    names = {"model": made, "tokens": tokens, "place": place}
    opened = kernels._opened().seconds
    begin = time.perf_counter()
    loaded = cgraph.load(kernels, names)
    torch.cuda.synchronize()
    ready = time.perf_counter()
    numbers(loaded.graphs[str(SIZE)], loaded.tensors[f"result {SIZE}"])
    first = time.perf_counter()
    bits = torch.load(folder / "bits")
    for size in CHECKED:
        found = numbers(loaded.graphs[str(size)], loaded.tensors[f"result {size}"])
        assert torch.equal(found, bits[size]), f"{size} rows differ"
    device = device_us(loaded.graphs[str(SIZE)].replay)
    return {**opened, "ready": ready - begin, "first": first - begin, "device": device}


PARTS = {"torch": by_torch, "save": saving, "load": loading}


def main() -> None:
    options = parsed(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        found = {}
        for part in ("save", "load", "torch"):
            command = [sys.executable, __file__, part, folder]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            found[part] = json.loads(done.stdout.splitlines()[-1])
    save, load, torchs = found["save"], found["load"], found["torch"]
    ms = [
        [f"{one[key] * 1e3:.0f}" if key in one else "" for key in ("ready", "first")]
        for one in (torchs, save, load)
    ]
    device = [f"{one['device']:.0f}" for one in (torchs, save, load)]
    names = ["torch's loop", "cgraph's captures", "cgraph.load"]
    rows = [[name, *times, us] for name, times, us in zip(names, ms, device, strict=True)]
    head = ["128 graphs", "ready ms", "first token ms", "device µs at 128 rows"]
    publish(
        "P15",
        "128 graphs of a decode model, after context and weights",
        head,
        rows,
        options.results,
    )
    parts = [f"{load[one] * 1e3:.0f}" for one in ("file", "kernels")]
    row = [*parts, f"{save['save'] * 1e3:.0f}", f"{save['bytes'] / (1 << 20):.1f}"]
    head = ["reading the file ms", "loading its kernels ms", "saving ms", "MiB"]
    publish(
        "P15", "the file: what is done beside the weights, and saving", head, [row], options.results
    )


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] in PARTS:
        with torch.no_grad():
            print(json.dumps(PARTS[sys.argv[1]](Path(sys.argv[2]))))
    else:
        main()
