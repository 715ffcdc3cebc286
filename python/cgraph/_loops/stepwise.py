"""Runs whose steps the host makes, one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cgraph import _driver
from cgraph._breaks.modes import Modes

__all__ = ["Stepwise"]


class Stepwise:
    """The steps of a run that the host makes, one at a time, where and as the run has begun.

    Args:
        step: Makes a step.
        emitted: The tensors that each step publishes.
        until: The tensor that ends the run; None without one.
        most_steps: The most steps.
    """

    def __init__(
        self,
        step: Callable[[], object],
        emitted: Sequence[torch.Tensor],
        until: torch.Tensor | None,
        most_steps: int,
    ) -> None:
        self._step, self._emitted, self._until, self._most = step, emitted, until, most_steps
        self._driver = _driver.current()
        self._stream = self._driver.current_stream()
        self._modes = Modes.now(self._driver.device_type)._replace(grad=False)
        self._values: list[list[torch.Tensor]] = []
        self._is_over = False

    @property
    def steps(self) -> int:
        """The number of steps that were made so far."""
        return len(self._values)

    def has_ended(self) -> bool:
        """Return whether the run has ended."""
        return self._is_over

    def go_on(self) -> bool:
        """Make a step, unless the run has ended; return whether it has."""
        if self._is_over:
            return True
        try:
            with self._driver.stream(self._stream), self._modes.restored():
                self._step()
                self._values.append([one.detach().to("cpu", copy=True) for one in self._emitted])
                is_until = self._until is not None and bool((self._until != 0).all())
        except BaseException:
            # The step is half made.
            self._is_over = True
            raise
        self._is_over |= is_until or self.steps >= self._most
        return self._is_over

    def wait(self) -> None:
        """Make all steps."""
        while not self.go_on():
            pass

    def stop(self) -> None:
        """End the run after the steps that were made."""
        self._is_over = True

    def values(self, begin: int, end: int) -> Sequence[Any]:
        """Return what each of some steps has published."""
        return self._values[begin:end]

    def pause(self) -> float:
        """Return the seconds until the next look."""
        return 0.0
