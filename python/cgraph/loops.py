"""``loop``: a step that one launch repeats, without the host.

>>> import torch, cgraph
>>> def step(token, total):
...     token.add_(1)
...     total.add_(token)
>>> with cgraph.sim.use():
...     token, total = torch.zeros(1), torch.zeros(1)
...     run = cgraph.loop(step, token, total, max_steps=4, emit="token")
...     print([one.item() for one in run], run.steps, total.item())
[1.0, 2.0, 3.0, 4.0] 4 10.0
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, TypedDict, overload

import torch
from typing_extensions import Required, Unpack

from cgraph import _driver
from cgraph._driver import Pool
from cgraph._loops.capture import capture_loop
from cgraph._loops.run import LoopRun
from cgraph._loops.tensors import Emitted, require_state
from cgraph.errors import ArgumentError, StateError

__all__ = ["Loop", "LoopRun", "loop"]

Named: TypeAlias = "str | torch.Tensor"
"""A tensor, or the name of the step's parameter that has it."""

_MOST_UNROLLED = 16


class LoopOptions(TypedDict, total=False):
    """The options of :func:`loop`, for type checkers."""

    max_steps: Required[int]
    until: Named | None
    emit: Named | Sequence[Named] | None
    unroll: int | Literal["auto"]
    pool: Pool | None


@overload
def loop(
    step: None = None, **options: Unpack[LoopOptions]
) -> Callable[[Callable[..., Any]], Loop]: ...
@overload
def loop(
    step: Callable[..., Any], *state: torch.Tensor, **options: Unpack[LoopOptions]
) -> LoopRun: ...
def loop(
    step: Callable[..., Any] | None = None,
    *state: torch.Tensor,
    max_steps: int,
    until: Named | None = None,
    emit: Named | Sequence[Named] | None = None,
    unroll: int | Literal["auto"] = "auto",
    pool: Pool | None = None,
) -> Any:
    """Repeat a step on the device until it is done; the host does nothing between steps.

    The step is called eagerly once, what it wrote is put back, and it is captured. It changes its
    tensors in place, or returns the next ones, which are copied back.

    Args:
        step: Called with the state. Without it, a decorator is returned that makes a :class:`Loop`.
        *state: The tensors that steps read and change; they stay where they are.
        max_steps: The most steps of a run.
        until: A tensor of booleans or integers: the loop ends once all of its elements are other
            than zero.
        emit: What each step publishes, one tensor or several; iterate over the run for them.
        unroll: Steps between two decisions. Further steps than the last one of a run, up to
            ``unroll - 1``, change the state, and publish nothing. ``"auto"`` makes none.
        pool: The pool of the capture, as for :class:`cgraph.graph`.

    Returns:
        The run, which has begun.

    Raises:
        ArgumentError: An argument is not what was expected.
        CaptureError: The step cannot be captured.
    """
    steps = 1 if unroll == "auto" else unroll
    for name, value in (("max_steps", max_steps), ("unroll", steps)):
        if type(value) is not int or value < 1:
            raise ArgumentError(f"{name} is {value!r:.40}, expected a number, at least 1")
    if unroll == "auto" and until is None:
        # So that no further step runs: the state is that after the last one.
        steps = max(one for one in range(1, _MOST_UNROLLED + 1) if max_steps % one == 0)
    made = functools.partial(
        Loop, max_steps=max_steps, until=until, emit=emit, unroll=steps, pool=pool
    )
    return made if step is None else made(step)(*state)


class Loop:
    """A step that each call repeats by one launch; made by :func:`loop` as a decorator.

    A call with the same tensors as the one before, in the same places, launches what was captured.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        *,
        max_steps: int,
        until: Named | None,
        emit: Named | Sequence[Named] | None,
        unroll: int,
        pool: Pool | None,
    ) -> None:
        self.__wrapped__ = step
        self._most, self._unroll, self._pool = max_steps, unroll, pool
        self._until, self._emit = until, emit
        self._captured: Any = None
        self._places: Any = None
        self._run: LoopRun | None = None

    def __call__(self, *state: torch.Tensor) -> LoopRun:
        """Begin a run.

        Raises:
            StateError: The run before is not over.
        """
        if self._run is not None and not self._run.is_over:
            raise StateError("a run while another one of the loop is under way: wait for result()")
        require_state(state, _driver.current().device_type)
        places = [(one.data_ptr(), one.shape, one.stride(), one.dtype) for one in state]
        if places != self._places:
            emitted = Emitted(self._tensors(self._emit, state), self._most)
            until = self._tensors(self._until, state)
            self._captured = capture_loop(
                *(self.__wrapped__, state, emitted, until[0] if until else None),
                *(self._most, self._unroll, self._pool),
            )
            self._places = places
        self._run = LoopRun(
            self._captured, state, is_single=not isinstance(self._emit, tuple | list)
        )
        return self._run

    def _tensors(self, given: Any, state: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors that are given by themselves, or by the names of parameters."""
        if given is None:
            return []
        names = list(inspect.signature(self.__wrapped__).parameters)
        found = []
        for one in given if isinstance(given, tuple | list) else [given]:
            if isinstance(one, torch.Tensor):
                found.append(one)
            elif one in names[: len(state)]:
                found.append(state[names.index(one)])
            else:
                raise ArgumentError(
                    f"{one!r:.40} is no tensor, and none of the step's parameters:"
                    f" {', '.join(names)}"
                )
        return found
