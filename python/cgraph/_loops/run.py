"""A run of a loop, as the host sees it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import torch

from cgraph._loops.launched import Launched
from cgraph._loops.report import LoopReport
from cgraph._loops.stepwise import Stepwise

__all__ = ["LoopRun"]


class LoopRun:
    """A run that has begun: iterate over it, also with ``async for``, for what each step publishes.

    The values are tensors on the host, one a step, or a tuple where several tensors are published;
    without ``emit`` they are the numbers of the steps. All wait for a slow consumer. A run that is
    dropped before its end is stopped.

    Attributes:
        report: How the loop makes its steps.
    """

    def __init__(
        self,
        work: Launched | Stepwise,
        state: Sequence[torch.Tensor],
        *,
        emits: bool,
        is_single: bool,
        report: LoopReport,
    ) -> None:
        self._work, self._state = work, tuple(state)
        self._emits, self._is_single = emits, is_single
        self._seen = 0
        self._waiting: deque[Any] = deque()
        self._lock = threading.Lock()
        self.report = report

    @property
    def steps(self) -> int:
        """The number of steps that were made so far."""
        return self._work.steps

    @property
    def is_over(self) -> bool:
        """True if the loop has ended; where the host makes the steps, each look makes one."""
        return self._work.go_on()

    def stop(self) -> None:
        """Let the loop end after the present iteration, and return at once."""
        self._work.stop()

    def result(self) -> tuple[torch.Tensor, ...]:
        """Wait for the end; return the state."""
        self._work.wait()
        return self._state

    def __iter__(self) -> Iterator[Any]:
        """Yield what each step has published, as it comes."""
        while not self._has_ended():
            if self._waiting:
                yield self._waiting.popleft()
            else:
                time.sleep(self._work.pause())

    async def __aiter__(self) -> AsyncIterator[Any]:
        """Yield what each step has published, as it comes."""
        while not self._has_ended():
            if self._waiting:
                yield self._waiting.popleft()
            else:
                await asyncio.sleep(self._work.pause())

    def __del__(self) -> None:
        """Stop a run that nobody waits for; its graph keeps the memory."""
        self._work.stop()

    def _has_ended(self) -> bool:
        """Take what is new, if nothing waits; return whether nothing is left, nor will be."""
        if self._waiting:
            return False
        return self._take() and not self._waiting

    def _take(self) -> bool:
        """Take what is new, which a later run overwrites; return whether the run is over."""
        # Another thread may begin the later run while this one copies.
        with self._lock:
            # First, as the last steps may come between the two looks.
            is_over = self._work.go_on()
            begin, self._seen = self._seen, self._work.steps
            if not self._emits:
                self._waiting.extend(range(begin, self._seen))
            elif self._seen > begin:
                found = self._work.values(begin, self._seen)
                self._waiting.extend(one[0] if self._is_single else tuple(one) for one in found)
            return is_over
