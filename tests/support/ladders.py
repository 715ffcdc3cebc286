"""Ladders that tests capture, and checks of them."""

from __future__ import annotations

import torch
from torch import Tensor

import cgraph
from graphed_calls import states
from lab import Lab, fresh

SIZES = [1, 2, 3, 4, 6, 8]


def doubled(x: Tensor) -> Tensor:
    """Double and clamp, as the function of the ladders."""
    return torch.relu(x * 2)


def require_right(function: cgraph.functions.GraphedFunction, lab: Lab, sizes: list[int]) -> None:
    """Check calls of so many rows."""
    for rows in sizes:
        x = fresh(lab, rows, 5)
        assert torch.equal(function(x), torch.relu(x * 2))


def require_whole(function: cgraph.functions.GraphedFunction, lab: Lab) -> None:
    """Check calls of each size, after which each has a graph."""
    require_right(function, lab, SIZES)
    assert states(function) == ["captured"] * len(SIZES)


def refuse(error: type[BaseException], text: str) -> None:
    """Raise an error."""
    raise error(text)
