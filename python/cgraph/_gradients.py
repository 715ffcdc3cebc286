"""Gradients that a backward pass inside a function leaves in ``.grad``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from cgraph import _torch
from cgraph._holders import Holder
from cgraph.errors import CaptureError

__all__ = ["Gradients"]


class Gradients:
    """What a capture does to the ``.grad`` of leaves, for its replays to do.

    Args:
        leaves: The leaves, before anything was called.

    Attributes:
        added_to: Those whose gradient stays the same tensor, which the graph reads or writes:
            leaf, the attribute's name, and the gradient.
        has_made: Whether a leaf had no gradient before the capture and has one since.
    """

    def __init__(self, leaves: Sequence[torch.Tensor]) -> None:
        self._old = [(leaf, leaf.grad) for leaf in leaves]
        self._before: list[tuple[torch.Tensor | None, int | None]] = []
        self._replaced: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self.added_to: list[Holder] = []
        # Those that a backward pass inside may have given gradients.
        self._in_backward: list[torch.Tensor] = []
        # Those of them that had none before the capture, and have none since.
        self._without: list[torch.Tensor] = []
        self.has_made = False
        # What the leaves get; made by the first replay.
        self._given: list[torch.Tensor | None] | None = None

    def __bool__(self) -> bool:
        """Whether replays give some leaf another gradient."""
        return bool(self._replaced)

    def followed(self) -> list[Holder]:
        """Where gradients are added to, or none must be, and the leaves' hooks."""
        leaves = [*(leaf for leaf, _ in self._replaced), *(one.owner for one in self.added_to)]
        leaves = [*{id(leaf): leaf for leaf in (*leaves, *self._in_backward)}.values()]
        hooks = [Holder(*hooks) for leaf in leaves for hooks in _torch.hooks_of_leaf(leaf)]
        return [*self.added_to, *(Holder(leaf, "grad", None) for leaf in self._without), *hooks]

    @property
    def computed(self) -> Sequence[tuple[torch.Tensor, torch.Tensor | None]]:
        """The leaves that replays give another gradient, and the one that the graph computes."""
        return self._replaced

    def captures_now(self) -> list[torch.Tensor]:
        """Note that calls end here, and that a capture comes next; the gradients that there are.

        Those that the calls have taken away are there again, and the capture shows their use.
        """
        for leaf, old in self._old:
            if leaf.grad is None:
                leaf.grad = old
        self._before = [(leaf.grad, _version(leaf.grad)) for leaf, _ in self._old]
        return [gradient for gradient, _ in self._before if gradient is not None]

    def captures_again(self) -> None:
        """Forget a capture, which another one follows."""
        for (leaf, _), (before, _) in zip(self._old, self._before, strict=True):
            leaf.grad = before

    def forget_before(self) -> None:
        """Let go of what no replay needs."""
        self._old, self._before = [], []

    def note(
        self,
        statics: Sequence[torch.Tensor],
        names: Sequence[str],
        is_used: Callable[[torch.Tensor], bool],
        gets_gradient: Callable[[torch.Tensor], bool],
    ) -> None:
        """Note at the end of the capture what it has done.

        Args:
            statics: Tensors that stand for the arguments, which are never theirs.
            names: The names of these.
            is_used: Whether the capture reads or writes one of those that were there before.
            gets_gradient: Whether a backward pass inside may have given a leaf one, which may be
                gone by now.

        Raises:
            CaptureError: An argument would have another gradient, or the graph would go on with one
                that is there no more: that of a warm-up call, or one that is replaced.
        """
        arguments = {id(static) for static in statics}
        for (leaf, old), (before, version) in zip(self._old, self._before, strict=True):
            now = leaf.grad
            if leaf.requires_grad and id(leaf) not in arguments and gets_gradient(leaf):
                self._in_backward.append(leaf)
                self._without += [leaf] if now is before is None else []
            if now is not before:
                has_used = before is not None and (is_used(before) or before._version != version)
                if has_used and now is None:
                    raise CaptureError(
                        f"the function uses the gradient of a tensor of shape {list(leaf.shape)}"
                        " and takes it away: let it be set to zero, as by"
                        " zero_grad(set_to_none=False), call zero_grad() outside of the function,"
                        " or let there be none before the first call"
                    )
                if has_used:
                    raise CaptureError(
                        "the function replaces the gradient of a tensor of shape"
                        f" {list(leaf.shape)} by one that it computes from the one before: add to"
                        " it in place"
                    )
                self._replaced.append((leaf, now))
                self.has_made |= before is None
            elif now is not None and now is not old:
                raise CaptureError(
                    f"the function adds to the gradient of a tensor of shape {list(leaf.shape)}"
                    " that has none before the call: give it zeros as .grad, or let the function"
                    " begin with zero_grad()"
                )
            elif now is not None and (_version(now) != version or is_used(now)):
                self.added_to.append(Holder(leaf, "grad", now))
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
        computed = [one for _, one in self._replaced if one is not None]
        with torch.no_grad():
            if self._given is None:
                self._given = [
                    None if one is None else torch.empty_like(one) for _, one in self._replaced
                ]
            if computed:
                torch._foreach_copy_([one for one in self._given if one is not None], computed)
        for given, (leaf, _) in zip(self._given, self._replaced, strict=True):
            if leaf.grad is not given:
                leaf.grad = given


def _version(gradient: torch.Tensor | None) -> int | None:
    return None if gradient is None else gradient._version
