"""Breaks that a backward pass inside of a graphed function comes back through."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import Tensor, nn

from cgraph import eager_break
from graphed_calls import near
from inner_flow_calls import Step, both, loss_of, same_parameters, training
from lab import Lab, fresh


class Attended(nn.Module):
    """Has a break without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(6, 18), nn.Linear(6, 3)

    @eager_break
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.T / q.abs().max().item(), -1) @ v

    def forward(self, x: Tensor) -> Tensor:
        return self.outward(self.attend(*self.inward(x).chunk(3, -1)) + x)


def test_a_break_that_no_backward_pass_comes_through_keeps_no_history(lab: Lab) -> None:
    seen: list[weakref.ref[Tensor]] = []

    @eager_break
    def noting(loss: Tensor) -> None:
        doubled = loss * 2
        seen.append(weakref.ref(doubled))

    def make(net: nn.Module) -> Step:
        step = training(net)

        def noted(x: Tensor) -> Tensor:
            loss = step(x)
            noting(loss_of(net(x)))
            return loss

        return noted

    graphed, eagerly, mine, eager = both(lab, Attended(), make)
    for _ in range(3):
        x = fresh(lab, 4, 6)
        assert near(graphed(x), eagerly(x))
    gc.collect()
    assert len(seen) >= 6 and all(one() is None for one in seen)
    assert same_parameters(mine, eager)


def test_a_step_whose_gradients_come_back_through_a_break_is_captured(lab: Lab) -> None:
    graphed, eagerly, mine, eager = both(lab, Attended(), training)
    for _ in range(6):
        x = fresh(lab, 4, 6)
        assert near(graphed(x), eagerly(x))
        assert same_parameters(mine, eager)
    (key,) = graphed.report().keys
    assert key.state == "captured"
    assert [name.split(" (")[0] for name in key.breaks] == [
        "Attended.attend",
        "gradients of Attended.attend",
    ]
