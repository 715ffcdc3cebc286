"""The times of nodes in ``cgraph.view``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import cgraph
from cgraph._viewer.times import add_times
from cgraph.errors import ArgumentError, StateError
from lab import CudaLab, fresh
from viewed import graph_of


def kernel(name: str, width: int) -> dict[str, Any]:
    grid, block = {"x": width, "y": 1, "z": 1}, {"x": 128, "y": 1, "z": 1}
    return {"kind": "kernel", "name": name, "grid": grid, "block": block}


def ran(name: str, width: int, begin: float, microseconds: float) -> dict[str, Any]:
    args = {"grid": [width, 1, 1], "block": [128, 1, 1]}
    return {"cat": "kernel", "name": name, "ts": begin, "dur": microseconds, "args": args}


def test_nodes_get_the_times_of_their_like_in_order() -> None:
    nodes = [kernel("add", 4), kernel("mul", 4), kernel("add", 4), kernel("add", 8)]
    nodes.append({"kind": "memset", "bytes": 64})
    events = [ran("add", 4, 7, 3), ran("add", 4, 1, 1), ran("mul", 4, 3, 2), ran("add", 8, 9, 4)]
    events.append(
        {"cat": "gpu_memset", "name": "Memset", "ts": 11, "dur": 5, "args": {"bytes": 64}}
    )
    add_times(nodes, events)
    assert [one["seconds"] for one in nodes] == pytest.approx([1e-6, 2e-6, 3e-6, 4e-6, 5e-6])


def test_nodes_that_ran_another_number_of_times_get_none() -> None:
    nodes = [kernel("add", 4), kernel("mul", 4), kernel("mul", 4)]
    add_times(nodes, [ran("add", 4, 1, 1), ran("mul", 4, 2, 2)])
    assert ["seconds" in one for one in nodes] == [True, False, False]


def test_times_of_the_simulator_and_of_a_pool_are_refused() -> None:
    with cgraph.sim.use():
        x, graph = torch.ones(4), cgraph.CUDAGraph(keep_graph=True)
        with cgraph.graph(graph):
            _result = x.exp()
        with pytest.raises(StateError, match="the simulator, whose replays have no times"):
            cgraph.view(graph, measure=True)
        with pytest.raises(ArgumentError, match=r"measure is True, and what is .*CUDAGraph"):
            cgraph.view(graph.pool(), measure=True)


@pytest.mark.gpu
def test_kernels_and_fills_of_a_gpu_have_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CGRAPH_DRIVER", "cuda")
    lab = CudaLab()
    x, large = fresh(lab, 512, 512), torch.randn(4096, 4096, device=lab.device)
    side = torch.cuda.Stream()

    def work() -> torch.Tensor:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x.exp()
        z = large @ large
        torch.cuda.current_stream().wait_stream(side)
        return z + y.sum() + torch.zeros(4, 4096, device=lab.device).sum()

    work()
    page = cgraph.view(graph_of(lab, work), measure=True)
    page.save_perfetto(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    times = {
        one["args"]["operator"]: one["dur"] for one in events if "operator" in one.get("args", {})
    }
    assert set(times) >= {"aten.mm.default", "aten.exp.default"}
    assert times["aten.mm.default"] > 5 * times["aten.exp.default"] > 0
