"""Zeros as gradients of parameters that a function could use and did not use in a call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from cgraph import _torch
from cgraph._autograd.history import leaves_behind
from cgraph._python.named_objects import named_by
from cgraph._torch import tree_flatten, tree_unflatten

__all__ = ["materialized"]


def materialized(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Make the function's results depend on all parameters of the modules that it names.

    Each gets a gradient in a backward pass from the results, zeros where the function has not used
    it. It names the modules in its closure, its globals, its object and its arguments.
    """
    # Results that have required gradients, by their structure: not all do in each call.
    connected: dict[Any, set[int]] = {}

    @functools.wraps(fn, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        result = fn(*args, **kwargs)
        if not torch.is_grad_enabled():
            return result
        leaves, spec = tree_flatten(result)
        numbers = [place for place, leaf in enumerate(leaves) if _has_gradients(leaf)]
        known = connected.setdefault(spec, set())
        known.update(place for place in numbers if leaves[place].requires_grad)
        places = [place for place in numbers if place in known] or numbers
        used = {id(leaf) for leaf in leaves_behind(leaves[place] for place in places)}
        unused = {
            id(one): one
            for module in named_by(fn, [("args", args), ("kwargs", kwargs)]).modules
            for one in module.parameters(recurse=False)
            if one.requires_grad and id(one) not in used
        }
        if not places or not unused:
            return result
        # Each by itself: the dependencies of one result must not appear behind another.
        for place in places:
            leaves[place] = _torch.apply(_Unused, leaves[place], *unused.values())
        return tree_unflatten(leaves, spec)

    return call


class _Unused(torch.autograd.Function):
    """A node that passes a tensor on, and gives others zeros as gradients."""

    @staticmethod
    def forward(ctx: Any, end: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        ctx.others = others
        return end.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradient, *map(torch.zeros_like, ctx.others)


def _has_gradients(leaf: Any) -> bool:
    """Return whether a leaf of a result is a tensor that may require a gradient."""
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())
