"""The driver interface that ``CUDAGraph`` needs, and the one place where a driver is chosen."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from cgraph import _core
from cgraph.errors import ArgumentError
from cgraph.labels import Label

if TYPE_CHECKING:
    import torch

    from cgraph import _torch
    from cgraph._captures.capture_options import CaptureOptions
    from cgraph._captures.footprint import Footprint, PoolState
    from cgraph._captures.fresh_results import Results
    from cgraph.mempool import MemPool

__all__ = [
    "MODES",
    "Captured",
    "Driver",
    "Handle",
    "OpenCapture",
    "Pool",
    "current",
    "number",
    "put_in_force",
    "register",
    "require_mode",
    "take_out_of_force",
]

MODES = ("global", "thread_local", "relaxed")
"""Effects of unsafe calls while a capture is open: fail anywhere, fail in its thread, nothing."""

Handle = tuple[int, int]
"""An opaque token of a memory pool, as torch has it."""

Pool = Any
"""A :data:`Handle`, a :class:`cgraph.MemPool` or a ``torch.cuda.MemPool``."""


@dataclass
class Captured:
    """The results of a capture, for the graph and its execs.

    Attributes:
        template: The captured graph; None once the graph has taken it over.
        pools: Tokens of the pools that the captured memory came from.
        current: Finds the current stream for a replay; see ``_core.LastStream``.
        ordinal: The device's number.
        check: Raises if memory that the graph reads is gone.
        random_step: Advances the random state of a replay.
        inputs: Nodes that copy to the static inputs and store the state of ``generators``.
        generators: The generators that a replay draws from, and how far it moves their offsets.
        random_words: The addresses of seed and offset of each, where ``inputs`` stores them.
        results: The memory that replays copy to new tensors; None if there is none.
        outputs: Nodes that copy ``results``.
        retained: An object kept alive until no replay is in flight.
        outlives: True if the template's graph is somebody else's, who stays: it is to be emptied.
        labels: The origin of the template's nodes, by raw node.
        footprint: Bytes and seconds of the capture.
    """

    template: _core.Template | None
    pools: list[Handle]
    current: object
    ordinal: int = 0
    check: Callable[[], None] | None = None
    random_step: Callable[[], None] | None = None
    inputs: _core.Inputs | None = None
    generators: Sequence[tuple[Any, int]] = ()
    random_words: Sequence[tuple[int, int]] = ()
    results: Results | None = None
    outputs: _core.Outputs | None = None
    retained: object = None
    outlives: bool = False
    labels: dict[int, Label] = field(default_factory=dict)
    footprint: Footprint | None = None


class OpenCapture(Protocol):
    """An open capture.

    Attributes:
        results: The tensors that replays copy to new memory; set before the end.
        goes_on: True if another capture resumes this one, and has the bytes of both; set before the
            end.
        may_be_empty: True if a capture without a node is no mistake: it is one of several segments.
    """

    results: Sequence[Any]
    goes_on: bool
    may_be_empty: bool

    @property
    def pool(self) -> Handle:
        """Token of the pool that captured work allocates from."""

    def finish(self) -> Captured:
        """End the capture on the stream it began on, and return its result.

        An error leaves nothing.
        """

    def abandon(self) -> str | None:
        """End the capture and discard its work; return the driver's objection, if there is one."""

    def leave_modes(self) -> None:
        """Leave the capture's dispatch modes where autograd has restored them after its end."""


class Driver(Protocol):
    """The differences between a GPU and the simulator.

    Attributes:
        device_type: Torch's name of the devices that captured tensors are on.
        captures_compiled: True if captures take functions that torch has compiled; otherwise they
            are captured as written.
    """

    device_type: str
    captures_compiled: bool

    def begin(self, options: CaptureOptions) -> OpenCapture:
        """Begin a capture on the current stream; on an error nothing is left behind."""

    def is_capturing(self) -> bool:
        """Return whether the current stream captures."""

    def generators(self) -> Sequence[torch.Generator]:
        """Return the default generators that captures draw from, if their states have offsets."""

    def pool_handle(self) -> Handle:
        """Return a token of a new pool."""

    def mem_pool_class(self) -> type[MemPool]:
        """Return the class of its pools."""

    def mem_pool(self, handle: Handle) -> MemPool | None:
        """Return the living pool of a token, if it is one of cgraph's."""

    def mem_pools(self) -> Sequence[MemPool]:
        """Return the living pools of cgraph."""

    def settle(self) -> None:
        """Give back what had to wait, for example for the end of a capture."""

    def pool_state(self, handle: Handle) -> PoolState:
        """Return the segments and the blocks in use of any living pool."""

    def block_starts(self, handle: Handle) -> set[int]:
        """Return the addresses of all blocks in use of a pool, as tensors have them."""

    def is_in_pool(self, tensor: torch.Tensor, handle: Handle) -> bool:
        """Return whether a tensor lies in memory of a living pool."""

    def is_of_device(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies on the device: on the simulator, in one of its pools."""

    def empty_like(self, tensor: torch.Tensor, handle: Handle) -> torch.Tensor:
        """Return a tensor without contents in a living pool that no capture is using."""

    def new_block(self, tensor: torch.Tensor, handle: Handle) -> torch.Tensor:
        """Return a tensor like another one, with its strides, in a living pool."""

    def checkpoint(self, handle: Handle) -> object:
        """Return which blocks of a pool are in use."""

    def restore(
        self,
        handle: Handle,
        state: Any,
        live: Sequence[_torch.WeakStorage],
        dead: Sequence[int],
    ) -> None:
        """Make the blocks in use of a pool those of a checkpoint again; none is in use now.

        ``live`` are the storages over such blocks that own them from here on. ``dead`` are the
        addresses of blocks, as tensors have them, that are free then.
        """

    def give_up(self, handle: Handle, starts: Sequence[int]) -> None:
        """Make blocks free, by where they begin, whose storages have other memory now."""

    def poison(self, handle: Handle) -> None:
        """Wait, then set all bytes of a living pool that no block uses to 0xFF, which is NaN."""

    def new_stream(self) -> Any:
        """Return a stream to capture on."""

    def stream(self, stream: Any) -> AbstractContextManager[object]:
        """Make a stream current; refuses a stream of another driver."""

    def current_stream(self) -> Any:
        """Return the current stream."""

    def wait_between(self, last: int | None, now: int) -> None:
        """Let a stream wait for the one of an earlier replay; both are raw handles.

        Where that one may be gone, as None says, wait for the device.
        """

    def stream_source(self) -> tuple[_core.Device, object, int]:
        """Return the current device, what finds its current stream, and its number.

        See ``_core.LastStream``.
        """

    def synchronize(self) -> None:
        """Wait for all work of the device."""

    def empty_cache(self) -> None:
        """Give unused cached memory back to the device."""


# The last one is in force.
_overrides: list[Driver] = []
_makers: dict[str, Callable[[], Driver]] = {}
_made: dict[str, Driver] = {}
_making = threading.RLock()
_numbers: weakref.WeakKeyDictionary[Driver, int] = weakref.WeakKeyDictionary()
_next = itertools.count(1)


def current() -> Driver:
    """Return the driver in force: that of :func:`put_in_force`, or of ``CGRAPH_DRIVER``.

    Raises:
        StateError: The process is a fork of one that has used cgraph.
    """
    _core.require_unforked()
    if overrides := _overrides[-1:]:
        return overrides[0]
    name = os.environ.get("CGRAPH_DRIVER", "cuda")
    if name not in _makers:
        raise ArgumentError(f'CGRAPH_DRIVER is {name!r}, expected "cuda" or "sim"')
    if name not in _made:
        # Keys belong to a driver: two threads must not get a driver each.
        with _making:
            if name not in _made:
                _made[name] = _makers[name]()
    return _made[name]


def token(pool: Any) -> Handle:
    """Return the token of a pool that a user has given.

    Raises:
        ArgumentError: It is none.
    """
    found = getattr(pool, "id", pool)
    if (
        isinstance(found, tuple)
        and len(found) == 2
        and all(isinstance(half, int) for half in found)
    ):
        return found[0], found[1]
    raise ArgumentError(
        f"pool is {pool!r}, expected a cgraph.MemPool, a torch.cuda.MemPool, graph_pool_handle() or"
        " other.pool()"
    )


def register(name: str, make: Callable[[], Driver]) -> None:
    """Register a driver for ``CGRAPH_DRIVER``; it is made on first use."""
    _makers[name] = make


def put_in_force(driver: Driver) -> None:
    """Make a driver the one of the process, until :func:`take_out_of_force`."""
    with _making:
        _overrides.append(driver)
        _tell_core()


def take_out_of_force(driver: Driver) -> None:
    """Take a driver out of force, whichever others were put in force since."""
    with _making:
        place = max(place for place, one in enumerate(_overrides) if one is driver)
        del _overrides[place]
        _tell_core()


def number() -> int:
    """Return the number of the driver in force, never used twice; 0 for ``CGRAPH_DRIVER``."""
    overrides = _overrides[-1:]
    if not overrides:
        return 0
    if overrides[0] not in _numbers:
        _numbers[overrides[0]] = next(_next)
    return _numbers[overrides[0]]


def require_mode(mode: object) -> None:
    """Raise unless the mode is one of CUDA's."""
    if mode not in MODES:
        raise ArgumentError(
            "Unknown capture error mode. Expected `global`, `thread_local`, or `relaxed`, got"
            f" {mode!r}"
        )


def _tell_core() -> None:
    """Let native calls know of the driver in force, and of the simulator if it is one."""
    _core.set_driver(number(), getattr(_overrides[-1], "core", None) if _overrides else None)
