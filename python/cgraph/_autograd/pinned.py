"""Leaves whose gradients the history of an earlier result pins to the stream of that call."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["PINNED", "Pinned", "is_pinning"]

PINNED = (
    "an earlier result that somebody keeps has a history, which pins the gradients of weights to"
    " the default stream"
)
"""Why a call waits for that to be gone."""

# What CUDA says of a capture that is to wait for the default stream, where gradients of such
# leaves are accumulated.
_SAYS = "legacy stream depend on a capturing"
_MARK = "cgraph.pinned"


def is_pinning(error: BaseException) -> bool:
    """Whether a capture broke as its backward pass came to a leaf that is pinned."""
    return _SAYS in str(error)


class Pinned:
    """The leaves that somebody's history holds, as long as it does.

    Autograd has one node for a leaf, which it makes for the first history that needs it, on the
    stream of that, and keeps as long as there is one.

    Args:
        leaves: Those that a capture has come to.
    """

    def __init__(self, leaves: Iterable[torch.Tensor]) -> None:
        self._leaves = [one for one in leaves if one.requires_grad]
        self._has_collected = False
        for one in self._leaves:
            _node_of(one).metadata[_MARK] = True

    @property
    def are_held(self) -> bool:
        """Whether one of them is held still: a node that is made anew has no mark."""
        if self._is_one_held() and not self._has_collected:
            # What has broken a capture refers to itself, and to the history inside of it.
            self._has_collected = True
            gc.collect()
        return self._is_one_held()

    def _is_one_held(self) -> bool:
        # One that is frozen by now has no node.
        leaves = (one for one in self._leaves if one.requires_grad)
        return any(_MARK in _node_of(one).metadata for one in leaves)


def _node_of(leaf: torch.Tensor) -> Any:
    return torch.autograd.graph.get_gradient_edge(leaf).node
