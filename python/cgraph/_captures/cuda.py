"""The driver of torch's CUDA devices."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from cgraph import _core, _torch
from cgraph._captures import cuda_pools
from cgraph._captures.capture_options import CaptureOptions
from cgraph._captures.cuda_capture import OpenCapture
from cgraph._captures.cuda_pools import CudaMemPool
from cgraph._captures.footprint import PoolState
from cgraph._captures.turns import Turn
from cgraph._driver import Handle
from cgraph.errors import CaptureError, ForeignError
from cgraph.mempool import MemPool

__all__ = ["Cuda"]


class Cuda:
    """Captures of torch's CUDA work, its pools and its streams."""

    device_type = "cuda"
    captures_compiled = True

    def __init__(self) -> None:
        _torch.require_cuda()
        self._side_streams: dict[int, tuple[_core.Stream, torch.cuda.Stream]] = {}

    def begin(self, options: CaptureOptions) -> OpenCapture:
        """Begin a capture on torch's current stream."""
        # Fails with NoDriverError where torch would fail in CUDA's initialisation.
        ordinal = torch.cuda.current_device() if _torch.has_gpu() else 0
        device = _torch.device_of(ordinal)
        stream = _torch.current_stream(ordinal)
        if not stream.cuda_stream:
            raise CaptureError(
                "CUDA graphs must be captured on a non-default stream. (You must use a side"
                f" stream.) The current stream is the default stream of cuda:{ordinal}: use"
                " cgraph.graph, or make a torch.cuda.Stream() current"
            )
        if _torch.is_capturing():
            raise CaptureError(
                f"capture_begin() while {stream} captures already: captures cannot be nested;"
                " end the first one before"
            )
        # Before anything that another thread's capture would see.
        own = Turn(self)
        try:
            side = self._side_stream(device, ordinal)
            _torch.release_outliving()
            _torch.make_handles(ordinal)
            handle = cuda_pools.resolve(options.pool, ordinal, side)
            return OpenCapture(device, ordinal, stream, side, handle, options, own)
        except BaseException:
            own.end()
            raise

    def wait_between(self, last: int | None, now: int) -> None:
        """Let a stream wait for the one of an earlier replay, or the host for the device."""
        if last is None:
            self.synchronize()
        else:
            _torch.wait_between(last, now)

    def stream_source(self) -> tuple[_core.Device, object, int]:
        """Return the current device, what finds its current stream, and its number."""
        ordinal = torch.cuda.current_device()
        return _core.Device.cuda(ordinal), _torch.current_stream_source(), ordinal

    def is_capturing(self) -> bool:
        """Return whether torch's current stream captures."""
        return _torch.is_capturing()

    def generators(self) -> list[torch.Generator]:
        """Return the current device's default generator."""
        return [torch.cuda.default_generators[torch.cuda.current_device()]]

    def pool_handle(self) -> Handle:
        """Return the token of a new pool."""
        self._require_gpu()
        return cuda_pools.new_handle()

    def mem_pool_class(self) -> type[MemPool]:
        """Return the class of this driver's pools."""
        return CudaMemPool

    def mem_pool(self, handle: Handle) -> MemPool | None:
        """Return the living pool of a token, if its segments are cgraph's."""
        return cuda_pools.known(handle)

    def mem_pools(self) -> Sequence[MemPool]:
        """Return the living pools of cgraph."""
        return cuda_pools.all_known()

    def settle(self) -> None:
        """Give back memory that had to wait, as for the end of a capture."""
        if torch.cuda.is_initialized():
            _core.Device.cuda(torch.cuda.current_device()).collect()
        _torch.release_outliving()
        _core.settle_pools()

    def pool_state(self, handle: Handle) -> PoolState:
        """Return the segments and the blocks in use of any living pool."""
        return cuda_pools.state(handle)

    def block_starts(self, handle: Handle) -> set[int]:
        """Return the addresses of all blocks in use of a pool."""
        return {start for start, _ in cuda_pools.state(handle).blocks}

    def is_in_pool(self, tensor: torch.Tensor, handle: Handle) -> bool:
        """Return whether a tensor lies in memory of a living pool."""
        return cuda_pools.has(handle, tensor.data_ptr())

    def is_of_device(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies on a GPU."""
        return tensor.is_cuda

    def empty_like(self, tensor: torch.Tensor, handle: Handle) -> torch.Tensor:
        """Return a tensor without contents in a living pool."""
        with _torch.allocating_in(tensor.device.index, (handle[0], handle[1])):
            return torch.empty_like(tensor)

    def new_block(self, tensor: torch.Tensor, handle: Handle) -> torch.Tensor:
        """Return a tensor like another one, with its strides, in a living pool."""
        with _torch.allocating_in(tensor.device.index, (handle[0], handle[1])):
            shape, strides = tensor.shape, tensor.stride()
            return torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)

    def checkpoint(self, handle: Handle) -> object:
        """Return which blocks of a pool are in use."""
        return _torch.allocator_state(torch.cuda.current_device(), handle)

    def restore(
        self,
        handle: Handle,
        state: Any,
        live: Sequence[_torch.WeakStorage],
        dead: Sequence[int],
    ) -> None:
        """Make the blocks in use of a pool those of a checkpoint again."""
        _torch.restore_allocator_state(torch.cuda.current_device(), state, live, dead)

    def give_up(self, handle: Handle, starts: Sequence[int]) -> None:
        """Do nothing: a block went with the storage that had got it."""

    def poison(self, handle: Handle) -> None:
        """Set all bytes of a living pool that no block uses to 0xFF."""
        self.synchronize()
        cuda_pools.poison(handle)
        self.synchronize()

    def new_stream(self) -> torch.cuda.Stream:
        """Create a stream of the current device."""
        self._require_gpu()
        return torch.cuda.Stream()

    def stream(self, stream: Any) -> AbstractContextManager[object]:
        """Make a stream of torch's current."""
        if not isinstance(stream, torch.cuda.Stream):
            raise ForeignError(
                f"stream is {stream!r}, expected a torch.cuda.Stream: only CUDA work can be"
                " captured on the CUDA driver. CPU tensors are captured on the simulator:"
                " CGRAPH_DRIVER=sim or `with cgraph.sim.use():`"
            )
        return _torch.on_stream(stream)

    def current_stream(self) -> torch.cuda.Stream:
        """Return torch's current stream."""
        self._require_gpu()
        return _torch.current_stream(_torch.current_ordinal())

    def synchronize(self) -> None:
        """Wait for all work of the current device.

        Raises:
            CaptureError: A stream of the device captures: the wait would end that capture.
        """
        ordinal = torch.cuda.current_device() if _torch.has_gpu() else 0
        if _torch.device_of(ordinal).has_captures():
            raise CaptureError(
                f"a wait for cuda:{ordinal} while a stream of it is capturing, which CUDA does not"
                " allow: wait, or begin another capture, when that capture has ended"
            )
        _torch.synchronize()

    def empty_cache(self) -> None:
        """Give torch's unused cached memory back."""
        _torch.release_outliving()
        _torch.empty_cache()

    def _side_stream(self, device: _core.Device, ordinal: int) -> torch.cuda.Stream:
        """Return a stream for keepers and trials that nobody else can have.

        torch hands out its streams again and again: one of those could be the capturing stream.
        """
        if ordinal not in self._side_streams:
            stream = _core.Stream(device)
            pair = stream, torch.cuda.ExternalStream(stream.handle)
            # Another thread may have made one meanwhile, and use it.
            self._side_streams.setdefault(ordinal, pair)
        return self._side_streams[ordinal][1]

    def _require_gpu(self) -> None:
        if not _torch.has_gpu():
            _core.Device.cuda(0)
