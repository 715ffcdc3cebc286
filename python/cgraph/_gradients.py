"""Gradients that a backward pass inside a function leaves in ``.grad``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
        # What the leaves get; made by the first replay.
        self._given: list[torch.Tensor | None] | None = None

    def __bool__(self) -> bool:
        """Whether replays give some leaf another gradient."""
        return bool(self._replaced)

    @property
    def before(self) -> list[torch.Tensor]:
        """The gradients that the leaves had before the capture; none after :meth:`note`."""
        return [gradient for _, gradient, _ in self._before if gradient is not None]

    def note(
        self,
        statics: Sequence[torch.Tensor],
        names: Sequence[str],
        is_used: Callable[[torch.Tensor], bool],
    ) -> None:
        """Note at the end of the capture what it has done.

        Args:
            statics: Tensors that stand for the arguments, which are never theirs.
            names: The names of these.
            is_used: Whether the capture reads or writes one of those that were there before.

        Raises:
            CaptureError: An argument would have another gradient, or the graph would go on with one
                that is none any more.
        """
        for leaf, before, version in self._before:
            now = leaf.grad
            if now is before:
                if _version(now) != version:
                    self.added_to.append((leaf, "grad", now))
                continue
            if before is not None and is_used(before):
                raise CaptureError(
                    f"the function replaces the gradient of a tensor of shape {list(leaf.shape)} by"
                    " one that it computes from the one before: add to it in place"
                )
            self._replaced.append((leaf, now))
        self._before = []
        changed = {id(leaf) for leaf, *_ in (*self._replaced, *self.added_to)}
        for static, name in zip(statics, names, strict=True):
            if id(static) in changed:
                raise CaptureError(
                    f"the function gives its argument {name} a gradient, and replays do not: let"
                    " it return what torch.autograd.grad gives"
                )

    def put(self) -> None:
        """Give the leaves the gradients that a replay has computed.

        As copies: replays of other graphs may overwrite those in the pool.
        """
        if not self._replaced:
            return
        with torch.no_grad():
            if self._given is None:
                self._given = [
                    None if one is None else torch.empty_like(one) for _, one in self._replaced
                ]
            pairs = [
                (given, one)
                for given, (_, one) in zip(self._given, self._replaced, strict=True)
                if given is not None and one is not None
            ]
            if pairs:
                torch._foreach_copy_([given for given, _ in pairs], [one for _, one in pairs])
        for given, (leaf, _) in zip(self._given, self._replaced, strict=True):
            if leaf.grad is not given:
                leaf.grad = given


def _version(gradient: torch.Tensor | None) -> int | None:
    return None if gradient is None else gradient._version
