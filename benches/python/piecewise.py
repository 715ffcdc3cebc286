"""P6, P8 and P14 for a server's model in pieces: ``PiecewiseBackend`` and ``GraphLadder``.

P6 is the host time of 33 captured pieces with eager attention between them, for each piece; the
eager part, the 32 calls of the attention alone, is subtracted. The loop replays each piece and
calls the attention from Python, as home-made runners do; after ``patch_torch()`` its graphs are
cgraph's, as with the plugin of vLLM. The loop of callables is that of vLLM's breakable graphs. With
``GraphLadder``, each piece is a call by its size.

P8 captures 33 pieces for 51 sizes, the largest first, into one pool: by torch's class with weak
outputs, and by ``PiecewiseBackend.warm_up``. Both run each piece once before its capture.

P14 starts a program twice whose 33 pieces Inductor compiles; the second finds them on disk. The
import of Inductor, which either start needs, is a part of the seconds in the backend.

    python benches/python/piecewise.py [--results folder]
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional

import cgraph
from cgraph.integrations.native_replays import NativeReplay
from cgraph.piecewise import PiecewiseBackend, mark_size
from common import free_bytes, host_us, parsed, publish

PIECES = 33
WIDTH = 64
ROWS = 8
MIB = 1 << 20
DEEP = 2048
SIZES = [1, 2, 4, *range(8, 385, 8)]


def _attend(x: Tensor, out: Tensor) -> None:
    torch.add(x, x, out=out)


_library = torch.library.Library("bench", "DEF")
_library.define("attend(Tensor x, Tensor(a!) out) -> ()")
_library.impl("attend", _attend, "CUDA")
_library._register_fake("attend", lambda x, out: None)
attend = torch.ops.bench.attend.default


class Model(nn.Module):
    """Pieces with an attention between them that writes its result."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        make = {"device": "cuda"}
        many = range(PIECES)
        self.up = nn.ParameterList(torch.randn(width, inner, **make) / width**0.5 for _ in many)
        self.down = nn.ParameterList(torch.randn(inner, width, **make) / inner**0.5 for _ in many)

    def piece(self, x: Tensor, number: int) -> Tensor:
        """Run one piece."""
        return functional.silu(x @ self.up[number]) @ self.down[number]

    def forward(self, x: Tensor) -> Tensor:
        """Run all pieces."""
        for number in range(PIECES - 1):
            y = self.piece(x, number)
            x = torch.empty_like(y)
            torch.ops.bench.attend(y, x)
        return self.piece(x, PIECES - 1)


class Loop:
    """Graphs and calls that a loop runs in turn, as vLLM's breakable graphs."""

    def __init__(self, graphs: list[Any], results: list[Tensor], outs: list[Tensor]) -> None:
        self.segments: list[Callable[[], Any]] = []
        for graph, result, out in zip(graphs, results, [*outs, None], strict=True):
            self.segments.append(graph.replay)
            if out is not None:
                self.segments.append(lambda result=result, out=out: attend(result, out))

    def replay(self) -> None:
        """Run all."""
        for one in self.segments:
            one()


def main() -> None:
    part = {"ladder": ladder_part, "start": start_part}.get(sys.argv[1] if sys.argv[1:] else "")
    with torch.no_grad():
        if part is not None:
            print(json.dumps(part(*sys.argv[2:])))
            return
        options = parsed(__doc__)
        replays(options.results)
        ladders(options.results)
        starts(options.results)


def replays(folder: Path | None) -> None:
    """Publish the tables of P6."""
    model = Model(WIDTH, WIDTH)
    x = torch.randn(ROWS, WIDTH, device="cuda")
    right = model(x)
    mixed = [torch.empty(ROWS, WIDTH, device="cuda") for _ in range(PIECES - 1)]
    sources = [x, *mixed]
    pool, graphs, results = torch.cuda.graph_pool_handle(), [], []
    own_pool, own_graphs, own_results = cgraph.graph_pool_handle(), [], []
    ladders = [cgraph.GraphLadder(weak_outputs=False) for _ in range(PIECES)]
    for number, (source, ladder) in enumerate(zip(sources, ladders, strict=True)):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            results.append(model.piece(source, number))
        graphs.append(graph)
        own = cgraph.CUDAGraph()
        with cgraph.graph(own, pool=own_pool):
            own_results.append(model.piece(source, number))
        own_graphs.append(own)
        ladder.capture(ROWS, lambda x, n=number: model.piece(x, n), source)

    theirs, ours = Loop(graphs, results, mixed), Loop(own_graphs, own_results, mixed)
    plugin = NativeReplay("vLLM", ["segments"], lambda segments: segments.replay)

    def callables() -> Tensor:
        theirs.replay()
        return results[-1]

    def joined() -> Tensor:
        plugin(Loop.replay, ours)
        return own_results[-1]

    def pieces() -> Tensor:
        for ladder, out in zip(ladders, mixed, strict=False):
            attend(ladder(ROWS), out)
        return ladders[-1](ROWS)

    def eager() -> None:
        for result, out in zip(results, mixed, strict=False):
            attend(result, out)

    ways: dict[str, Callable[[], Any]] = {
        "torch's loop": loop_of(graphs, results, mixed),
        "the loop after patch_torch()": loop_of(own_graphs, own_results, mixed),
        "torch's loop of callables": callables,
        "that loop by the plugin": joined,
        "GraphLadder, call by call": pieces,
    }
    for outputs in ("fresh", "static"):
        run = whole(model, x, outputs)
        ways[f"PiecewiseBackend, {outputs}"] = run
    for run in ways.values():
        for _ in range(3):
            torch.testing.assert_close(run(), right, rtol=1e-3, atol=1e-3)
    *times, eager_us = host_us([*ways.values(), *ways.values(), eager], 5)
    firsts, seconds = times[: len(ways)], times[len(ways) :]
    rows = [
        [
            name,
            f"{first:.1f} / {second:.1f}",
            f"{(first - eager_us) / PIECES:.2f} / {(second - eager_us) / PIECES:.2f}",
            f"{(first - eager_us) / (firsts[0] - eager_us):.2f}",
        ]
        for name, first, second in zip(ways, firsts, seconds, strict=True)
    ]
    rows.append(["the eager part", f"{eager_us:.1f}", "-", "-"])
    head = ["33 pieces", "call µs (twice)", "µs a piece (twice)", "of torch's loop"]
    publish("P6-pieces", "host time of a model in pieces", head, rows, folder)


def loop_of(graphs: list[Any], results: list[Tensor], outs: list[Tensor]) -> Callable[[], Tensor]:
    """Return a loop of graphs with the attention between."""

    def loop() -> Tensor:
        for graph, result, out in zip(graphs, results, outs, strict=False):
            graph.replay()
            attend(result, out)
        graphs[-1].replay()
        return results[-1]

    return loop


def whole(model: Model, x: Tensor, outputs: Any) -> Callable[[], Tensor]:
    """Return a call of the compiled code of a model in pieces, without Dynamo's guards."""
    torch.compiler.reset()
    backend = PiecewiseBackend(
        splitting_ops=["bench::attend"],
        capture_sizes=[ROWS],
        compiler="eager",
        outputs=outputs,
    )
    given: list[tuple[Any, ...]] = []

    def noting(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        run = backend(graph, inputs)

        def noted(*args: Any) -> Any:
            given[:] = [(run, args)]
            return run(*args)

        return noted

    fast = torch.compile(model, backend=noting)
    first = x.clone()
    mark_size(first)
    for _ in range(4):
        fast(first)
    run, args = given[0]
    assert backend.counters.replays == 1
    return lambda: run(*args)[0]


def ladders(folder: Path | None) -> None:
    """Publish the table of P8: each way in processes of its own, as the driver keeps memory."""
    rows = []
    for name in ("torch's loop, weak outputs", "PiecewiseBackend"):
        largest, every = (child("ladder", name, which) for which in ("largest", "all"))
        rows.append(
            [
                name,
                f"{every['seconds']:.2f}",
                f"{largest['pool'] / MIB:.0f}",
                f"{every['pool'] / MIB:.0f}",
                f"{every['pool'] / largest['pool']:.3f}",
                f"{every['execs'] / MIB:.0f}",
            ]
        )
    head = ["51 sizes, 33 pieces", "seconds", "largest alone MiB", "pool MiB", "ratio", "execs MiB"]
    publish("P8-pieces", "a ladder of a model in pieces", head, rows, folder)


def starts(folder: Path | None) -> None:
    """Publish the table of two starts of a compiled model, the second from the cache on disk."""
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        for name in ("first", "second"):
            with tempfile.TemporaryDirectory() as cold:
                # Inductor's own caches are cold in both.
                found = child("start", cache, TORCHINDUCTOR_CACHE_DIR=cold)
            rows.append(
                [
                    name,
                    f"{found['compilations']}",
                    f"{found['loaded']}",
                    f"{found['backend']:.2f}",
                    f"{found['imports']:.2f}",
                    f"{found['captures']:.2f}",
                    f"{found['whole']:.2f}",
                ]
            )
    head = [
        "start",
        "compilations",
        "loaded",
        "backend s",
        "of it imports s",
        "captures s",
        "whole process s",
    ]
    publish("P14", "two starts of a compiled model in pieces", head, rows, folder)


def child(*words: str, **environment: str) -> dict[str, Any]:
    """Run a part of the bench in a process of its own; return what it prints."""
    command = [sys.executable, __file__, *words]
    began = time.perf_counter()
    done = subprocess.run(
        command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**found, "whole": time.perf_counter() - began}


def ladder_part(name: str, which: str) -> dict[str, float]:
    """Capture sizes one way; return bytes of segments and execs, and seconds."""
    capture = by_torch if name.startswith("torch") else by_pieces
    sizes = SIZES if which == "all" else SIZES[-1:]
    model = Model(DEEP, 4 * DEEP).bfloat16()
    x = torch.randn(SIZES[-1], DEEP, device="cuda", dtype=torch.bfloat16)
    model(x)
    small = Model(WIDTH, WIDTH)
    capture(small, torch.randn(8, WIDTH, device="cuda"), [8])
    torch.compiler.reset()
    before, reserved = free_bytes(), torch.cuda.memory_reserved()
    call, seconds = capture(model, x, sizes)
    found = before - free_bytes()
    segments = torch.cuda.memory_reserved() - reserved
    given = torch.randn(sizes[0], DEEP, device="cuda").bfloat16()
    torch.testing.assert_close(call(given), model(given), rtol=5e-2, atol=5e-1)
    return {"pool": segments, "execs": found - segments, "seconds": seconds}


def start_part(cache: str) -> dict[str, float]:
    """Compile by Inductor, and capture some sizes; return counts and seconds."""
    model = Model(256, 1024)
    backend = PiecewiseBackend(
        splitting_ops=["bench::attend"], capture_sizes=[1, 8, 64], cache_dir=cache
    )
    seconds = imports = 0.0

    def timed(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        nonlocal seconds, imports
        began = time.perf_counter()
        importlib.import_module("torch._inductor.compile_fx")
        imports = time.perf_counter() - began
        run = backend(graph, inputs)
        seconds = time.perf_counter() - began
        return run

    fast = torch.compile(model, backend=timed)
    x = torch.randn(64, 256, device="cuda")
    mark_size(x)
    torch.testing.assert_close(fast(x), model(x), rtol=5e-2, atol=5e-1)
    began = time.perf_counter()
    backend.warm_up(lambda size: fast(x[:size]), progress=False)
    torch.cuda.synchronize()
    counters = backend.counters
    return {
        "backend": seconds,
        "imports": imports,
        "captures": time.perf_counter() - began,
        "compilations": counters.inductor_compilations,
        "loaded": counters.loaded,
    }


Made = tuple[Callable[[Tensor], Tensor], float]


def by_torch(model: Model, x: Tensor, sizes: Sequence[int]) -> Made:
    """Capture each piece by torch's class, as engines do; return a call, and the seconds."""
    pool = torch.cuda.graph_pool_handle()
    outs = [torch.empty_like(x) for _ in range(PIECES - 1)]
    entries: dict[int, list[Any]] = {}
    torch.cuda.synchronize()
    began = time.perf_counter()
    # Engines do so once, before the first capture.
    gc.collect()
    for size in sorted(sizes, reverse=True):
        source, entries[size] = x[:size], []
        with ExitStack() as scope:
            for number in range(PIECES):
                out = outs[number][:size] if number < PIECES - 1 else None
                model.piece(source, number)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    result = model.piece(source, number)
                    if out is None:
                        result = cgraph.weak_ref(result)
                graph.replay()
                if number == 0:
                    # Only the first piece collects and gives the cache back.
                    scope.enter_context(mock.patch("gc.collect", lambda *_: 0))
                    scope.enter_context(mock.patch("torch.cuda.empty_cache", lambda: None))
                if out is not None:
                    attend(result, out)
                    source = out
                entries[size].append((graph, cgraph.weak_ref(result), out))
                del result
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began

    def call(given: Tensor) -> Tensor:
        size = len(given)
        x[:size].copy_(given)
        for graph, result, out in entries[size]:
            graph.replay()
            if out is not None:
                attend(result, out)
        return result

    return call, seconds


def by_pieces(model: Model, x: Tensor, sizes: Sequence[int]) -> Made:
    """Capture by ``warm_up``; return a call, and the seconds without the compilation."""
    torch.compiler.reset()
    backend = PiecewiseBackend(
        splitting_ops=["bench::attend"], capture_sizes=sizes, compiler="eager"
    )
    fast = torch.compile(model, backend=backend)
    mark_size(x)
    fast(x)
    torch.cuda.synchronize()
    began = time.perf_counter()
    backend.warm_up(lambda size: fast(x[:size]), progress=False)
    torch.cuda.synchronize()
    return fast, time.perf_counter() - began


if __name__ == "__main__":
    main()
