"""A small model of a server: layers with an attention between them that stays eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cgraph.piecewise import PiecewiseBackend, mark_size
from lab import Lab, fresh

__all__ = ["OPS", "SIZES", "Decoder", "Served", "calls", "graph_of", "tensors_of"]

OPS = ("served::attend",)
SIZES = (1, 2, 4, 8)
calls: list[int] = []
"""The numbers of rows of the calls of the attention."""

_library = torch.library.Library("served", "DEF")
_library.define("attend(Tensor x, Tensor(a!) cache, Tensor(b!) out) -> ()")
_library.define("mixed(Tensor x) -> (Tensor, Tensor)")
_library.define("routed(Tensor x) -> Tensor")


def _attend(x: Tensor, cache: Tensor, out: Tensor) -> None:
    calls.append(len(x))
    cache[: len(x)].copy_(x)
    torch.add(x, x.mean(0), out=out)


def _mixed(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.cos(), x.sum(0)


def _routed(x: Tensor) -> Tensor:
    # What no capture can have.
    return x * float(x.abs().max())


for _name, _function in (("attend", _attend), ("mixed", _mixed), ("routed", _routed)):
    _library.impl(_name, _function, "CompositeExplicitAutograd")
_library._register_fake("attend", lambda x, cache, out: None)
_library._register_fake("mixed", lambda x: (torch.empty_like(x), x.new_empty(x.shape[1:])))
_library._register_fake("routed", lambda x: torch.empty_like(x))


def graph_of(function: Callable[..., Any], *inputs: Tensor) -> torch.fx.GraphModule:
    """Return the graph of torch's operators as Dynamo sees a function."""
    found: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        found.append(graph)
        return graph.forward

    torch.compiler.reset()
    torch.compile(function, backend=keep, fullgraph=True)(*inputs)
    return found[0]


class Decoder(nn.Module):
    """Layers, each with an attention that writes its result and a cache."""

    def __init__(self, layers: int = 3, width: int = 16, most: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.register_buffer("cache", torch.zeros(layers, most, width))

    def forward(self, x: Tensor) -> Tensor:
        """Run rows [batch, width] → [batch, width]."""
        for layer, cache in zip(self.layers, self.cache, strict=True):
            y = torch.relu(layer(x))
            out = torch.empty_like(y)
            torch.ops.served.attend(y, cache, out=out)
            x = x + out
        return x


class Served:
    """A model in pieces beside the model itself."""

    def __init__(self, lab: Lab, model: nn.Module, *, marked: bool = True, **fields: Any) -> None:
        self.lab = lab
        self.model = model.to(lab.device).eval()
        self.eager = copy.deepcopy(self.model)
        fields = {"splitting_ops": OPS, "capture_sizes": SIZES, "compiler": "eager", **fields}
        self.backend = PiecewiseBackend(**fields)
        self.fast = torch.compile(self.model, backend=self.backend)
        self.marked = marked

    def rows(self, size: int) -> Tensor:
        x = fresh(self.lab, size, 16)
        if self.marked:
            mark_size(x)
        return x

    def check(self, size: int) -> Any:
        x = self.rows(size)
        given = x.clone()
        got, want = self.fast(x), self.eager(given)
        for one, other in zip(tensors_of(got), tensors_of(want), strict=True):
            assert torch.allclose(one, other, atol=1e-5)
        assert torch.equal(x, given)
        pairs = zip(self.model.buffers(), self.eager.buffers(), strict=True)
        assert all(torch.allclose(one, other, atol=1e-5) for one, other in pairs)
        return got


def tensors_of(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)
