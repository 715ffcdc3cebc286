"""What ``CUDAGraph`` needs of a driver, and the one place where a driver is chosen."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from cgraph import _core
from cgraph.errors import ArgumentError
from cgraph.labels import Label

if TYPE_CHECKING:
    import torch

    from cgraph._captures.footprint import Footprint, PoolState
    from cgraph._captures.fresh_results import Results
    from cgraph._captures.label_recorder import LabelRecorder
    from cgraph.mempool import MemPool

__all__ = [
    "MODES",
    "Captured",
    "Driver",
    "Handle",
    "Pool",
    "Recording",
    "current",
    "number",
    "put_in_force",
    "register",
    "take_out_of_force",
]

MODES = ("global", "thread_local", "relaxed")
"""What unsafe calls do while a capture is open: fail anywhere, fail in its thread, nothing."""

Handle = tuple[int, int]
"""An opaque token of a memory pool, as torch has it."""

Pool = Any
"""A :data:`Handle`, a :class:`cgraph.MemPool` or a ``torch.cuda.MemPool``."""


class Captured:
    """What a capture leaves behind for the graph and its execs.

    Attributes:
        template: The captured graph; None once the graph has taken it over.
        pools: Tokens of the pools that the captured memory came from.
        current: How a replay finds the current stream; see ``_core.Graph._adopt``.
        ordinal: The device's number, where ``current`` needs one.
        check: Raises if memory that the graph reads is gone.
        random_step: Advances the random state of a replay.
        inputs: Nodes that copy to the static inputs and store the state of ``generators``.
        generators: The generators that a replay draws from, and how far it moves their offsets.
        feed: Copies tensors to the static inputs before a replay, where ``inputs`` does not.
        results: The memory that replays copy to new tensors; None if there is none.
        outputs: Nodes that copy it.
        deliver: Copies it after a replay, where ``outputs`` does not: to these addresses, so many
            bytes each, which belong to these tensors.
        sim: The simulator that a replay drives.
        retained: Kept alive until no replay is in flight.
        labels: Where the template's nodes come from, by raw node.
        footprint: Bytes and seconds of the capture.
    """

    def __init__(
        self,
        template: _core.Template,
        *,
        pools: list[Handle],
        current: object,
        ordinal: int | None = None,
        check: Callable[[], None] | None = None,
        random_step: Callable[[], None] | None = None,
        inputs: _core.Inputs | None = None,
        generators: Sequence[tuple[Any, int]] = (),
        feed: Callable[[tuple[Any, ...]], None] | None = None,
        results: Results | None = None,
        outputs: _core.Outputs | None = None,
        deliver: Callable[[Sequence[tuple[int, int]], Sequence[Any]], None] | None = None,
        sim: _core.Sim | None = None,
        retained: object = None,
        labels: dict[int, Label] | None = None,
        footprint: Footprint | None = None,
    ) -> None:
        self.footprint = footprint
        self.template: _core.Template | None = template
        self.pools = pools
        self.current = current
        self.ordinal = ordinal
        self.check = check
        self.random_step = random_step
        self.inputs = inputs
        self.generators = generators
        self.feed = feed
        self.results = results
        self.outputs = outputs
        self.deliver = deliver
        self.sim = sim
        self.retained = retained
        self.labels = labels or {}


class Recording(Protocol):
    """An open capture.

    Attributes:
        results: The tensors that replays copy to new memory; set before the end.
    """

    results: Sequence[Any]

    @property
    def pool(self) -> Handle:
        """Token of the pool that captured work allocates from."""

    def end(self) -> None:
        """End the capture on the stream it began on; on an error nothing is left behind.

        What is made of it can wait for :meth:`finish`, but where liveness is checked: what is alive
        in the pool is looked at then.
        """

    def finish(self) -> Captured:
        """End the capture unless it has ended, and return what it made; an error leaves nothing."""

    def abandon(self) -> str | None:
        """End the capture and throw its work away; says what the driver had against it.

        One that has ended and is not finished is thrown away, too.
        """

    def leave_modes(self) -> None:
        """Leave its dispatch modes where autograd has put them back after its end."""


class Driver(Protocol):
    """What differs between a GPU and the simulator.

    Attributes:
        device_type: Torch's name of the devices that captured tensors are on.
        captures_compiled: Whether captures take what torch has compiled; otherwise it is captured
            as it was written.
    """

    device_type: str
    captures_compiled: bool

    def begin(
        self,
        *,
        pool: Pool | None,
        mode: str,
        check_liveness: bool,
        generators: list[Any],
        labels: LabelRecorder | None = None,
        statics: Sequence[Any] = (),
        resumes: Recording | None = None,
    ) -> Recording:
        """Begin a capture on the current stream; on an error nothing is left behind.

        ``labels`` is started inside the capture, and stopped when it ends in any way. ``statics``
        are tensors that replays copy to. ``resumes`` is a capture that has ended, whose dispatch
        modes this one is to use again if it has any.
        """

    def is_capturing(self) -> bool:
        """Whether the current stream captures."""

    def generators(self) -> Sequence[torch.Generator]:
        """The default generators that captures draw from, if their states have offsets."""

    def pool_handle(self) -> Handle:
        """A token of a new pool."""

    def mem_pool_class(self) -> type[MemPool]:
        """The class of its pools."""

    def mem_pool(self, handle: Handle) -> MemPool | None:
        """The living pool of a token, if it is one of cgraph's."""

    def mem_pools(self) -> Sequence[MemPool]:
        """The living pools of cgraph."""

    def settle(self) -> None:
        """Give back what had to wait, as for the end of a capture."""

    def pool_state(self, handle: Handle) -> PoolState:
        """The segments and the blocks in use of any living pool."""

    def is_in_pool(self, tensor: torch.Tensor, handle: Handle) -> bool:
        """Whether a tensor lies in memory of a living pool."""

    def poison(self, handle: Handle) -> None:
        """Set all bytes of a living pool that no block uses to 0xFF, which is NaN; waits before."""

    def new_stream(self) -> Any:
        """A stream to capture on."""

    def stream(self, stream: Any) -> AbstractContextManager[object]:
        """Make a stream current; refuses one of another driver."""

    def current_stream(self) -> Any:
        """The current stream."""

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
    """The driver in force: the last one of :func:`put_in_force`, or that of ``CGRAPH_DRIVER``."""
    if overrides := _overrides[-1:]:
        return overrides[0]
    name = os.environ.get("CGRAPH_DRIVER", "cuda")
    if name not in _makers:
        raise ArgumentError(f'CGRAPH_DRIVER is {name!r}, expected "cuda" or "sim"')
    if name not in _made:
        # Keys belong to a driver: two threads must not get one each.
        with _making:
            if name not in _made:
                _made[name] = _makers[name]()
    return _made[name]


def register(name: str, make: Callable[[], Driver]) -> None:
    """Let ``CGRAPH_DRIVER`` name a driver, which is made when it is first asked for."""
    _makers[name] = make


def put_in_force(driver: Driver) -> None:
    """Let a driver be the one of the process, until :func:`take_out_of_force`."""
    with _making:
        _overrides.append(driver)
        _core.set_driver(number())


def take_out_of_force(driver: Driver) -> None:
    """Take a driver out of force, whichever others were put in force since."""
    with _making:
        place = max(place for place, one in enumerate(_overrides) if one is driver)
        del _overrides[place]
        _core.set_driver(number())


def number() -> int:
    """Tells drivers apart, also ones that are gone by now. That of ``CGRAPH_DRIVER`` has 0."""
    overrides = _overrides[-1:]
    if not overrides:
        return 0
    if overrides[0] not in _numbers:
        _numbers[overrides[0]] = next(_next)
    return _numbers[overrides[0]]
