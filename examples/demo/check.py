"""Assertions of the demo: captured equals eager, and the loss falls."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["CheckError", "Comparison", "require_fall"]


class CheckError(RuntimeError):
    """Something that the demo shows is not so."""


class Comparison:
    """Compares each captured step with the eager one.

    Args:
        what: What is compared, for the message.
        tolerance: The largest difference allowed, relative to the largest number compared; 0 asks
            for equality bit by bit.

    Attributes:
        steps: How many were compared.
        exact: How many of them were equal bit by bit.
        worst: The largest relative difference.
    """

    def __init__(self, what: str, *, tolerance: float) -> None:
        self.what = what
        self.tolerance = tolerance
        self.steps = 0
        self.exact = 0
        self.worst = 0.0

    def add(self, captured: Tensor, eager: Tensor) -> bool:
        """Compare two tensors of one shape and dtype; waits for the device.

        Returns:
            Whether they are equal bit by bit.

        Raises:
            CheckError: They differ by more than the tolerance, or one has a NaN.
        """
        self.steps += 1
        if torch.equal(captured, eager):
            self.exact += 1
            return True
        largest = eager.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
        difference = float((captured - eager).abs().max() / largest)
        # Not `difference > tolerance`: a NaN must fail too.
        if not difference <= self.tolerance:
            raise CheckError(
                f"{self.what} {self.steps - 1}: captured differs from eager by {difference:.1e} of"
                f" the largest number, expected {self._expected}; captured {_glance(captured)},"
                f" eager {_glance(eager)}"
            )
        self.worst = max(self.worst, difference)
        return False

    def verdict(self) -> str:
        """A few words for the table."""
        if self.exact == self.steps:
            return f"all {self.steps}, bit by bit"
        return f"all {self.steps}, within {self.worst:.0e}"

    @property
    def _expected(self) -> str:
        return f"at most {self.tolerance:.0e}" if self.tolerance else "equality bit by bit"


def require_fall(losses: Sequence[float], *, window: int = 20, ratio: float = 0.8) -> str:
    """Check that the loss falls.

    Args:
        losses: One per training step.
        window: How many at either end are averaged.
        ratio: The mean at the end must be less than this times the mean at the start.

    Returns:
        A line that says from where to where.

    Raises:
        CheckError: It does not fall enough, or became NaN.
    """
    first = sum(losses[:window]) / window
    last = sum(losses[-window:]) / window
    line = f"{first:.2f} → {last:.2f} (means of the first and last {window} of {len(losses)} steps)"
    if not last < ratio * first:
        raise CheckError(f"the loss did not fall below {ratio} of its start: {line}")
    return line


def _glance(tensor: Tensor) -> str:
    """The first numbers of a tensor."""
    numbers = ", ".join(f"{number:.7g}" for number in tensor.flatten()[:3].tolist())
    return f"[{numbers}{', …' if tensor.numel() > 3 else ''}]" if tensor.dim() else numbers
