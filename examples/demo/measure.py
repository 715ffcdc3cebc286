"""Times of a step on a GPU, and the table."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

__all__ = ["Times", "measure"]


class Times:
    """The times of a step.

    Attributes:
        wall: Median µs per step from the first call until the device is done, in bursts.
        host: Median µs until a single call returns, on an idle device.
    """

    def __init__(self, wall: float, host: float) -> None:
        self.wall = wall
        self.host = host


def measure(
    steps: Sequence[Callable[[], object]], *, repeats: int = 30, burst: int = 10
) -> list[Times]:
    """Time steps on the current GPU, in turns, so that a change of its clocks meets all of them.

    Args:
        steps: Functions that enqueue the step to be timed.
        repeats: Over how many measurements the medians go.
        burst: Steps between two waits for the device.
    """
    walls: list[list[float]] = [[] for _ in steps]
    hosts: list[list[float]] = [[] for _ in steps]
    for _ in range(repeats):
        for place, step in enumerate(steps):
            torch.cuda.synchronize()
            start = time.perf_counter_ns()
            step()
            hosts[place].append((time.perf_counter_ns() - start) / 1e3)
            torch.cuda.synchronize()
            start = time.perf_counter_ns()
            for _ in range(burst):
                step()
            torch.cuda.synchronize()
            walls[place].append((time.perf_counter_ns() - start) / 1e3 / burst)
    return [
        Times(statistics.median(wall), statistics.median(host))
        for wall, host in zip(walls, hosts, strict=True)
    ]
