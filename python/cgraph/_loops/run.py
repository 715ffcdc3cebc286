"""A run of a loop, as the host sees it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import torch

from cgraph import _driver
from cgraph._loops.capture import CapturedLoop

__all__ = ["LoopRun"]

# Seconds between two looks at a loop that has published nothing new.
_PAUSE = 20e-6


class LoopRun:
    """A run that has begun: iterate over it, also with ``async for``, for what each step publishes.

    Without ``emit`` the iteration gives the numbers of the steps. What is published waits for a
    slow consumer. The state may be read once :meth:`result` has returned.
    """

    def __init__(
        self, loop: CapturedLoop, state: Sequence[torch.Tensor], *, is_single: bool
    ) -> None:
        self._loop, self._state, self._is_single = loop, tuple(state), is_single
        self._seen, self._is_settled = 0, False
        self._driver = _driver.current()
        self._header = loop.emitted.header
        self._header.zero_()
        self._offsets = [generator.get_offset() for generator, _ in loop.draws]
        loop.graph.replay()
        self._event: Any = None
        if self._driver.device_type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def steps(self) -> int:
        """The number of steps that were made so far."""
        return int(self._header[0])

    @property
    def is_over(self) -> bool:
        """True if the loop has ended."""
        if self._is_settled:
            return True
        if self._event is None:
            self._driver.synchronize()
        elif not self._event.query():
            return False
        self._settle()
        return True

    def stop(self) -> None:
        """Let the loop end after the present iteration."""
        self._header[1] = 1

    def result(self) -> tuple[torch.Tensor, ...]:
        """Wait for the end; return the state."""
        if self._event is not None:
            self._event.synchronize()
        while not self.is_over:
            time.sleep(_PAUSE)
        return self._state

    def __iter__(self) -> Iterator[Any]:
        """Yield what each step has published, as it comes."""
        while (value := self._next()) is not _END:
            if value is _WAIT:
                time.sleep(_PAUSE)
            else:
                yield value

    async def __aiter__(self) -> AsyncIterator[Any]:
        """Yield what each step has published, as it comes."""
        while (value := self._next()) is not _END:
            if value is _WAIT:
                await asyncio.sleep(_PAUSE)
            else:
                yield value

    def __del__(self) -> None:
        """Let a loop end that nobody waits for; its memory stays until it has."""
        if not self._is_settled:
            self.stop()

    def _next(self) -> Any:
        # First, as the last steps may come between the two looks.
        is_over = self.is_over
        if self._seen < self.steps:
            self._seen += 1
            return self._value(self._seen - 1)
        return _END if is_over else _WAIT

    def _value(self, step: int) -> Any:
        if not self._loop.emitted.tensors:
            return step
        found = self._loop.emitted.values(step)
        return found[0] if self._is_single else tuple(found)

    def _settle(self) -> None:
        """Move the generators as far as the steps have drawn."""
        self._is_settled = True
        for (generator, step), offset in zip(self._loop.draws, self._offsets, strict=True):
            generator.set_offset(offset + step * self.steps)


_END, _WAIT = object(), object()
