"""Nodes and captures for tests of ``cgraph.view``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import cgraph
from cgraph._viewer.nodes import Node
from lab import Lab, fresh

__all__ = ["Model", "chain", "graph_of", "node", "step_of"]


class Block(nn.Module):
    """A layer with a submodule and an operator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Model(nn.Module):
    """Three equal layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def node(path: str = "", depends: Sequence[int] = (), shape: str = "add", **measures: float) -> Any:
    """Return a node in groups that are separated by points."""
    parts = tuple(path.split(".")) if path else ()
    return Node(shape, "", "elementwise", parts, [*depends], {**measures}, [], shape)


def chain(*nodes: tuple[str, str]) -> list[Any]:
    """Return nodes of paths and shapes, each after the one before it."""
    return [
        node(path, [place - 1] if place else [], shape) for place, (path, shape) in enumerate(nodes)
    ]


def graph_of(lab: Lab, work: Any, **options: Any) -> cgraph.CUDAGraph:
    """Return a graph of a function whose blocks and labels were recorded."""
    graph = cgraph.CUDAGraph(keep_graph=True)
    with cgraph.record_memory(), cgraph.graph(graph, enable_annotations=True, **options):
        _result = work()
    return graph


def step_of(lab: Lab) -> cgraph.CUDAGraph:
    """Return a graph of a forward pass of :class:`Model`."""
    model, x = Model().to(lab.device), fresh(lab, 2, 8)
    with torch.no_grad():
        model(x)
        return graph_of(lab, lambda: model(x))
