"""P4 and P5: calls of graph trees, alone and behind ``torch.compile``, beside torch's; P5-memory.

P4: one function without a compiler around it, its result dropped or held until the next call.
P5: whole calls of ``torch.compile``. P5-memory: a function that takes four ways in turns.

    python benches/python/tree_calls.py [--results folder]
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor
from torch._inductor.cudagraph_trees import cudagraphify_impl, mark_step_begin

import cgraph
from common import CALLS, host_us, parsed, publish

INPUTS = (1, 4, 16)
MIB = 1 << 20
Compiled = Callable[..., Any]


def work(*xs: Tensor) -> Tensor:
    """Compute something of all inputs."""
    y = xs[0] @ xs[0]
    for x in xs:
        y = torch.relu(y * 0.5 + x)
    return y @ xs[0]


def boxed(args: list[Tensor]) -> list[Tensor]:
    """As :func:`work`, with a list that it empties."""
    xs = [*args]
    args.clear()
    return [work(*xs)]


def tensors(count: int) -> list[Tensor]:
    """Return matrices of 16 KiB."""
    return [torch.randn(64, 64, device="cuda") for _ in range(count)]


def direct(graphify: Any, xs: Sequence[Tensor], held: list[Any] | None = None) -> Any:
    """Return calls of one function of a tree, each a step; with ``held``, that has its result."""
    options = {"device_index": 0, "is_backward": False, "is_inference": True}
    function = graphify(boxed, [*xs], (), stack_traces=[None], **options)

    def call() -> None:
        mark_step_begin()
        result = function([*xs])
        if held is not None:
            held[:] = result

    for _ in range(4):
        call()
    return call


def replay(xs: Sequence[Tensor]) -> Callable[[], None]:
    """Return the replay of torch's graph of the same work, without copies of inputs."""
    graph = torch.cuda.CUDAGraph()
    work(*xs)
    with torch.cuda.graph(graph):
        work(*xs)
    return graph.replay


def branches(x: Tensor, w: Tensor, ways: tuple[bool, bool]) -> Tensor:
    """Take one of four ways."""
    y = torch.tanh(x @ w)
    torch._dynamo.graph_break()
    if ways[0]:
        z = (y @ w).relu() @ w if ways[1] else torch.cat([y, y @ w]).softmax(-1).sum(0)
    else:
        z = (y * 2) @ (w + y) @ w if ways[1] else (y.exp() + w).sort(-1).values @ y
    return z.sum() + y.mean()


def memory(name: str) -> tuple[float, float]:
    """Return the MiB that a tree of four branches keeps, and the most that were reserved.

    It runs in a process of its own: what others have left is taken again.
    """
    make = COMPILERS[name]
    w = torch.randn(2048, 2048, device="cuda") / 2048
    # The library's workspace is not the tree's.
    torch.tanh(w @ w)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    fast = make(branches)
    with torch.no_grad():
        for _ in range(6):
            for ways in ((True, True), (True, False), (False, True), (False, False)):
                fast(torch.randn(2048, 2048, device="cuda"), w, ways)
    torch.cuda.synchronize()
    most = torch.cuda.max_memory_reserved()
    torch.cuda.empty_cache()
    return (torch.cuda.memory_reserved() - before) / MIB, (most - before) / MIB


COMPILERS: dict[str, Callable[[Any], Compiled]] = {
    "default mode": torch.compile,
    "reduce-overhead": functools.partial(torch.compile, mode="reduce-overhead"),
    'backend="cgraph"': functools.partial(torch.compile, backend="cgraph"),
}


def main() -> None:
    options = parsed(__doc__)
    rows = []
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as processes:
        for name, (kept, most) in zip(COMPILERS, processes.map(memory, COMPILERS), strict=True):
            rows.append([name, f"{kept:.0f}", f"{most:.0f}"])
    head = ["", "kept, MiB", "most, MiB"]
    title = "reserved memory of a tree of four branches"
    publish("P5-memory", title, head, rows, options.results)
    rows = []
    with torch.no_grad():
        for count in INPUTS:
            xs = tensors(count)
            compiled = [make(work) for make in COMPILERS.values()]
            calls = [functools.partial(fast, *xs) for fast in compiled]
            for call in calls * 4:
                call()
            times = host_us(calls, CALLS)
            row = [str(count), *(f"{one:.1f}" for one in times)]
            rows.append([*row, f"{times[2] / times[0]:.2f}"])
            torch.compiler.reset()
        head = ["inputs", *COMPILERS, "cgraph / default"]
        publish("P5", "host µs of a whole compiled call", head, rows, options.results)
        rows = []
        for count in INPUTS:
            xs, held = tensors(count), [None]
            ours, theirs = cgraph.trees.cudagraphify, cudagraphify_impl
            calls = [direct(theirs, xs), direct(ours, xs), direct(ours, xs, held), replay(xs)]
            rows.append([str(count), *(f"{one:.2f}" for one in host_us(calls, CALLS))])
        head = ["inputs", "torch's trees", "cgraph", "cgraph, result held", "bare replay"]
        publish("P4", "host µs of a call of a tree", head, rows, options.results)


if __name__ == "__main__":
    main()
