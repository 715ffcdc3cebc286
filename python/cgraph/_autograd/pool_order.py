"""The order of replays of graphs that share a pool and overwrite each other's results."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Sequence
from typing import ClassVar

import torch

from cgraph import _torch
from cgraph.errors import StateError

__all__ = ["LentGradients", "Loan", "OpenCall", "PoolOrder"]

Loan = tuple[torch.Tensor, torch.Tensor]
"""A leaf, and the static memory of a gradient that autograd may have kept as its ``.grad``."""


class LentGradients:
    """Gradients that lie in the memory of a graph, which its replay has left.

    Args:
        loans: Gradients that autograd may make the ``.grad`` of a leaf.
        found: All gradients that were handed out, and their static memory, as far as they lie
            there.
    """

    def __init__(
        self,
        loans: Sequence[Loan],
        found: Iterable[tuple[torch.Tensor | None, torch.Tensor | None]],
    ) -> None:
        self._loans = loans
        # Gradients that are no longer referenced need not be saved.
        ref = weakref.ref
        self._found = [(ref(one), own) for one, own in found if one is not None and own is not None]

    def end(self) -> None:
        """Finish the backward pass: the ``.grad`` of a leaf may be referenced from now on."""
        ref = weakref.ref
        self._found += [
            (ref(grad), own) for leaf, own in self._loans if (grad := leaf.grad) is not None
        ]
        self._loans = ()

    def save(self) -> None:
        """Give the gradients memory of their own."""
        for leaf, own in self._loans:
            _save(leaf.grad, own)
        for reference, own in self._found:
            # Most are gone.
            if reference() is not None:
                _save(_torch.living(reference), own)

    def save_of(self, leaf: torch.Tensor) -> None:
        """Give the gradient of a leaf memory of its own."""
        grad = leaf.grad
        for one, own in self._loans:
            if one is leaf:
                _save(grad, own)
        for reference, own in self._found:
            if grad is not None and reference() is grad:
                _save(grad, own)


class OpenCall:
    """A forward pass, as long as its backward pass may run: autograd alone keeps it."""

    def __init__(self) -> None:
        self._is_overwritten = False
        self._is_used = False
        self._is_done = False

    @property
    def is_open(self) -> bool:
        """True if its backward pass is still to come, or under way on another thread.

        A backward pass under way counts as overwritten, by its own replay.
        """
        return not self._is_done and (self._is_used or not self._is_overwritten)

    def overwrite(self) -> None:
        """Note that another replay has taken the memory of its saved tensors."""
        self._is_overwritten = True

    def use(self, name: str) -> None:
        """Begin the backward pass.

        Raises:
            StateError: The saved tensors of the call are gone.
        """
        if self._is_used:
            raise StateError(
                f"backward for the second time through one call of {name}: its saved tensors are"
                " used up, also with retain_graph=True"
            )
        if self._is_overwritten:
            raise StateError(
                f"backward through an older call of {name}: later replays have overwritten what it"
                " saved. Run backward before the next call, call the callables of one pool in the"
                " order in which they were given and their backward passes in the reverse one, and"
                " graph one copy of the callable for each call that is open at the same time"
            )
        self._is_used = True

    def end(self) -> None:
        """End the backward pass: others may overwrite the saved tensors."""
        self._is_done = True


class PoolOrder:
    """The graphs of one pool, numbered in the order of their captures.

    The results of a graph may lie where graphs captured before it have their temporary memory.
    Tensors that a forward pass saves are free once its backward pass is captured, and graphs
    captured after that may use their memory. The replay of a graph thus overwrites the gradients of
    later graphs, and the saved tensors of calls unless one of the call's two graphs is captured
    before it and the other after it.
    """

    _all: ClassVar[weakref.WeakValueDictionary[Hashable, PoolOrder]] = weakref.WeakValueDictionary()

    def __init__(self) -> None:
        self._count = 0
        # In both lists only the last graph must be checked: the numbers ascend, and those of open
        # calls' backward passes descend.
        self._open: list[tuple[int, int, weakref.ref[OpenCall]]] = []
        self._lent: list[tuple[int, LentGradients]] = []

    @classmethod
    def of(cls, pool: Hashable) -> PoolOrder:
        """Return the order of a pool, as long as someone keeps it."""
        order = cls._all.get(pool)
        if order is None:
            order = cls._all[pool] = cls()
        return order

    @classmethod
    def save(cls, leaf: torch.Tensor) -> None:
        """Give the gradient of a leaf memory of its own, if it lies in that of a graph."""
        lent = [one for order in list(cls._all.values()) for one in list(order._lent)]
        for _, one in lent:
            one.save_of(leaf)

    def number(self) -> int:
        """Return the number of the next capture."""
        self._count += 1
        return self._count

    def replaying(self, number: int) -> None:
        """Give up memory that the replay of a graph overwrites, and save gradients from it."""
        calls = self._open
        while calls and not calls[-1][0] < number < calls[-1][1]:
            if (call := calls.pop()[2]()) is not None:
                call.overwrite()
        while self._lent and self._lent[-1][0] >= number:
            self._lent.pop()[1].save()

    def opened(self, forward: int, backward: int) -> OpenCall:
        """Note a replay of a forward pass whose backward pass may follow.

        Args:
            forward: The number of its graph.
            backward: The number of the graph of its backward pass.
        """
        call = OpenCall()
        self._open.append((forward, backward, weakref.ref(call)))
        return call

    def lend(self, number: int, lent: LentGradients) -> None:
        """Note that these gradients lie in the memory of the graph of this number."""
        self._lent.append((number, lent))


def _save(grad: torch.Tensor | None, own: torch.Tensor) -> None:
    """Move a gradient out of the memory of ``own``; its references stay valid."""
    if grad is None or grad.layout is not torch.strided or grad.data_ptr() != own.data_ptr():
        return
    # In inference mode it would be a tensor that no backward pass can add to.
    with torch.inference_mode(False), torch.no_grad():
        grad.data = grad.clone()
