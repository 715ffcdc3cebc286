"""Gradients through the breaks of a captured function, in a backward pass inside the function.

Work after that, such as the step of an optimizer, is captured with the existing gradients.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from cgraph import _torch
from cgraph._breaks.flows import Flow
from cgraph.breaks import Breakable, Work
from cgraph.errors import CaptureError

__all__ = ["InnerFlow"]


class InnerFlow(Flow):
    """A flow whose gradients come back in a backward pass inside the function.

    The tensors that get gradients are arguments, and the leaves of the first call: work after the
    backward pass, such as the step of an optimizer, is captured with them.
    """

    def __init__(self, work: Work, place: str, arguments: Any, divides: Breakable) -> None:
        super().__init__(work, place, arguments, divides)
        self._may_materialize = work.materialize_grads
        self._leaves: list[torch.Tensor] = []
        # The reason that no backward pass may come here.
        self._refusal: str | None = None
        # Number of passes through a call, allowed and done; the first is known after the capture.
        self._passes, self._passed = 0, 0
        self._is_captured = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See :meth:`Flow.__call__`."""
        self._passed = 0
        result = super().__call__(*args, **kwargs)
        if self._is_captured and not self._passes:
            self._forget()
        return result

    def back(
        self, keeps: bool, wanted: frozenset[int], *gradients: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        """Run back through the last call.

        Args:
            keeps: True if another backward pass may come through the same call.
            wanted: The indices, among arguments and leaves, of those that get gradients.
            gradients: The gradients of results.

        Returns:
            The gradients of arguments and leaves, zeros where there is none.

        Raises:
            CaptureError: It is a second backward pass, for which the first one has left nothing, or
                it comes to a leaf that the first call has not used, or not for the same results.
        """
        if self._connected and not self._results and self._passed:
            raise CaptureError(
                f"a second backward pass comes through the break {self._title}: give the first one"
                " retain_graph=True"
            )
        ends, given = self._pairs(gradients)
        sources = self._sources()
        inner = self._arguments()
        behind = self._leaves_behind(ends, arguments=True)
        self._passed += 1
        if not keeps or (self._is_captured and self._passed == self._passes):
            self._forget()
        known = {id(sources[place]) for place in wanted}
        for leaf in behind:
            if id(leaf) not in known:
                raise CaptureError(
                    f"the break {self._title} uses a tensor of shape {list(leaf.shape)} that"
                    " requires a gradient, which its first call did not use, or for other results:"
                    " let it use the same in each call, or run the backward pass after the"
                    " function"
                )
        found = self._gradients(ends, given, inner, self._leaves, keeps)
        return tuple(
            None if place not in wanted else torch.zeros_like(one) if gradient is None else gradient
            for place, (one, gradient) in enumerate(zip(sources, found, strict=True))
        )

    def run_back(
        self, gradients: tuple[torch.Tensor | None, ...]
    ) -> tuple[torch.Tensor | None, ...]:
        """See :meth:`Flow.run_back`."""
        self._passes += 1
        back = functools.partial(self.back, _torch.keeps_history(), self._wanted(gradients))
        return self._divided(back, gradients, self._refusal)

    def settle(self) -> bool:
        """See :meth:`Flow.settle`."""
        self._is_captured = True
        if self._passes:
            return True
        self._forget()
        # Its work may depend on whether its arguments require gradients.
        return any(index is not None for index in self._indices)

    def _wanted(self, gradients: tuple[torch.Tensor | None, ...]) -> frozenset[int]:
        """Return the indices of the tensors that get gradients from these results.

        Tensors that only other results depend on get none, and tensors that no result depends on
        get zeros: in another call a result may depend on them.
        """
        ends, _ = self._pairs(gradients)
        live = {id(one) for one in self._leaves_behind(ends, arguments=True)}
        used = {id(one) for one in self._leaves_behind([*self._results.values()], arguments=True)}
        pairs = enumerate(map(id, self._sources()))
        return frozenset(place for place, one in pairs if one in live or one not in used)

    def _sources(self) -> list[torch.Tensor]:
        return [*self._arguments(), *self._leaves]

    def _forget(self) -> None:
        self._results, self._inner = {}, {}

    def _look_at_first_call(self) -> None:
        given = {id(one): one for one in self._parameters.values() if one.requires_grad}
        behind = {id(one): one for one in self._leaves_behind([*self._results.values()])}
        others = [one for number, one in behind.items() if number not in given]
        self._refusal = self._uses_older()
        if self._refusal is None and others and not self._may_materialize:
            self._refusal = (
                f"the break {self._title} uses a parameter of shape {list(others[0].shape)} that is"
                " not an argument, and a backward pass inside the function cannot leave it out in a"
                " call: pass it as an argument, or let it get zeros there, as"
                " @eager_break(materialize_grads=True)"
            )
        self._leaves = [] if self._refusal else list({**given, **behind}.values())

    def _inputs(self) -> tuple[torch.Tensor, ...]:
        if self._refusal is None:
            return *self._outer, *self._leaves
        # With a leaf that requires a gradient a backward pass comes here in any case.
        return *self._outer, torch.zeros((), requires_grad=True)
