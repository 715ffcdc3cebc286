"""A step in one graph, and what the graph costs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import cgraph

__all__ = ["CapturedStep", "template_data"]


class CapturedStep:
    """A step that was captured and is replayed.

    Args:
        step: Enqueues the work; its result is the same memory in every replay.
        warm_up: Runs ``step`` a few times first, so that libraries and autograd have made what
            they make once. Called on the stream of the capture.
        device: Where the work runs: a GPU, or the CPU that stands for one on the simulator.
        api: ``cgraph``, or ``torch.cuda`` to compare with: the names are the same.

    Attributes:
        graph: The ``CUDAGraph``, its template kept.
        output: What ``step`` returned in the capture.
        exec_bytes: Device memory that instantiating took; 0 on the simulator.
    """

    def __init__(
        self,
        step: Callable[[], Tensor],
        warm_up: Callable[[], None],
        *,
        device: torch.device,
        api: Any = cgraph,
    ) -> None:
        self._device = device
        on_gpu = device.type == "cuda"
        # torch asks that the stream outlives the graph.
        self._stream = torch.cuda.Stream() if on_gpu else None
        with _side_stream(self._stream):
            warm_up()
        self.graph = api.CUDAGraph(keep_graph=True)
        with api.graph(self.graph, stream=self._stream):
            self.output = step()
        before = torch.cuda.mem_get_info()[0] if on_gpu else 0
        self.graph.instantiate()
        after = torch.cuda.mem_get_info()[0] if on_gpu else 0
        self.exec_bytes = before - after
        self.replay: Callable[[], None] = self.graph.replay

    def nodes(self) -> int:
        """Nodes of the template, those of child graphs included."""
        return _count(template_data(self.graph))

    def pool_bytes(self) -> int:
        """Bytes of the segments in the graph's pool."""
        pool = self.graph.pool()
        if self._device.type != "cuda":
            reserved: int = pool.mem_pool.stats()["reserved"]
            return reserved
        segments = torch.cuda.memory_snapshot()
        return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) == tuple(pool))


def template_data(graph: cgraph.CUDAGraph) -> dict[str, Any]:
    """All that is known of a kept template: its ``nodes`` and ``edges``."""
    data: dict[str, Any] = json.loads(graph._template.json())
    return data


def _count(data: dict[str, Any]) -> int:
    return sum(1 + sum(map(_count, node.get("bodies", ()))) for node in data["nodes"])


@contextmanager
def _side_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Run the block's work on a stream, after what was enqueued before and before what comes."""
    if stream is None:
        yield
        return
    around = torch.cuda.current_stream()
    stream.wait_stream(around)
    with torch.cuda.stream(stream):
        yield
    around.wait_stream(stream)
