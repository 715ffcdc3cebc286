"""A server's model in pieces: compiled once, captured by size, with operators that stay eager.

A model whose attention cannot be captured is split at it. The pieces between are compiled for any
size of a batch, captured for some sizes, and replayed all together by one native call:

>>> import torch, cgraph
>>> from cgraph.piecewise import PiecewiseBackend, mark_size
>>> def model(x):
...     return torch.cumsum(x * 2, 0) + 1
>>> with cgraph.sim.use(), torch.no_grad():
...     backend = PiecewiseBackend(splitting_ops=["torch.cumsum"], capture_sizes=[1, 2, 4])
...     fast, x = torch.compile(model, backend=backend), torch.ones(4)
...     backend.warm_up(lambda size: fast(mark_size(x[:size])), progress=False)
...     print(fast(torch.ones(2)), backend.counters.captures, "captures")
tensor([3., 5.]) 3 captures

:class:`Dispatcher` says which size and graph a batch takes, :func:`plan_sizes` which sizes are
worth a capture. For code that captures and splits itself, see :class:`cgraph.GraphLadder` and
:func:`split_graph`. The page ``docs/piecewise.md`` tells more.
"""

from __future__ import annotations

import torch

from cgraph import _torch
from cgraph._given import require_type
from cgraph._piecewise.backend import PiecewiseBackend
from cgraph._piecewise.config import PiecewiseConfig
from cgraph._piecewise.counters import Counters
from cgraph._piecewise.dispatcher import BatchKey, Dispatcher, RuntimeMode
from cgraph._piecewise.report import PieceReport, PiecewiseReport, SizeReport
from cgraph._piecewise.size_plan import SizePlan, plan_sizes
from cgraph._piecewise.split import SplitItem, split_graph
from cgraph.errors import ArgumentError

__all__ = [
    "BatchKey",
    "Counters",
    "Dispatcher",
    "PieceReport",
    "PiecewiseBackend",
    "PiecewiseConfig",
    "PiecewiseReport",
    "RuntimeMode",
    "SizePlan",
    "SizeReport",
    "SplitItem",
    "mark_size",
    "plan_sizes",
    "split_graph",
]


def mark_size(tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Let torch's compiler leave a size of an input open, for 1 as well as for larger ones.

    Mark each input of the first call of a compiled model that has the size. If several have, the
    model says that they are equal: ``torch._check(x.shape[0] == y.shape[0])``.
    ``torch._dynamo.mark_dynamic`` leaves 1 out: a call of that size compiles again.

    Args:
        tensor: An input of the model.
        dim: The dimension whose size differs between calls.

    Returns:
        The tensor. A view of it is not marked.

    Raises:
        ArgumentError: It is no tensor, or has no such dimension.
    """
    require_type("tensor", tensor, torch.Tensor, "a tensor, an input of the model")
    if type(dim) is not int or not -tensor.dim() <= dim < tensor.dim():
        raise ArgumentError(
            f"dim is {dim!r:.40}, expected a dimension of a tensor of shape {tuple(tensor.shape)}"
        )
    _torch.mark_open_size(tensor, dim % tensor.dim())
    return tensor
