"""How gradients get back through the breaks of a captured function in a backward pass inside of it.

What lies behind that, as the step of an optimizer, is captured with the gradients that there are.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from cgraph import _torch
from cgraph._flows import Flow
from cgraph.breaks import Breakable, Work
from cgraph.errors import CaptureError

__all__ = ["InnerFlow"]


class InnerFlow(Flow):
    """One whose gradients come back in a backward pass inside of the function.

    The leaves that get gradients are those of the first call: what lies behind the backward pass,
    as the step of an optimizer, is captured with them.

    Args:
        work: What the break does.
        place: The line that has called it.
        arguments: Its first positional and keyword arguments.
        divides: The capture.

    Attributes:
        is_used: Whether a backward pass has come through it in the capture.
    """

    def __init__(self, work: Work, place: str, arguments: Any, divides: Breakable) -> None:
        super().__init__(work, place, arguments)
        self.divides = divides
        self.is_used = False
        self._may_materialize = work.materialize_grads
        self._leaves: list[torch.Tensor] = []
        # What is wrong if a backward pass comes here.
        self._refusal: Exception | None = None
        self._is_spent = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See :meth:`Flow.__call__`."""
        self._is_spent = False
        return super().__call__(*args, **kwargs)

    def back(self, keeps: bool, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Run back through the last call.

        Args:
            keeps: Whether another backward pass comes through the same call.
            gradients: Those of results.

        Returns:
            Those of arguments and leaves.

        Raises:
            CaptureError: It is the second backward pass, or comes to a leaf that the first call has
                not used.
        """
        if self._is_spent:
            raise CaptureError(
                f"a second backward pass comes through the break {self._title}: give the first one"
                " retain_graph=True"
            )
        ends, given = self._pairs(gradients)
        inner, known = self._arguments(), {id(one) for one in self._leaves}
        for leaf in self._leaves_behind(ends):
            if id(leaf) not in known:
                raise CaptureError(
                    f"the break {self._title} uses a leaf of shape {list(leaf.shape)} that requires"
                    " a gradient, which its first call has not used: let a module have it that the"
                    " break names"
                )
        if not keeps:
            self._results, self._inner, self._is_spent = {}, {}, True
        found = self._gradients(ends, given, inner, self._leaves, keeps)
        pairs = zip((*inner, *self._leaves), found, strict=True)
        return tuple(torch.zeros_like(one) if grad is None else grad for one, grad in pairs)

    def run_back(
        self, gradients: tuple[torch.Tensor | None, ...]
    ) -> tuple[torch.Tensor | None, ...]:
        """See :meth:`Flow.run_back`."""
        self.is_used = True
        if self._refusal is not None:
            raise self._refusal
        back = functools.partial(self.back, _torch.keeps_history())
        return self._divided(back, gradients)

    def _was_called(self) -> None:
        given = {id(one): one for one in self._parameters.values() if one.requires_grad}
        behind = {id(one): one for one in self._leaves_behind(tuple(self._results.values()))}
        others = [one for number, one in behind.items() if number not in given]
        self._refusal = self._uses_older()
        if others and not self._may_materialize:
            self._refusal = CaptureError(
                f"the break {self._title} uses a parameter of shape {list(others[0].shape)} that is"
                " no argument, and a backward pass inside the function cannot leave that out in a"
                " call: pass it as an argument, or let it get zeros there, as"
                " @eager_break(materialize_grads=True)"
            )
        self._leaves = [] if self._refusal else list({**given, **behind}.values())

    def _ahead(self) -> tuple[torch.Tensor, ...]:
        if self._refusal is None:
            return *self._outer, *self._leaves
        # With a leaf that requires a gradient a backward pass comes here in any case.
        return *self._outer, torch.zeros((), requires_grad=True)
