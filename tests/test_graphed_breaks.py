"""Graphed functions with breaks write state once in each call, however they are captured."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import cgraph
from lab import Lab, fresh


class Counting(nn.Module):
    """Counts its calls in a buffer, before a break, inside it or behind it."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.register_buffer("count", torch.zeros(1))

    def add(self, where: str) -> None:
        if where == self.where:
            self.count.add_(1)

    def forward(self, x: Tensor) -> Tensor:
        self.add("before")
        y = self.broken(x)
        self.add("behind")
        return y + self.count

    @cgraph.eager_break
    def broken(self, x: Tensor) -> Tensor:
        self.add("inside")
        return x * 2


def test_a_ladder_of_captures_with_breaks_writes_no_state(lab: Lab) -> None:
    net = Counting("before").to(lab.device)
    function = cgraph.graphed(net, sizes=[1, 2, 4])
    with torch.no_grad():
        function.capture(fresh(lab, 4))
        assert not net.count.any()
        x = fresh(lab, 2)
        assert torch.equal(function(x), x * 2 + 1)
