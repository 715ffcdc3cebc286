"""One vocabulary for tests that run on the simulator's CPU tensors and on CUDA tensors."""

from __future__ import annotations

import gc
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

import cgraph
from cgraph.sim import Simulator

__all__ = ["CudaLab", "Lab", "SimLab", "fresh"]


class Lab(Protocol):
    """The functions of a driver that a test needs."""

    device: str

    def stream(self) -> Any:
        """Return a new stream."""

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        """Make a stream current."""

    def current(self) -> Any:
        """Return the current stream."""

    def fork(self, stream: Any) -> None:
        """Let a stream wait for the current one."""

    def join(self, stream: Any) -> None:
        """Let the current stream wait for another."""

    def sync(self) -> None:
        """Wait for everything."""

    def in_pool(self, tensor: torch.Tensor, handle: Any) -> bool:
        """Return whether a tensor lies in a pool."""

    def segments(self, handle: Any) -> int:
        """Return the number of segments of a pool."""


class CudaLab:
    """CUDA tensors on the GPU."""

    device = "cuda"

    def stream(self) -> torch.cuda.Stream:
        # torch reuses its streams again and again: this must not be the one that captures.
        taken = (torch.cuda.current_stream(), cgraph.graph.default_capture_stream)
        while (stream := torch.cuda.Stream()) in taken:
            pass
        return stream

    def use(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream()

    def fork(self, stream: torch.cuda.Stream) -> None:
        stream.wait_stream(torch.cuda.current_stream())

    def join(self, stream: torch.cuda.Stream) -> None:
        torch.cuda.current_stream().wait_stream(stream)

    def sync(self) -> None:
        torch.cuda.synchronize()

    def in_pool(self, tensor: torch.Tensor, handle: Any) -> bool:
        address = tensor.data_ptr()
        return any(s["address"] <= address < s["address"] + s["total_size"] for s in _of(handle))

    def segments(self, handle: Any) -> int:
        return len(_of(handle))


class SimLab:
    """CPU tensors on the simulator."""

    device = "cpu"

    def __init__(self, simulator: Simulator) -> None:
        self.simulator = simulator

    def stream(self) -> Any:
        return self.simulator.new_stream()

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        return self.simulator.stream(stream)

    def current(self) -> Any:
        return self.simulator.current_stream()

    def fork(self, stream: Any) -> None:
        stream.wait_stream(self.simulator.current_stream())

    def join(self, stream: Any) -> None:
        self.simulator.current_stream().wait_stream(stream)

    def sync(self) -> None:
        self.simulator.synchronize()

    def in_pool(self, tensor: torch.Tensor, handle: Any) -> bool:
        return self.simulator.pools.known[tuple(handle)].find(tensor) is not None

    def settled(self) -> dict[str, int]:
        """Return the live objects when everything else has gone."""
        gc.collect()
        self.simulator.synchronize()
        self.simulator.device.collect()
        return self.simulator.live()

    def segments(self, handle: Any) -> int:
        return len(self.simulator.pools.known[tuple(handle)].segments())


def fresh(lab: Lab, *shape: int) -> torch.Tensor:
    """Return fresh random numbers."""
    return torch.randn(*shape, device=lab.device)


def captured(lab: Lab, x: torch.Tensor, **options: Any) -> tuple[cgraph.CUDAGraph, torch.Tensor]:
    """Return a graph that computes ``x * 2 + 1``, and its output."""
    graph = cgraph.CUDAGraph(**options)
    with cgraph.graph(graph):
        y = x * 2 + 1
    return graph, y


def _of(handle: Any) -> list[dict[str, Any]]:
    snapshot = torch.cuda.memory_snapshot()
    return [s for s in snapshot if tuple(s["segment_pool_id"]) == tuple(handle)]
