"""Measurements of a call of a function: eagerly, as torch's graph, as cgraph's."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import cgraph
from cgraph import _driver
from cgraph._cli.targets import Target

__all__ = ["Cost", "costs", "small_network"]

_ROUNDS = 7


@dataclass(frozen=True)
class Cost:
    """The time of a way to call a function.

    Attributes:
        name: The way.
        host: The microseconds until a call returns, the device still at work.
        whole: The microseconds of a call in a row of calls, with the device's work.
    """

    name: str
    host: float
    whole: float


def small_network() -> Target:
    """Return a function of twenty small kernels, where the host decides."""
    device = _driver.current().device_type
    weight, x = torch.randn(64, 64, device=device) / 8, torch.randn(32, 64, device=device)

    def twenty_kernels(x: torch.Tensor) -> torch.Tensor:
        for _ in range(10):
            x = torch.relu(x @ weight)
        return x

    return Target(twenty_kernels, (x,), "twenty_kernels")


def costs(target: Target, calls: int) -> list[Cost]:
    """Measure each way in turns, and return the medians.

    Raises:
        CgraphError: The function cannot be captured.
    """
    with torch.no_grad():
        ways = dict(_ways(target))
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for _ in range(_ROUNDS):
            for name, call in ways.items():
                times[name].append(_time_of(call, calls))
    found = []
    for name, pairs in times.items():
        host, whole = (statistics.median(one) for one in zip(*pairs, strict=True))
        found.append(Cost(name, host * 1e6, whole * 1e6))
    return found


def _ways(target: Target) -> Iterator[tuple[str, Callable[[], Any]]]:
    driver = _driver.current()
    for _ in range(3):
        target()
    driver.synchronize()
    yield "eager", target
    if driver.device_type == "cuda":
        theirs = torch.cuda.CUDAGraph()
        with torch.cuda.graph(theirs):
            target()
        yield "torch.cuda.CUDAGraph.replay()", theirs.replay
    graph = cgraph.CUDAGraph()
    with cgraph.graph(graph):
        target()
    yield "cgraph.CUDAGraph.replay()", graph.replay
    function = cgraph.graphed(target.function, on_fail="raise")
    for _ in range(3):
        function(*target.args)
    yield "cgraph.graphed, new results", lambda: function(*target.args)


def _time_of(call: Callable[[], Any], calls: int) -> tuple[float, float]:
    driver = _driver.current()
    driver.synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        call()
    host = time.perf_counter() - began
    driver.synchronize()
    return host / calls, (time.perf_counter() - began) / calls
