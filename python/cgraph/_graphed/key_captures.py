"""Captures of the keys of one function, into the pool that they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cgraph import _driver, _torch
from cgraph._captures.busy import busy
from cgraph._captures.pool_blocks import PoolBlocks
from cgraph._graphed.cache import Keys
from cgraph._graphed.call import Call
from cgraph._graphed.capture_plan import CapturePlan
from cgraph._graphed.key import Key
from cgraph._graphed.options import Options
from cgraph._graphed.pool_lock import locked_pool, wait_for_device
from cgraph._graphed.record import BrokenError, Capture, record
from cgraph._graphed.recorded import Recorded
from cgraph._graphed.size_capture import UnlikeError, record_sized
from cgraph._graphed.static_memory import PoolUse, StaticMemory
from cgraph._graphed.train import train
from cgraph._source import forget_locals

__all__ = ["KeyCaptures"]


class KeyCaptures:
    """Captures of the keys of one function.

    Args:
        function: The function.
        name: Its name.
        options: Its options.
        keys: Its keys.

    Attributes:
        memory: Its pools and static memory.
    """

    def __init__(
        self, function: Callable[..., Any], name: str, options: Options, keys: Keys
    ) -> None:
        self.memory = StaticMemory(options.pool)
        self._function = function
        self._name = name
        self._options = options
        self._keys = keys

    @property
    def pool_use(self) -> PoolUse:
        """The use of the pool that calls without gradients share."""
        return self.memory.pool(_driver.current(), needs_grad=False)[1]

    def plan(self, key: Key, call: Call, *, needs_grad: bool) -> CapturePlan:
        """Make the plan for capturing a call of a key."""
        driver = _driver.current()
        pool, use = self.memory.pool(driver, needs_grad)
        assert key.shown is not None
        return CapturePlan(
            self._function,
            self._name,
            self._options,
            driver,
            pool,
            use,
            call,
            key.shown,
            lines=key.misses > 0,
        )

    def capture(self, key: Key, call: Call, *, is_sized: bool = False) -> Capture:
        """Capture a call of a key; its work is then done unless gradients are recorded.

        With ``is_sized`` it differs from the previous call only in numbers of rows.

        Raises:
            BrokenError: The capture failed, and Python's state is as before.
            PoolBusyError: Another thread captures into the pool.
        """
        assert key.shown is not None
        needs_grad = key.shown.needs_grad
        plan = self.plan(key, call, needs_grad=needs_grad)
        with busy(), locked_pool(plan.pool):
            wait_for_device(plan.driver)
            with _torch.without_gradients():
                statics = self.memory.statics(plan.driver, call.tensors, not needs_grad)
            if needs_grad:
                return train(plan, statics)
            blocks = PoolBlocks(plan.driver, plan.pool) if self._of_pool() else None
            try:
                if is_sized:
                    return record_sized(plan, statics, blocks)
                captured = record(plan, statics)
            except BaseException as error:
                goes_on = self._options.on_fail == "eager"
                if goes_on and isinstance(error, UnlikeError | BrokenError):
                    # The locals of the function hold tensors of a capture that has no graph.
                    forget_locals(error)
                self.drop_beside(blocks)
                raise
            captured.blocks = blocks
            return captured

    def drop_beside(self, blocks: PoolBlocks | None) -> None:
        """Drop the graphs of the pool if a tensor is left there from a capture without a graph.

        Their replays would overwrite it: it may lie where they have temporary memory or results.

        Args:
            blocks: The blocks of the pool before the capture; None if no graph was there.
        """
        if blocks is not None and blocks.are_left():
            for key in self._of_pool():
                self._keys.drop(key)

    def _of_pool(self) -> list[Key]:
        """Return the keys whose graphs lie in the pool that calls without gradients share."""
        return [key for key in self._keys if isinstance(key.recorded, Recorded)]
