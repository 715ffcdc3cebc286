"""What the benches share: how they measure, where they ran, and a table."""

from __future__ import annotations

import itertools
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import cgraph

__all__ = ["CALLS", "ROUNDS", "calls_us", "device_us", "host_us", "publish"]

ROUNDS = 60
# So few that the driver's queue does not fill.
CALLS = 20
WARM_UP = 5


def calls_us(
    calls: Sequence[tuple[Callable[..., object], list[list[torch.Tensor]]]],
) -> list[float]:
    """Median host time of a call of each function in µs, as for :func:`host_us`.

    With a function come the arguments of its calls, which take turns. They are tuples that are
    handed on as they are, and nothing else is called in between.
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
    """Median host time of each call in µs, measured in turns: a disturbance meets all of them."""
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
    """Median device time of a call in µs."""
    times = []
    for _ in range(ROUNDS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def publish(title: str, head: list[str], rows: list[list[str]], file: Path | None) -> None:
    """Print a table with its heading, and append it to a file if there is one."""
    text = f"{heading(title)}\n{table(head, rows)}\n"
    print(text)
    if file is not None:
        with file.open("a") as out:
            out.write(text)


def heading(title: str) -> str:
    """The title with the device and the versions that the figures belong to."""
    return (
        f"## {title}\n\n{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA"
        f" {torch.version.cuda}, Python {platform.python_version()}, cgraph {cgraph.__version__}\n"
    )


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table that is also readable as text."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]

    def line(cells: list[str]) -> str:
        return "| " + " | ".join(c.rjust(w) for c, w in zip(cells, widths, strict=True)) + " |"

    rule = "| " + " | ".join("-" * (w - 1) + ":" for w in widths) + " |"
    return "\n".join([line(head), rule, *map(line, rows)])
