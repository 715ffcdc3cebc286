"""``MemPool``: memory that captures allocate from, known to the byte, with a limit and a pause."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cgraph import _core, _driver
from cgraph._driver import Handle
from cgraph._given import require_type
from cgraph.errors import ArgumentError, ForeignError

if TYPE_CHECKING:
    from typing_extensions import Self

    from cgraph.cudagraph import CUDAGraph
    from cgraph.timeline import Timeline

__all__ = ["MemPool"]

_GRANULARITY = 2 << 20
_END_OF_ADDRESSES = 1 << 47
_KEEP = ("discard", "host")


class MemPool:
    """A memory pool of the current device, for captures and for ``torch.cuda.use_mem_pool``.

    On CUDA it is a ``torch.cuda.MemPool`` whose segments come from cgraph: torch's allocator makes
    blocks of them as always, and its snapshots and statistics show them. The segments lie at
    addresses of their own, so that their memory can be given back and mapped again while all graphs
    stay valid. A capture without a ``pool`` gets one for itself.

    The memory goes back to the device when the last graph and the object are gone. Memory that
    tensors still use then stays, and goes when torch empties its cache: at
    ``torch.cuda.empty_cache()``, at the next :class:`cgraph.graph`, or when memory is short. So
    does the memory of a pool that dies during a capture.

    Args:
        limit: The most bytes that its segments may have together. A larger demand raises an
            :class:`~cgraph.errors.OutOfMemoryError` that is also torch's. Default: the device's
            memory.
        base: The start of its addresses, a multiple of 2 MiB. If they are not free there, the
            driver chooses. Default: an address that is the same in every process whose pools get
            their first segments in the same order.
        use_on_oom: As for ``torch.cuda.MemPool``; without meaning on the simulator.
        no_split: As for ``torch.cuda.MemPool``; without meaning on the simulator.

    Raises:
        ArgumentError: A limit or base that is not possible.
        StateError: There are 1024 pools already.

    >>> import torch, cgraph
    >>> with cgraph.sim.use():
    ...     pool, graph = cgraph.MemPool(limit=64 << 20), cgraph.CUDAGraph()
    ...     x = torch.tensor([1.0, 2.0])
    ...     with cgraph.graph(graph, pool=pool):
    ...         y = x * 2
    ...     pool.pause()  # no memory, and the graph stays valid
    ...     pool.resume()
    ...     graph.replay()
    ...     print(y, pool.stats()["mapped"] >> 20, "MiB")
    tensor([2., 4.]) 2 MiB
    """

    _core: _core.Pool
    _timeline: Timeline | None = None
    """The record that :func:`cgraph.record_memory` has made of captures into it."""

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Create a pool of the driver in force."""
        own: Any = _driver.current().mem_pool_class()
        if cls is not MemPool and not issubclass(cls, own):
            raise ArgumentError(
                f"{cls.__name__} is a subclass of cgraph.MemPool, which is one of several: expected"
                " cgraph.MemPool itself, or a class that has one"
            )
        own = own if cls is MemPool else cls
        made: Self = super(MemPool, own).__new__(own)
        return made

    def __init__(
        self,
        limit: int | None = None,
        base: int | None = None,
        *,
        use_on_oom: bool = False,
        no_split: bool = False,
    ) -> None: ...

    @staticmethod
    def of(source: CUDAGraph | Handle | MemPool) -> MemPool:
        """Return the pool of a graph's capture or of a token, also of a capture without ``pool``.

        Raises:
            ArgumentError: It is none of these.
            ForeignError: The pool is torch's own, or it is gone.
            StateError: The graph has captured nothing.
        """
        if isinstance(source, MemPool):
            return source
        kinds = (_core.Graph, tuple)
        require_type("source", source, kinds, "a CUDAGraph, a token of a pool or a MemPool")
        if isinstance(source, tuple):
            handle, driver = source, _driver.current()
        else:
            handle, driver = source.pool(), source._driver
        found = driver.mem_pool(handle)
        if found is None:
            raise ForeignError(
                f"pool {tuple(handle)} is no cgraph.MemPool: it is torch's own, or it is gone."
                " Capture with pool=cgraph.MemPool(), or without a pool"
            )
        return found

    if TYPE_CHECKING:  # torch's property must be found behind this class

        @property
        def id(self) -> Handle:
            """Its token, which does not keep it alive."""

    @property
    def name(self) -> str:
        """The number and device of the pool."""
        return f"pool {self._core.id} of {self._core.device.name}"

    @property
    def limit(self) -> int | None:
        """The most bytes that its segments may have together."""
        return self._core.limit

    @property
    def is_paused(self) -> bool:
        """True if its memory is given back."""
        return self._core.is_paused

    def pause(self, keep: str = "discard") -> None:
        """Give all memory back to the device and keep the addresses; all graphs stay valid.

        This waits for all work of the device. Until :meth:`resume`, captures into the pool and
        replays of its graphs raise :class:`~cgraph.errors.StateError`, and so do replays of graphs
        in other pools that read its memory, as weights. Nothing protects other work on tensors in
        the pool: on a GPU it fails with an illegal address, which ends all work of the process
        there. torch's own graphs in the pool are such work.

        Args:
            keep: The fate of the contents: ``"discard"`` loses them, ``"host"`` keeps them in
                pinned host memory. The first such pause pins it, which takes longest; the pool
                keeps it for the next ones, until :meth:`trim` or a pause that discards.

        Raises:
            StateError: It is paused already, or ``torch.cuda.use_mem_pool`` allocates from it.
            CaptureError: A capture is open on the device.
            ArgumentError: An unknown ``keep``, or the host has no room for the contents.
        """
        if keep not in _KEEP:
            raise ArgumentError(f'keep is {keep!r}, expected "discard" or "host"')
        self._core.pause(keep)

    def resume(self) -> None:
        """Map memory at the same addresses again, with the contents that were kept.

        Raises:
            StateError: It is not paused.
            OutOfMemoryError: The device has too little memory; the pool stays paused.
        """
        self._core.resume()

    def trim(self) -> int:
        """Give back segments that nothing uses and no graph knows; return the number of bytes.

        Host memory that is kept for the next pause goes, too, and does not count.

        On CUDA these are segments that torch has released and that had to wait, for example for a
        capture. What torch keeps for the pool's next capture stays until the pool is gone. This
        waits for the device.
        """
        return self._core.trim()

    def stats(self) -> dict[str, int]:
        """Return bytes, by name.

        - ``in_use`` and ``peak``: in segments that torch has, now and at most; on the simulator in
          blocks.
        - ``reserved``: in segments. ``mapped``: of the device; zero while it is paused, and more
          than reserved where segments have come back from a pause together and some are gone. A
          limit counts both.
        - ``leaving``: in segments that torch has released and that go back later.
        - ``kept``: of the host, where a pause keeps contents or the last one did.
        - ``addresses``: reserved addresses, which cost nothing.
        """
        return dict(self._core.stats())

    def segments(self) -> list[tuple[int, int]]:
        """Return start and bytes of each segment, by address."""
        return [(address, size) for address, size, _ in self._core.segment_stats()]

    def ranges(self) -> list[tuple[int, int]]:
        """Return start and bytes of each range of addresses that it has reserved."""
        return self._core.ranges()

    def __repr__(self) -> str:
        """Return the pool's number and its state or bytes."""
        state = "paused" if self.is_paused else f"{self.stats()['mapped']} bytes"
        return f"<cgraph.MemPool, {self.name}: {state}>"


def require_options(limit: object, base: object) -> None:
    """Raise unless a limit and a base are possible."""
    if limit is not None and not _is_count(limit, 1, 1 << 63):
        raise ArgumentError(f"limit is {limit!r}, expected None or a count of bytes below 2**63")
    if base is not None and not (
        _is_count(base, _GRANULARITY, _END_OF_ADDRESSES) and int(base) % _GRANULARITY == 0  # type: ignore[call-overload]
    ):
        raise ArgumentError(
            f"base is {base!r}, expected None or an address below 2**47 that is a multiple of 2 MiB"
            f" ({_GRANULARITY})"
        )


def _is_count(value: object, least: int, end: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < end
