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
"""The reason that a call waits until the result is gone."""

# CUDA's message about a capture that would wait for the default stream, where gradients of such
# leaves are accumulated.
_SAYS = "legacy stream depend on a capturing"
_MARK = "cgraph.pinned"


def is_pinning(error: BaseException) -> bool:
    """Return whether a capture broke as its backward pass came to a pinned leaf."""
    return _SAYS in str(error)


class Pinned:
    """The leaves that a history holds, as long as it does.

    Autograd has one node for a leaf, which it makes for the first history that needs it, on that
    history's stream, and keeps as long as there is one.

    Args:
        leaves: The leaves that a capture has reached.
    """

    def __init__(self, leaves: Iterable[torch.Tensor]) -> None:
        self._leaves = [one for one in leaves if one.requires_grad]
        self._has_collected = False
        for one in self._leaves:
            _node_of(one).metadata[_MARK] = True

    @property
    def are_held(self) -> bool:
        """True if one of them is still held: a new node has no mark."""
        if self._is_one_held() and not self._has_collected:
            # The exception of a broken capture refers to itself, and to the history inside it.
            self._has_collected = True
            gc.collect()
        return self._is_one_held()

    def _is_one_held(self) -> bool:
        # A leaf that is frozen now has no node.
        leaves = (one for one in self._leaves if one.requires_grad)
        return any(_MARK in _node_of(one).metadata for one in leaves)


def _node_of(leaf: torch.Tensor) -> Any:
    return torch.autograd.graph.get_gradient_edge(leaf).node
