"""P2 and P8 for ``cgraph.graphed``: host cost of a call, and a ladder of captures.

P2: a sum of 1 to 64 inputs of 16 KiB without gradients, with new inputs at each call; the result is
dropped before the next one. It is compared with torch's graphed callable, which copies each input,
the bare replay of its graph, and a native loop over the driver's launch of ours. Then calls take
turns among 1, 5 and 10 shapes, so that each finds its graph after all others, beside a dictionary
of torch's graphs by their shapes.

P8: a 16-layer decode model at 51 batch sizes, captured by ``.capture`` and by a loop over
``torch.cuda.graph``, both after one call at the largest size, nine times in turn. Then every size
is compared with eager, and so are sizes between them, which are padded; the difference between two
eager calls of the same size is shown too, as some of torch's kernels add up in any order. A call of
one size, which reads 149 tensors of 133 modules, is measured beside torch's copies and replay.

    python benches/python/graphed.py [--results folder]
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from callables import total
from decode import SIZES, Decode

import cgraph
from common import CALLS, calls_us, host_us, native_us, parsed, publish


def calls(count: int, library: Path) -> list[str]:
    """Return one row of P2."""
    samples, new, other = (
        [torch.randn(64, 64, device="cuda") for _ in range(count)] for _ in range(3)
    )
    turns = [new, other]
    with torch.no_grad():
        theirs = torch.cuda.make_graphed_callables(total, tuple(samples))
        bare, same = torch.cuda.CUDAGraph(), cgraph.CUDAGraph()
        for graph, capture in ((bare, torch.cuda.graph), (same, cgraph.graph)):
            with capture(graph):  # type: ignore[operator]
                total(*samples)
        fresh, static = cgraph.graphed(total), cgraph.graphed(total, outputs="static")
        for ours in (fresh, static):
            for given in (new, other, new):
                assert torch.equal(ours(*given), total(*given)), "graphed and eager differ"
        copied_us, fresh_us, static_us, again_us = calls_us(
            [(theirs, turns), (fresh, turns), (static, turns), (fresh, turns)]
        )
        (bare_us,) = host_us([bare.replay], CALLS)
    native = native_us(library, same, CALLS)
    figures = [copied_us, bare_us, native, static_us, fresh_us, again_us]
    return [str(count), *(f"{one:.2f}" for one in figures), f"{fresh_us / bare_us:.2f}"]


def shapes_in_turn(count: int) -> list[str]:
    """Return a row of calls that take turns among so many shapes."""
    columns = range(1, count + 1)
    samples, others = ([torch.randn(64, one, device="cuda") for one in columns] for _ in range(2))
    kept: dict[torch.Size, tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]] = {}
    for sample in samples:
        graph, static = torch.cuda.CUDAGraph(), sample.clone()
        with torch.cuda.graph(graph):
            result = total(static)
        kept[sample.shape] = graph, static, result

    def by_torch(x: torch.Tensor) -> torch.Tensor:
        graph, static, result = kept[x.shape]
        static.copy_(x)
        graph.replay()
        return result

    ours = cgraph.graphed(total)
    for sample in samples:
        # Ahead of time: many new shapes in a row count as shapes that never come again.
        ours.capture(sample, progress=False)
        assert torch.equal(ours(sample), by_torch(sample)), "graphed and torch differ"
    assert ours.report().captured == count, ours.report()
    # All of them go into the calls of a round.
    turn = [[sample] for sample in (*samples, *others)]
    torch_us, our_us = calls_us([(by_torch, turn), (ours, turn)])
    return [str(count), f"{torch_us:.2f}", f"{our_us:.2f}", f"{torch_us / our_us:.1f}"]


def served(model: Decode, graphed: Any, tokens: torch.Tensor, place: torch.Tensor) -> list[str]:
    """Return host µs of calls of a size and padded to it, by torch's copies and replay, or ours."""
    exact, less, static = tokens[:256], tokens[:250], tokens[:256].clone()
    graphed(less, place)
    graph = torch.cuda.CUDAGraph()
    where = place.clone()
    with torch.cuda.graph(graph):
        result = model(static, where)

    def by_torch() -> torch.Tensor:
        static.copy_(exact)
        where.copy_(place)
        graph.replay()
        return result

    def padded_by_torch() -> torch.Tensor:
        static[:250].copy_(less)
        static[250:].zero_()
        where.copy_(place)
        graph.replay()
        return result[:250]

    ours = [lambda: graphed(exact, place), lambda: graphed(less, place)]
    return in_text(host_us([by_torch, padded_by_torch, *ours], 5))


def settle() -> float:
    """Drop everything unused; return the time."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    return time.perf_counter()


def ladder(
    model: Decode, tokens: torch.Tensor, place: torch.Tensor, check: bool, folder: Path | None
) -> list[float]:
    """Return milliseconds of torch's captures and of ours, their ratio, and MiB."""
    begun, pool, kept = settle(), torch.cuda.graph_pool_handle(), []
    for size in reversed(SIZES):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            kept.append((graph, model(tokens[:size], place)))
    torch.cuda.synchronize()
    theirs = time.perf_counter() - begun
    kept.clear()
    # Nothing reads the padding's writes after the rows of a call.
    graphed = cgraph.graphed(model, sizes=SIZES, check_padding=False)
    begun = settle()
    graphed.capture(tokens, place, progress=False)
    torch.cuda.synchronize()
    ours = time.perf_counter() - begun
    report = graphed.report()
    assert report.captured == len(SIZES), report
    if check:
        graphed.freeze()
        apart = [
            in_text([farthest(run, model, tokens, place, sizes) for run in (graphed, model)])
            for sizes in (SIZES, (3, 5, 100, 250, 500))
        ]
        publish(
            "P8",
            "largest difference from eager, of the largest score",
            ["sizes", "cgraph", "eager again"],
            [["captured", *apart[0]], ["padded", *apart[1]]],
            folder,
        )
        found = served(model, graphed, tokens, place)
        rows = "256 rows", "250 padded"
        head = [f"{library}, {one}: µs" for library in ("torch", "cgraph") for one in rows]
        publish("P8", "a call of the decode model", head, [found], folder)
    memory = report.memory_bytes / (1 << 20)
    return [theirs * 1e3, ours * 1e3, ours / theirs, memory]


def farthest(
    run: Any, model: Decode, tokens: torch.Tensor, place: torch.Tensor, sizes: Sequence[int]
) -> float:
    """Return the largest difference from eager over some sizes."""
    most = 0.0
    for size in sizes:
        got, right = run(tokens[:size], place), model(tokens[:size], place)
        most = max(most, difference(got, right))
        del got
    return most


def in_text(values: list[float]) -> list[str]:
    """Return numbers for a table."""
    return [f"{value:.4g}" for value in values]


def difference(got: torch.Tensor, right: torch.Tensor) -> float:
    """Return the largest difference, in units of the largest value."""
    return float((got.float() - right.float()).abs().max() / right.float().abs().max())


def main() -> None:
    options = parsed(__doc__)
    head = ["inputs", "torch: copies and replay µs", "torch: bare replay µs", "native loop µs"]
    head += ["cgraph: static µs", "cgraph: fresh µs", "fresh again µs", "fresh / bare replay"]
    rows = [calls(count, options.library) for count in (1, 2, 4, 8, 16, 64)]
    publish("P2", "host time of a call of a graphed function", head, rows, options.results)
    head = ["shapes", "torch µs", "cgraph µs", "torch / cgraph"]
    with torch.no_grad():
        rows = [shapes_in_turn(count) for count in (1, 5, 10)]
        title = "calls of one input that take turns among shapes"
        publish("P2", title, head, rows, options.results)
        model = Decode().cuda().bfloat16().eval()
        tokens = torch.randint(0, 32_000, (max(SIZES),), device="cuda")
        place = torch.tensor([3], device="cuda")
        model(tokens, place)
        file = options.results
        ladder(model, tokens, place, False, file)
        found = [ladder(model, tokens, place, check, file) for check in (*[False] * 8, True)]
    rows = [[str(place), *in_text(values)] for place, values in enumerate(found, 1)]
    middle = [statistics.median(values) for values in zip(*found, strict=True)]
    rows.append(["median", *in_text(middle)])
    # The least disturbed values; the two need not be of one run.
    theirs, our, _, memory = (min(values) for values in zip(*found, strict=True))
    rows.append(["least", *in_text([theirs, our, our / theirs, memory])])
    head = ["run", "torch ms", "cgraph ms", "cgraph / torch", "MiB"]
    publish("P8", "51 batch sizes of a decode model", head, rows, options.results)


if __name__ == "__main__":
    main()
