"""Pools, streams and static memory for the captures of a graphed function."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from cgraph import _core, _driver, _torch
from cgraph._driver import Driver, Pool
from cgraph._graphed.call import as_argument
from cgraph.graphs import graph_pool_handle

__all__ = ["StaticMemory"]


class StaticMemory:
    """Pools, streams and static memory of one function.

    Args:
        pool: The pool of captures without gradients, if one is given.
    """

    def __init__(self, pool: Pool | None) -> None:
        self._given = pool
        # Pool and stream of captures without gradients, by device or simulator.
        self._places: dict[tuple[int, int], tuple[Any, Any]] = {}
        # The last stream of each device's pool, which other functions may share.
        self._last_streams: dict[int, _core.LastStream] = {}
        self._buffers: dict[Hashable, _torch.WeakStorage] = {}

    def place(self, driver: Driver, needs_grad: bool) -> tuple[Any, Any]:
        """Return the pool and the stream for a capture.

        Captures without gradients share them. One with gradients has a pool of its own: tensors
        saved by a forward pass must outlast the replays of other keys until the backward pass.
        """
        number = _number(driver)
        if number not in self._places:
            pool = graph_pool_handle() if self._given is None else self._given
            self._places[number] = pool, driver.new_stream()
        pool, stream = self._places[number]
        return (graph_pool_handle() if needs_grad else pool), stream

    def last_stream(self, driver: Driver) -> _core.LastStream | None:
        """Return the last stream of the pool on the current device; None on the simulator."""
        if driver.device_type != "cuda":
            return None
        ordinal = torch.cuda.current_device()
        if ordinal not in self._last_streams:
            pool, _ = self._places[_number(driver)]
            self._last_streams[ordinal] = _last_stream_of(ordinal, tuple(getattr(pool, "id", pool)))
        return self._last_streams[ordinal]

    def statics(
        self, driver: Driver, tensors: Sequence[torch.Tensor], is_shared: bool
    ) -> list[torch.Tensor]:
        """Return the tensors that a graph reads instead of others, with the same contents.

        Graphs of fewer rows read the first rows of the same memory, except those with gradients: a
        backward pass may come after calls of other keys, and reads the forward pass's inputs.
        """
        number = _number(driver)
        is_inference = torch.is_inference_mode_enabled()
        found = []
        for place, tensor in enumerate(tensors):
            shares = is_shared and tensor.dim() > 0 and tensor.is_contiguous()
            form = (place, number, tensor.dtype, tensor.device, tensor.shape[1:], is_inference)
            static = self._first_rows(form, tensor) if shares else None
            if static is None:
                static = tensor.detach().clone()
                if shares:
                    self._share(form, static)
            else:
                static.copy_(tensor)
            needs_grad = tensor.requires_grad and (tensor.is_leaf or not is_shared)
            found.append(as_argument(static, tensor, needs_grad))
        return found

    def clear(self) -> None:
        """Forget pools and memory."""
        self._places.clear()
        self._last_streams.clear()
        self._buffers.clear()

    def _first_rows(self, form: Hashable, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return as many rows of shared memory as a tensor has; None if there are fewer."""
        known = self._buffers.get(form)
        whole = None if known is None else known.get()
        if whole is None or whole.nbytes() < tensor.nbytes:
            return None
        return tensor.new_empty(0).set_(whole, 0, tensor.shape, tensor.stride())

    def _share(self, form: Hashable, static: torch.Tensor) -> None:
        """Share the memory with tensors of fewer rows as long as it is alive."""
        self._buffers = {name: one for name, one in self._buffers.items() if one.get() is not None}
        self._buffers[form] = _torch.WeakStorage(static)


_last_streams: weakref.WeakValueDictionary[tuple[int, ...], _core.LastStream] = (
    weakref.WeakValueDictionary()
)


def _number(driver: Driver) -> tuple[int, int]:
    """Return a number that identifies the current device of the driver, which is in force."""
    is_gpu = driver.device_type == "cuda"
    return _driver.number(), torch.cuda.current_device() if is_gpu else 0


def _last_stream_of(ordinal: int, handle: tuple[int, ...]) -> _core.LastStream:
    """Return the last stream of a pool, shared by all functions that use the pool."""
    last_stream = _last_streams.get((ordinal, *handle))
    if last_stream is None:
        source = _torch.current_stream_source()
        made = _core.LastStream(_core.Device.cuda(ordinal), source, ordinal, _wait_for_last)
        # Another thread may have made one meanwhile.
        last_stream = _last_streams.setdefault((ordinal, *handle), made)
    return last_stream


def _wait_for_last(last: int | None, now: int) -> None:
    """Let a stream wait for the last one, or the host for the device if that one may be gone."""
    if last is None:
        _driver.current().synchronize()
    else:
        _torch.wait_between(last, now)
