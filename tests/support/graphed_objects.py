"""Classes with graphed methods."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

import cgraph

__all__ = ["Net", "Own", "Scale", "eager_net", "keys"]


class Own(Tensor):
    """A tensor subclass: torch's stable functions do not read it, and it has a tensor inside."""


def keys(function: Any) -> tuple[int, int]:
    """Return the numbers of keys with a graph and of replays."""
    return function.report().captured, function.report().replays


class Scale:
    """An object that multiplies by a number of its own."""

    def __init__(self, by: float) -> None:
        self.by = by

    @cgraph.graphed
    def run(self, x: Tensor, more: float = 0.0) -> Tensor:
        """Scale x."""
        return x * self.by + more

    @cgraph.graphed(sizes=[4, 8])
    def padded(self, x: Tensor) -> Tensor:
        return x * self.by

    @staticmethod
    @cgraph.graphed
    def plain(x: Tensor) -> Tensor:
        return x - 1

    @classmethod
    @cgraph.graphed
    def of_class(cls, x: Tensor) -> Tensor:
        return x + len(cls.__name__)


class Net(nn.Module):
    """A layer, with a graphed forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    @cgraph.graphed
    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        return self.layer(x).tanh()


def eager_net(net: Net, x: Tensor) -> Tensor:
    """Return the forward's result, computed eagerly."""
    return net.layer(x).tanh()
