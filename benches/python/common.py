"""The common parts of the benches: measuring, the machine, and a table."""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import cgraph

__all__ = [
    "CALLS",
    "ROUNDS",
    "calls_us",
    "device_us",
    "free_bytes",
    "host_us",
    "native_us",
    "parsed",
    "publish",
]

ROUNDS = 60
# So few that the driver's queue does not fill.
CALLS = 20
WARM_UP = 5


def calls_us(
    calls: Sequence[tuple[Callable[..., object], list[list[torch.Tensor]]]],
) -> list[float]:
    """Return the median host time of a call of each function in µs, as for :func:`host_us`.

    Each function comes with the arguments of its calls, which take turns. They are tuples that are
    passed on unchanged, and nothing else is called in between.
    """

    def in_turn(
        function: Callable[..., object], turns: list[list[torch.Tensor]]
    ) -> Callable[[], None]:
        given = list(itertools.islice(itertools.cycle(map(tuple, turns)), CALLS))

        def call_all() -> None:
            for args in given:
                function(*args)

        return call_all

    return [of_all / CALLS for of_all in host_us([in_turn(*one) for one in calls], 1)]


def host_us(calls: Sequence[Callable[[], object]], per_round: int) -> list[float]:
    """Return the median host time of each call in µs, in turns: a disturbance meets all of them."""
    rounds: list[list[float]] = [[] for _ in calls]
    for _ in range(WARM_UP + ROUNDS):
        for times, call in zip(rounds, calls, strict=True):
            start = time.perf_counter_ns()
            for _ in range(per_round):
                call()
            times.append((time.perf_counter_ns() - start) / per_round / 1e3)
            torch.cuda.synchronize()
    return [statistics.median(times[WARM_UP:]) for times in rounds]


def device_us(call: Callable[[], object]) -> float:
    """Return the median device time of a call in µs."""
    times = []
    for _ in range(ROUNDS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def free_bytes() -> int:
    """Return free bytes of the device, when all has gone back that can."""
    for _ in range(2):
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        gc.collect()
        cgraph.memory()
        torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def publish(
    target: str, title: str, head: list[str], rows: list[list[str]], folder: Path | None
) -> None:
    """Print a table with its heading; in a folder it becomes the current one of its target.

    Args:
        target: As ``P2``. Its file has all tables of this process.
        title: The measured quantity.
        head: The names of the columns.
        rows: The figures.
        folder: The folder of the tables, and of a line of JSON for each table ever made.
    """
    where = (
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda},"
        f" Python {platform.python_version()}, cgraph {cgraph.__version__},"
        f" {time.strftime('%Y-%m-%d')}"
    )
    text = f"## {title}\n\n{where}\n\n{table(head, rows)}\n"
    print(text)
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{target}.md").open("a" if target in _published else "w") as out:
        out.write(text if target in _published else f"# {target}\n\n{text}")
    _published.add(target)
    entry = {"target": target, "title": title, "where": where, "head": head, "rows": rows}
    with (folder / "history.jsonl").open("a") as out:
        out.write(json.dumps(entry) + "\n")


_published: set[str] = set()


def native_us(library: Path, graph: cgraph.CUDAGraph, per_round: int) -> float:
    """Return the median host time of a native launch loop, in µs; NaN without the library."""
    if not library.exists():
        return float("nan")
    launch = ctypes.CDLL(str(library)).cg_bench_launch
    launch.restype = ctypes.c_double
    launch.argtypes = [ctypes.c_uint32, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32]
    stream = torch.cuda.current_stream().cuda_stream
    rounds = []
    for _ in range(ROUNDS):
        rounds.append(launch(0, graph.raw_cuda_graph_exec(), stream, per_round) / 1e3)
        torch.cuda.synchronize()
    assert min(rounds) > 0, "a native launch failed"
    return statistics.median(rounds)


def parsed(description: str | None) -> argparse.Namespace:
    """Parse the options of a bench: ``results`` and ``library``."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--results", type=Path, help="the folder of the current tables")
    native = Path(__file__).parent / "libcg_bench.so"
    parser.add_argument("--library", type=Path, default=native, help="of the native loops")
    return parser.parse_args()


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table that is also readable as text."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]

    def line(cells: list[str]) -> str:
        return "| " + " | ".join(c.rjust(w) for c, w in zip(cells, widths, strict=True)) + " |"

    rule = "| " + " | ".join("-" * (w - 1) + ":" for w in widths) + " |"
    return "\n".join([line(head), rule, *map(line, rows)])
