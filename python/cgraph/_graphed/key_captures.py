"""Captures of the keys of one function, into the pool that they share."""

from __future__ import annotations

import functools
from typing import Any

from cgraph import _driver, _torch
from cgraph._captures.busy import busy
from cgraph._captures.pool_blocks import PoolBlocks
from cgraph._graphed.cache import Keys
from cgraph._graphed.call import Call
from cgraph._graphed.device_turn import device_taken, wait_for_device
from cgraph._graphed.key import Key
from cgraph._graphed.observation import Observation, Reads
from cgraph._graphed.options import Options
from cgraph._graphed.record import BrokenError, Capture, CapturePlan, record
from cgraph._graphed.recorded import Recorded
from cgraph._graphed.size_capture import UnlikeError, record_sized
from cgraph._graphed.static_memory import PoolUse, StaticMemory
from cgraph._graphed.train import train
from cgraph._source import forget_locals

__all__ = ["KeyCaptures"]


class KeyCaptures:
    """Captures of the keys of one function.

    Attributes:
        memory: Its pools and static memory.
    """

    def __init__(self, reads: Reads, name: str, options: Options, keys: Keys) -> None:
        self.memory = StaticMemory(options.pool)
        self._reads = reads
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
        use.users.add(self)
        assert key.shown is not None
        return CapturePlan(
            self._reads.function,
            self._name,
            self._reads,
            self._options,
            driver,
            pool,
            use,
            self._stream(driver, use, key.shown),
            call,
            key.shown,
            lines=key.misses > 0,
        )

    def capture(self, key: Key, call: Call, *, is_sized: bool = False) -> Capture:
        """Capture a call of a key; its work is then done unless gradients are recorded.

        With ``is_sized`` it differs from the previous call only in numbers of rows.

        Raises:
            BrokenError: The capture failed, and Python's state is as before.
            DeviceBusyError: Another thread captures on the device.
        """
        assert key.shown is not None
        needs_grad = key.shown.needs_grad
        plan = self.plan(key, call, needs_grad=needs_grad)
        with busy(), device_taken(plan.driver):
            wait_for_device(plan.driver)
            with _torch.without_gradients():
                statics = self.memory.statics(plan.driver, call.tensors, not needs_grad)
            if needs_grad:
                return train(plan, statics)
            users = list(plan.use.users)
            shares = any(one.on_stream(plan.stream) for one in users)
            blocks = PoolBlocks(plan.driver, plan.pool) if shares else None
            try:
                if is_sized:
                    return record_sized(plan, statics, blocks)
                captured = record(plan, statics)
            except BaseException as error:
                if isinstance(error, UnlikeError | BrokenError):
                    # The locals of the function hold tensors of a capture that has no graph.
                    forget_locals(error)
                if blocks is not None:
                    _drop_if_left(plan, blocks)
                raise
            if blocks is not None:
                captured.drop_beside = functools.partial(_drop_if_left, plan, blocks)
            return captured

    def on_stream(self, stream: Any) -> list[Key]:
        """Return the keys whose graphs were captured on a stream into the shared pool."""
        found = ((key, key.recorded) for key in self._keys)
        return [key for key, one in found if isinstance(one, Recorded) and one.stream is stream]

    def _stream(self, driver: _driver.Driver, use: PoolUse, shown: Observation) -> Any:
        """Return the stream of a capture.

        What a capture makes must last where it is a gradient, what somebody keeps, or the result of
        a call that goes on eagerly behind what is refused. Graphs that were captured before, on the
        same stream, may have temporary memory there.
        """
        lasts = shown.uses_gradients or shown.refusals or self._options.side_effects != "refuse"
        return self.memory.own_stream(driver, use) if lasts else use.stream


def _drop_if_left(plan: CapturePlan, blocks: PoolBlocks) -> None:
    """Drop graphs beside a capture without one if somebody has a tensor of it.

    It may lie where they have temporary memory or results, and their replays would overwrite it.
    The lock that functions of one pool share is held.
    """
    if blocks.are_left():
        for one in list(plan.use.users):
            for key in one.on_stream(plan.stream):
                one._keys.drop(key)
