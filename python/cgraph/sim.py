"""The simulator: captures and replays of torch's CPU tensors, without a GPU.

Inside a capture no operator runs: each becomes a node, and its outputs are poisoned memory (NaN)
until a replay. Operators that would wait for a GPU (``item()``, ``nonzero()``) break the capture,
as they do there; so do ``tolist()``, ``numpy()`` and printing inside :class:`cgraph.graph`. A
capture that sets a random state, as activation checkpointing does, is refused. Choose it by name:
``CGRAPH_DRIVER=sim``, or :func:`use`.

>>> import torch, cgraph
>>> with cgraph.sim.use(seed=3) as simulator:
...     x, graph = torch.tensor([1.0, 2.0]), cgraph.CUDAGraph(keep_graph=True)
...     with cgraph.graph(graph):
...         y = x + 1
...     print(y)
...     graph.replay()
...     print(y, simulator.live()["graphs"])
tensor([nan, nan])
tensor([2., 3.]) 1
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from cgraph import _core, _driver, _torch
from cgraph._driver import Handle
from cgraph.errors import ArgumentError, CaptureError, CgraphError, ForeignError

if TYPE_CHECKING:
    import torch

    from cgraph import _torch
    from cgraph._captures.capture_options import CaptureOptions
    from cgraph._captures.footprint import PoolState
    from cgraph.mempool import MemPool

__all__ = ["Simulator", "make_default", "use"]


class Simulator:
    """A simulated device that CPU tensors stand on.

    Args:
        seed: Seed of the order in which ready operations run.
        memory: Bytes of device memory.
        driver_version: As CUDA numbers it.
        asynchronous: Leave plain replays in flight until :meth:`synchronize`, as on a GPU. Any
            other replay is driven to its end before it returns, since torch's CPU operators cannot
            wait for a simulated stream.
    """

    device_type = "cpu"
    captures_compiled = False

    def __init__(
        self,
        *,
        seed: int = 0,
        memory: int = 16 << 30,
        driver_version: int = 13_000,
        asynchronous: bool = False,
    ) -> None:
        self.core = _core.Sim(
            seed=seed, memory=memory, driver_version=driver_version, asynchronous=asynchronous
        )
        self.device = _core.Device.sim(self.core)
        self.asynchronous = asynchronous
        self.default_stream = _core.Stream(self.device, handle=0)
        from cgraph._captures.sim_pools import Pools

        self.pools = Pools(self.device)
        # No part of a first capture's time.
        _torch.load_fake_mode()

    # Controls and observations for tests.

    def step(self) -> bool:
        """Run one ready operation; False if there is none."""
        return self.core.step()

    def drive(self) -> None:
        """Run until nothing is in flight."""
        self.core.drive()

    def delay(self, stream: _core.Stream, delayed: bool = True) -> None:
        """Hold a stream's operations back until nothing else can run."""
        self.core.delay(stream, delayed)

    def fail_next(self, call: str, code: int) -> None:
        """Make the next driver call of this CUDA name (``"cuGraphInstantiate"``) fail."""
        self.core.fail_next(call, code)

    def fail_call(self, n: int, code: int) -> None:
        """Make the n-th fallible driver call from now fail; zero is the next one."""
        self.core.fail_call(n, code)

    def clear_faults(self) -> None:
        """Take back faults that have not happened."""
        self.core.clear_faults()

    def live(self) -> dict[str, int]:
        """Return the number of driver objects of each kind."""
        return self.core.live()

    def calls(self) -> list[str]:
        """Return CUDA's names of the driver calls made so far."""
        return self.core.calls()

    # The driver interface.

    def begin(self, options: CaptureOptions) -> _driver.OpenCapture:
        """Begin a capture on the current stream."""
        from cgraph._captures.sim import OpenCapture
        from cgraph._captures.turns import Turn

        if self.is_capturing():
            raise CaptureError(
                f"capture_begin() while {self.current_stream()!r} captures already: captures cannot"
                " be nested; end the open one first"
            )
        if self.current_stream() == self.default_stream:
            raise CaptureError(
                "CUDA graphs must be captured on a non-default stream. (You must use a side"
                f" stream.) The current stream is the default stream of {self.device.name}: use"
                " cgraph.graph, or make a stream of new_stream() current"
            )
        own = Turn(self)
        try:
            handle = self.pools.resolve(options.pool)
            capture = _core.Capture.begin(self.current_stream(), options.mode)
        except BaseException:
            own.end()
            raise
        try:
            return OpenCapture(self, capture, handle, own, options)
        except BaseException:
            handle.mem_pool.is_open = False
            with suppress(CgraphError):  # it may have ended it itself
                capture.finish()
            own.end()
            raise

    def is_capturing(self) -> bool:
        """Return whether the current stream captures."""
        return self.current_stream().is_capturing()

    def pool_handle(self) -> Handle:
        """Return a token of a new pool."""
        return self.pools.new_handle()

    def mem_pool_class(self) -> type[MemPool]:
        """Return the class of its pools."""
        from cgraph._captures.sim_pools import SimMemPool

        return SimMemPool

    def mem_pool(self, handle: Handle) -> MemPool | None:
        """Return the living pool of a token."""
        return self.pools.known.get((handle[0], handle[1]))

    def mem_pools(self) -> Sequence[MemPool]:
        """Return the living pools."""
        return list(self.pools.known.values())

    def generators(self) -> tuple[()]:
        """Return no generators: those of the CPU have no offset."""
        return ()

    def settle(self) -> None:
        """Drop what only finished work still used."""
        self.device.collect()

    def pool_state(self, handle: Handle) -> PoolState:
        """Return the segments and the blocks in use of a living pool."""
        return self.pools.known[handle[0], handle[1]].state()

    def block_starts(self, handle: Handle) -> set[int]:
        """Return the addresses of all blocks in use of a pool, as tensors have them."""
        pool = self.pools.known.get((handle[0], handle[1]))
        return set() if pool is None else pool.block_starts()

    def is_in_pool(self, tensor: torch.Tensor, handle: Handle) -> bool:
        """Return whether a tensor lies in memory of a living pool."""
        return self.pools.known[handle[0], handle[1]].has(tensor)

    def is_of_device(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies in a pool of the device."""
        return any(pool.has(tensor) for pool in self.pools.known.values())

    def empty_like(self, tensor: torch.Tensor, handle: Handle) -> torch.Tensor:
        """Return a tensor without contents in a living pool."""
        return self.pools.known[handle[0], handle[1]].empty_like(self.current_stream(), tensor)

    def new_block(self, tensor: torch.Tensor, handle: Handle) -> torch.Tensor:
        """Return a tensor like another one, with its strides, in a living pool."""
        return self.pools.known[handle[0], handle[1]].tensor(self.current_stream(), tensor)

    def checkpoint(self, handle: Handle) -> object:
        """Return which blocks of a pool are in use."""
        return self.pools.known[handle[0], handle[1]].checkpoint()

    def restore(
        self,
        handle: Handle,
        state: Any,
        live: Sequence[_torch.WeakStorage],
        dead: Sequence[int],
    ) -> None:
        """Make the blocks in use of a pool those of a checkpoint again."""
        self.pools.known[handle[0], handle[1]].restore(state, live, dead)

    def give_up(self, handle: Handle, starts: Sequence[int]) -> None:
        """Make blocks free whose storages have other memory now."""
        self.pools.known[handle[0], handle[1]].give_up(starts)

    def poison(self, handle: Handle) -> None:
        """Set all bytes of a living pool that no block uses to 0xFF."""
        self.synchronize()
        self.pools.known[handle[0], handle[1]].poison()

    def new_stream(self) -> _core.Stream:
        """Return a new stream of the device."""
        return _core.Stream(self.device)

    def stream(self, stream: Any) -> AbstractContextManager[object]:
        """Make a stream current inside a ``with`` block."""
        if not isinstance(stream, _core.Stream):
            raise ForeignError(
                f"stream is {stream!r}, expected a stream of the simulator: simulator.new_stream()"
            )
        if stream.device != self.device:
            raise ForeignError(f"{stream!r} is of another device, expected {self.device!r}")
        return self._made_current(stream)

    def current_stream(self) -> _core.Stream:
        """Return the current stream of this thread."""
        return self.core.current_stream or self.default_stream

    def wait_between(self, last: int | None, now: int) -> None:
        """Run what is in flight, where replays may be."""
        if self.asynchronous:
            self.synchronize()

    def stream_source(self) -> tuple[_core.Device, object, int]:
        """Return the device, what finds its current stream, and its number."""
        return self.device, self.core, 0

    def synchronize(self) -> None:
        """Run everything that is in flight; raises the exception of a failed operator."""
        self.core.drive()
        self.core.raise_failure()
        self.default_stream.synchronize()

    def empty_cache(self) -> None:
        """Do nothing: the simulator caches no memory outside pools."""

    @contextmanager
    def _made_current(self, stream: _core.Stream) -> Iterator[_core.Stream]:
        before = self.core.current_stream
        self.core.current_stream = stream
        try:
            yield stream
        finally:
            self.core.current_stream = before


def _forget_default_stream(simulator: Simulator) -> None:
    """Drop the stream that :class:`cgraph.graph` made for itself, together with its device."""
    from cgraph.graphs import graph

    graph._forget_streams_of(simulator.device)


_permanent: AbstractContextManager[None] | None = None


def make_default() -> Simulator:
    """Make the simulator of ``CGRAPH_DRIVER=sim``, once in a process."""
    global _permanent
    from cgraph._torch import capturable_on_cpu

    _permanent = capturable_on_cpu()
    _permanent.__enter__()
    simulator = Simulator()
    simulator.core.is_default = True
    return simulator


@contextmanager
def use(simulator: Simulator | None = None, **options: Any) -> Iterator[Simulator]:
    """Capture on a simulator inside the ``with`` block, in all threads.

    The block that was entered last has the say, whichever thread did so, until it is left.

    Args:
        simulator: The simulator; by default a new one with ``options``.
        **options: The options of :class:`Simulator`.
    """
    from cgraph._torch import capturable_on_cpu

    if simulator is not None and options:
        raise ArgumentError(
            f"options are {sorted(options)}, expected none together with a simulator"
        )
    chosen = Simulator(**options) if simulator is None else simulator
    with capturable_on_cpu():
        _driver.put_in_force(chosen)
        try:
            yield chosen
        finally:
            _driver.take_out_of_force(chosen)
            _forget_default_stream(chosen)
