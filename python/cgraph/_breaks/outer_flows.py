"""Gradients of a captured function's results, through its breaks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from cgraph._autograd.history import nodes_behind
from cgraph._breaks.flows import Flow, requires_gradient
from cgraph.breaks import Breakable, Work
from cgraph.errors import CaptureError

__all__ = ["OuterFlow", "live_results"]


class OuterFlow(Flow):
    """A flow whose gradients come back in a captured backward pass of the function's result.

    Attributes:
        anchor: A leaf that results depend on, even if no argument requires a gradient. A request
            for its gradient makes the break run back for the parameters that it uses.
        live: The results that require gradients and are to get some in the next backward pass, by
            their numbers; None for all.
    """

    def __init__(self, work: Work, place: str, arguments: Any, divides: Breakable) -> None:
        super().__init__(work, place, arguments, divides)
        self._forward = divides
        self.anchor = torch.zeros((), requires_grad=True)
        self.live: frozenset[int] | None = None
        # The stand-ins for parameters in the first call, whose history leads to them.
        self._reals: Mapping[int, torch.Tensor] = {}
        self._found: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See :meth:`Flow.__call__`."""
        self._reals = {}
        return super().__call__(*args, **kwargs)

    def stand_for(self, parameters: Mapping[int, torch.Tensor]) -> None:
        """Give the break other parameters than those of the capture, found by their ``id``."""
        self._reals = parameters
        pairs = self._parameters.items()
        self._parameters = {place: parameters.get(id(one), one) for place, one in pairs}

    def taken(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Return leaves that the break found outside its arguments, and their gradients.

        They are those of the last backward pass, and are returned once.
        """
        found, self._found = self._found, []
        return found

    def back(self, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Run back through the last call: gradients of results in, those of arguments out."""
        ends, given = self._pairs(gradients, self.live)
        inner, behind = self._arguments(), self._leaves_behind(ends)
        self._results, self._inner, self._found = {}, {}, []
        found = self._gradients(ends, given, inner, behind, keeps=False)
        real = [self._reals.get(id(one), one) for one in behind]
        self._found = list(zip(real, found[len(inner) :], strict=True))
        self._reals = {}
        return tuple(
            torch.zeros_like(one) if gradient is None else gradient
            for one, gradient in zip(inner, found[: len(inner)], strict=True)
        )

    def run_back(
        self, gradients: tuple[torch.Tensor | None, ...]
    ) -> tuple[torch.Tensor | None, ...]:
        """See :meth:`Flow.run_back`."""
        refusal = None
        if self.divides is self._forward:
            refusal = (
                f"a backward pass inside the function comes through the break {self._title}, and"
                " another one will follow for the result: return the result detached, or run all"
                " backward passes after the function"
            )
        return None, *self._divided(self.back, gradients, refusal, self._like_gradients)

    def _look_at_first_call(self) -> None:
        reason = self._uses_older()
        if reason is not None:
            raise CaptureError(reason)

    def _inputs(self) -> tuple[torch.Tensor, ...]:
        return self.anchor, *self._outer

    def _like_gradients(self, *_: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """Return tensors like the result of :meth:`back`; the history is still to be run back."""
        return tuple(map(torch.zeros_like, self._arguments()))


def live_results(output: Any) -> set[tuple[OuterFlow, int]]:
    """Return the results of breaks that an output of a captured function depends on, by numbers."""
    if not requires_gradient(output):
        return set()
    ends = [(output.grad_fn, output.output_nr)]
    ends += [end for node in nodes_behind([output]) for end in node.next_functions]
    flows = ((getattr(node, "flow", None), number) for node, number in ends)
    return {(flow, number) for flow, number in flows if isinstance(flow, OuterFlow)}
