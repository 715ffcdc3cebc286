"""Functions with breaks, and comparisons of their replays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cgraph import eager_break
from lab import Lab

__all__ = ["BrokenBackward", "check_equal", "fork_and_break", "raising_in", "scaled", "thrice"]


@eager_break
def scaled(x: Tensor) -> Tensor:
    """Needs the host."""
    return x / x.abs().max().item()


class BrokenBackward(torch.autograd.Function):
    """A function whose backward pass has a break."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return scaled(gradient)


def raising_in(passes: list[str]) -> Callable[[Tensor], Tensor]:
    """Return a doubling function that raises in the passes that the list names."""

    class Checked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            if "forward" in passes:
                raise KeyError("mine")
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            if "backward" in passes:
                raise KeyError("mine")
            return gradient * 2

    return lambda x: Checked.apply(x)


def thrice(x: Tensor) -> Tensor:
    y = scaled(x * 2) + 1
    z = scaled(torch.relu(y) - x)
    return scaled(z * y) + z


def check_equal(run: Callable[[], None], y: Tensor, eager: Callable[[Tensor], Tensor], x: Tensor):
    """Require replays to equal eager on fresh values of the input."""
    assert torch.equal(y, eager(x))
    for _ in range(3):
        x.normal_()
        run()
        assert torch.equal(y, eager(x))


def fork_and_break(lab: Lab, x: Tensor, side: Any) -> Tensor:
    lab.fork(side)
    with lab.use(side):
        y = x * 3
    z = scaled(x + 1)
    # The break has joined the stream, whose work it may use.
    lab.join(side)
    lab.fork(side)
    with lab.use(side):
        w = y * z
    lab.join(side)
    return w + scaled(y)
