"""The base of dispatch modes that only look on, which the simulator's recorder calls too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cgraph import _torch

__all__ = ["OperatorMode", "Run", "run_operator"]

Run = Callable[[Any, Any, dict[str, Any]], Any]
"""Runs or captures an operator, given its arguments; returns its result."""


def run_operator(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator: Python code that begins behind this frame is the operator's own."""
    return func(*args, **kwargs)


class OperatorMode(_torch.Bystander):
    """A dispatch mode that sees operators before and after they run.

    A capture on the simulator takes operators before any other mode gets them: there the recorder
    calls :meth:`seen` of the active modes.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Look at the operator and run it."""
        return self.seen(func, args, kwargs or {}, run_operator)

    def seen(self, func: Any, args: Any, kwargs: dict[str, Any], run: Run) -> Any:
        """Look at an operator that ``run`` runs or captures; return its result."""
        return run(func, args, kwargs)

    def literal(self, value: torch.Tensor, result: torch.Tensor) -> None:
        """Look at a tensor that Python spells out, which the simulator has captured."""
