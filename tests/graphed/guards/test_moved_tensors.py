"""Functions, or breaks in them, that give tensors of modules other memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from lab import Lab, fresh


def test_a_tensor_in_two_containers_is_read_in_the_one_that_is_used(lab: Lab) -> None:
    class Two:
        def __init__(self) -> None:
            self.first = [torch.rand(3, device=lab.device)]
            self.other = self.first

        def read(self, x: Tensor) -> Tensor:
            return x + self.other[0]

    two = Two()
    graphed = cgraph.graphed(two.read)
    for _ in range(3):
        x = fresh(lab, 3)
        assert torch.equal(graphed(x), two.read(x))
        two.other = [torch.rand(3, device=lab.device)]


@pytest.mark.parametrize("kind", ["gru", "list", "dict"])
def test_parameters_that_a_module_also_has_in_a_container_have_not_moved(
    lab: Lab, kind: str
) -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.weights: Any = []

        def forward(self, x: Tensor) -> Tensor:
            if kind == "list":
                self.weights = [self.linear.weight]
                return nn.functional.linear(x, self.weights[0])
            self.weights = dict(self.named_parameters())
            return nn.functional.linear(x, self.weights["linear.weight"])

    net = (nn.GRU(4, 4) if kind == "gru" else Listed()).to(lab.device)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    graphed = cgraph.graphed(net)
    for _ in range(8):
        x = fresh(lab, 5, 2, 4)
        y, right = (run(x)[0] if kind == "gru" else run(x) for run in (graphed, net))
        torch.testing.assert_close(y, right)
        optimizer.zero_grad()
        y.sum().backward()
        optimizer.step()
        del y, right
    (key,) = graphed.report().keys
    assert key.state == "captured" and not key.rerecorded


def test_a_break_may_add_modules_that_no_segment_reads(lab: Lab) -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3).to(lab.device)
            self.calls = 0

        @cgraph.eager_break
        def grow(self) -> None:
            self.calls += 1
            if self.calls % 7 == 0:
                self.linear.add_module(f"extra{self.calls}", nn.Identity())

        def forward(self, x: Tensor) -> Tensor:
            self.grow()
            return self.linear(x)  # type: ignore[no-any-return]

    module = Growing()
    graphed = cgraph.graphed(module)
    with torch.no_grad():
        for _ in range(9):
            x = fresh(lab, 2, 3)
            assert torch.equal(graphed(x), nn.functional.linear(x, *module.linear.parameters()))


def test_a_module_that_is_exchanged_in_a_list_is_noticed(lab: Lab) -> None:
    layers = [nn.Linear(3, 3).to(lab.device) for _ in range(2)]

    def run(x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x)
        return x

    graphed = cgraph.graphed(run)
    with torch.no_grad():
        for _ in range(3):
            x = fresh(lab, 2, 3)
            assert torch.equal(graphed(x), run(x))
            layers[1] = nn.Linear(3, 3).to(lab.device)
