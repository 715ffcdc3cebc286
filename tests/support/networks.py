"""Networks, leaves and layouts for the tests of graphed callables."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lab import Lab, fresh

__all__ = ["LAYOUTS", "leaf", "network", "random_state"]


def leaf(lab: Lab, *shape: int) -> Tensor:
    """Return a fresh tensor that requires a gradient."""
    return fresh(lab, *shape).requires_grad_()


def network(lab: Lab, *extra: nn.Module) -> nn.Sequential:
    """Return a small network with parameters."""
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), *extra, nn.Linear(8, 3)).to(lab.device)


def random_state(lab: Lab) -> Tensor:
    """Return the state of the generator that the lab draws from."""
    return torch.cuda.get_rng_state() if lab.device == "cuda" else torch.get_rng_state()


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.t().contiguous().t(),
    "strided": lambda x: torch.stack([x, x], -1)[..., 0],
    "expanded": lambda x: x[:, :1].expand(4, 6),
    "offset": lambda x: torch.cat([x, x])[2:6],
    "windows": lambda x: x.as_strided((4, 6), (1, 3)),
}
