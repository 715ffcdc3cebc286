"""The ``.grad`` of leaves around a function with a backward pass inside."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from cgraph._torch import tree_flatten, tree_unflatten

__all__ = ["LeafGradients", "detached"]


class LeafGradients:
    """The changes of a capture to the gradients of leaves, for its replays to make.

    An existing gradient is added to in place, as by any backward pass. If there is none, or the
    function removes it first, the leaf gets one in the graph's memory, which later replays
    overwrite.

    Attributes:
        at_begin: Their gradients before the capture, by the ``id`` of the leaf.
        given: The leaves that get another gradient in replays, and that one.
    """

    def __init__(self, leaves: Iterable[torch.Tensor] = ()) -> None:
        self._before = [(leaf, leaf.grad) for leaf in leaves]
        self.at_begin = {id(leaf): grad for leaf, grad in self._before}
        self.given: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def __bool__(self) -> bool:
        """True if replays give some leaf another gradient."""
        return bool(self.given)

    def end(self) -> None:
        """Note at the end of the capture which leaves have other gradients."""
        self.given = [(leaf, leaf.grad) for leaf, old in self._before if leaf.grad is not old]
        self._before = []

    def take(self, others: LeafGradients) -> None:
        """Note which leaves of others, not ended yet, have other gradients now."""
        self.given = [(leaf, leaf.grad) for leaf, old in others._before if leaf.grad is not old]

    def put_back(self) -> None:
        """Restore the gradients that the leaves had before the capture."""
        for leaf, old in self._before:
            if leaf.grad is not old:
                leaf.grad = old

    def at_break(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a break so that in each replay it finds the gradients computed before it."""
        made = [(leaf, leaf.grad) for leaf, old in self._before if leaf.grad is not old]
        if not made:
            return fn

        @functools.wraps(fn, updated=())
        def call(*args: Any, **kwargs: Any) -> Any:
            for leaf, one in made:
                if leaf.grad is not one:
                    leaf.grad = one
            return fn(*args, **kwargs)

        return call

    def give(self) -> None:
        """Give the leaves the gradients that a replay has computed."""
        for leaf, own in self.given:
            if leaf.grad is not own:
                leaf.grad = own


def detached(result: Any) -> Any:
    """Strip the history from the result of a function that has run its backward pass."""
    leaves, spec = tree_flatten(result)
    if not any(isinstance(one, torch.Tensor) and one.grad_fn is not None for one in leaves):
        return result
    return tree_unflatten([_without_history(one) for one in leaves], spec)


def _without_history(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None else leaf
