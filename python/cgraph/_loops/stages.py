"""``when``: a stage that runs on a condition, and the capture of a step in stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cgraph import _torch
from cgraph._breaks.sessions import Session
from cgraph._driver import Pool
from cgraph._graphed.record import observer_of
from cgraph._loops.tensors import Flags
from cgraph._operators.snapshots import bytes_of
from cgraph._source import user_line
from cgraph.breaks import Work, eager_break
from cgraph.errors import CaptureError

__all__ = ["StagesSession", "is_condition", "when"]

_NAME = "cgraph.when"


def when(flags: torch.Tensor, function: Callable[..., object], *tensors: torch.Tensor) -> None:
    """Call a function where all flags are set; in a step of :func:`cgraph.loop` the device decides.

    Elsewhere the host reads the flags and decides. The function changes tensors in place, and
    returns nothing. In a loop it becomes a stage of the graph that the driver runs or leaves out:
    what it reads of Python is as at the capture, what it writes there stays undone, and it may not
    call ``when`` itself.

    Args:
        flags: Booleans or integers.
        function: Called with the tensors.
        *tensors: The tensors that it works on.

    Raises:
        ArgumentError: The flags are not what was expected.

    >>> import torch, cgraph
    >>> def step(x, total):
    ...     x.add_(1)
    ...     cgraph.when(x % 3 == 0, lambda total: total.add_(x), total)
    >>> with cgraph.sim.use():
    ...     x, total = torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long)
    ...     print(*cgraph.loop(step, x, total, max_steps=10).result())
    tensor([10]) tensor([18])
    """
    Flags(flags, "flags")
    _decided(flags, function, tensors)


def is_condition(title: str) -> bool:
    """Return whether a break of a segmented graph is a condition, by its title."""
    return title.startswith(f"{_NAME} (")


def _decide(
    flags: torch.Tensor, function: Callable[..., object], tensors: tuple[torch.Tensor, ...]
) -> None:
    if bool((flags != 0).all()):
        function(*tensors)


_decided = eager_break(_decide, name=_NAME)


class StagesSession(Session):
    """The capture of a step, whose breaks are stages that run on a condition; nothing is run.

    Attributes:
        conditions: What stages run on, by their places among the segments.
        kept_outside: The memory from outside that such stages read. Nobody compares it before a
            run, as the functions of conditions are no part of the step's own code.
    """

    keeps = True
    are_stages = True

    def __init__(
        self,
        stream: Any,
        pool: Pool,
        generators: Sequence[torch.Generator],
        state: Sequence[torch.Tensor],
    ) -> None:
        super().__init__(
            stream, pool, "thread_local", generators, None, may_be_empty=True, runs=False
        )
        self.conditions: dict[int, Flags] = {}
        self.kept_outside: list[torch.UntypedStorage] = []
        self._state = state

    def run(self, work: Work, args: Any, kwargs: Any) -> None:
        """Capture the function of a condition as a stage."""
        try:
            if work.fn is not _decide:
                raise CaptureError(f"it breaks at {work.name} ({user_line()})")
            if self._in_break:
                raise CaptureError(f"a condition inside another one ({user_line()})")
            self._in_break = True
            flags, function, tensors = args
            with self.driver.stream(self.stream):
                self._go_on()
                before = len(self._steps)
                self._keep_outside(flags, function, tensors)
                self._go_on()
                if len(self._steps) > before:
                    self.conditions[before] = Flags(flags, "flags")
        except BaseException as error:
            self._abandon(error)
            raise
        finally:
            self._in_break = False

    def close(self) -> None:
        """Drop everything, after the end or a failure."""
        self._state = ()
        super().close()

    def _keep_outside(
        self, flags: torch.Tensor, function: Callable[..., object], tensors: Any
    ) -> None:
        """Call a function, and keep the memory that it reads, and its flags', but the state's."""
        kind, known = self.driver.device_type, [*self._state]
        observer = observer_of(kind, known, known, lines=False)
        observer.is_capture = True
        with observer.watching(), observer.noting():
            function(*tensors)
        of_state = {_torch.storage_id(one.untyped_storage()) for one in known}
        memories = [flags.untyped_storage()]
        memories += [one.storage for one in observer.trace.outside.values() if one.storage]
        for one in memories:
            is_own = self.driver.is_in_pool(bytes_of(one), self._pool)
            if not is_own and _torch.storage_id(one) not in of_state:
                self.kept_outside.append(one)

    def _go_on(self) -> None:
        with _torch.modes_aside(self._modes_inside):
            self._end(is_last=False)
        with _torch.modes_aside(self._modes_outside):
            self.begin()
