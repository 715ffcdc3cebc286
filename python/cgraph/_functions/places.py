"""Where the captures of a graphed function are made: pools, streams and static memory."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any

import torch

from cgraph import _core, _driver, _torch
from cgraph._driver import Pool
from cgraph._recording.calls import as_argument
from cgraph.graphs import graph_pool_handle

__all__ = ["Places"]


class Places:
    """Pools, streams and static memory of one function.

    Args:
        pool: That of captures without gradients, if it is given.
    """

    def __init__(self, pool: Pool | None) -> None:
        self._given = pool
        # Pool and stream of the captures without gradients of each device, or simulator.
        self._places: dict[tuple[int, int], tuple[Any, Any]] = {}
        # Of the device's pool, which other functions may have as well.
        self._lanes: dict[int, _core.Lane] = {}
        self._buffers: dict[Hashable, _torch.WeakStorage] = {}

    def place(self, driver: _driver.Driver, needs_grad: bool) -> tuple[Any, Any]:
        """Pool and stream of a capture.

        All without gradients share them. One with gradients has a pool of its own: what a forward
        pass has saved must outlast the replays of other keys until the backward pass.
        """
        number = _number()
        if number not in self._places:
            pool = graph_pool_handle() if self._given is None else self._given
            self._places[number] = pool, driver.new_stream()
        pool, stream = self._places[number]
        return (graph_pool_handle() if needs_grad else pool), stream

    def lane(self) -> _core.Lane | None:
        """The stream that the graphs of the current device were replayed on last."""
        if _driver.current().device_type != "cuda":
            return None
        ordinal = torch.cuda.current_device()
        if ordinal not in self._lanes:
            pool, _ = self._places[_number()]
            self._lanes[ordinal] = _lane(ordinal, tuple(getattr(pool, "id", pool)))
        return self._lanes[ordinal]

    def static(
        self, place: int, tensor: torch.Tensor, is_shared: bool, fills: bool
    ) -> torch.Tensor:
        """Memory that a graph reads instead of a tensor's, with the same contents if that is asked.

        Graphs of fewer rows read the first ones of the same memory, but for those with gradients:
        a backward pass may come after calls of other keys, and reads what its forward pass got.
        """
        needs_grad = tensor.requires_grad and (tensor.is_leaf or not is_shared)
        if not is_shared or tensor.dim() == 0 or not tensor.is_contiguous():
            static = tensor.detach().clone()
        else:
            form = (place, _number(), tensor.dtype, tensor.device, tensor.shape[1:])
            known = self._buffers.get(form)
            whole = None if known is None else known.get()
            if whole is not None and whole.nbytes() >= tensor.nbytes:
                static = tensor.new_empty(0).set_(whole, 0, tensor.shape, tensor.stride())
                if fills:
                    static.copy_(tensor)
                return as_argument(static, tensor, needs_grad)
            static = tensor.detach().clone()
            living = {name: one for name, one in self._buffers.items() if one.get() is not None}
            self._buffers = living
            self._buffers[form] = _torch.WeakStorage(static)
        if not fills:
            # Replays on another stream may write it, whose memory this one has used.
            _driver.current().synchronize()
        return as_argument(static, tensor, needs_grad)

    def clear(self) -> None:
        """Forget pools and memory."""
        self._places.clear()
        self._lanes.clear()
        self._buffers.clear()


_lanes: weakref.WeakValueDictionary[tuple[int, ...], _core.Lane] = weakref.WeakValueDictionary()


def _number() -> tuple[int, int]:
    """Tells the current devices of all drivers apart."""
    is_gpu = _driver.current().device_type == "cuda"
    return _driver.number(), torch.cuda.current_device() if is_gpu else 0


def _lane(ordinal: int, handle: tuple[int, ...]) -> _core.Lane:
    """The stream that the graphs of a pool were replayed on last, of whatever functions."""
    lane = _lanes.get((ordinal, *handle))
    if lane is None:
        source: Any = _torch.current_stream_source()
        made = _core.Lane(_core.Device.cuda(ordinal), source, ordinal, _torch.wait_between)
        # Another thread may have made one meanwhile.
        lane = _lanes.setdefault((ordinal, *handle), made)
    return lane
