"""Gradients that a backward pass inside a function leaves in ``.grad``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cgraph._surroundings import Holder
from cgraph.errors import CaptureError

__all__ = ["Gradients"]

_Gradient = tuple[torch.Tensor, torch.Tensor | None]
"""A leaf of autograd's, and its gradient."""


class Gradients:
    """What a capture does to the ``.grad`` of leaves, for its replays to do.

    Args:
        leaves: The leaves, before the capture.

    Attributes:
        added_to: Those whose gradient stays the same tensor, which the graph writes: leaf, the
            attribute's name, and the gradient.
    """

    def __init__(self, leaves: Sequence[torch.Tensor]) -> None:
        self._before = [(leaf, leaf.grad, _version(leaf.grad)) for leaf in leaves]
        self._replaced: list[_Gradient] = []
        self.added_to: list[Holder] = []

    def __bool__(self) -> bool:
        """Whether replays give some leaf another gradient."""
        return bool(self._replaced)

    def note(self, statics: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        """Note at the end of the capture what it has done.

        Args:
            statics: Tensors that stand for the arguments, which are never theirs.
            names: The names of these.

        Raises:
            CaptureError: An argument would have another gradient.
        """
        for leaf, before, version in self._before:
            now = leaf.grad
            if now is not before:
                self._replaced.append((leaf, now))
            elif _version(now) != version:
                self.added_to.append((leaf, "grad", now))
        changed = {id(leaf) for leaf, *_ in (*self._replaced, *self.added_to)}
        for static, name in zip(statics, names, strict=True):
            if id(static) in changed:
                raise CaptureError(
                    f"the function gives its argument {name} a gradient, and replays do not: let"
                    " it return what torch.autograd.grad gives"
                )

    def put(self) -> None:
        """Give the leaves the gradients that a replay has computed."""
        for leaf, gradient in self._replaced:
            if leaf.grad is not gradient:
                leaf.grad = gradient


def _version(gradient: torch.Tensor | None) -> int | None:
    return None if gradient is None else gradient._version
