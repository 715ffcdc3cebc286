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

import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, TypedDict, overload

import torch
from typing_extensions import Required, Unpack

from cgraph import _core, _driver
from cgraph._captures.busy import is_busy
from cgraph._driver import Pool
from cgraph._graphed.method import bound_to, is_method, is_named
from cgraph._graphed.recorded import Recorded
from cgraph._loops.capture import (
    CapturedLoop,
    capture_loop,
    is_refusal,
    reason_against,
    reason_of,
)
from cgraph._loops.launched import Launched
from cgraph._loops.report import LoopReport
from cgraph._loops.run import LoopRun
from cgraph._loops.stages import when
from cgraph._loops.stepwise import Stepwise
from cgraph._loops.tensors import Emitted, Flags, in_place, require_state
from cgraph._reason import Reason
from cgraph._source import place_of_function
from cgraph.causes import Cause
from cgraph.errors import ArgumentError, CaptureError, CgraphWarning, StateError
from cgraph.functions import graphed

__all__ = ["Loop", "LoopReport", "LoopRun", "loop", "when"]

Named: TypeAlias = "str | torch.Tensor"
"""A tensor, or the name of the step's parameter that has it."""

_MOST_STEPS = 2**32 - 1
_MOST_UNROLLED = 16
# Of tensors that a step takes without names.
_MOST_STATE = 64


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
def loop(step: Callable[..., Any], **options: Unpack[LoopOptions]) -> Loop: ...
@overload
def loop(
    step: Callable[..., Any],
    first: torch.Tensor,
    /,
    *state: torch.Tensor,
    **options: Unpack[LoopOptions],
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

    The step changes its tensors in place, or returns the next ones, which are copied back. It is
    observed, captured and compared as by :func:`cgraph.graphed`: Python runs three times, what it
    writes is put back, and later runs capture again where a value that the step reads has changed.
    No gradients are recorded. A step that cannot be captured, or that the driver cannot repeat, is
    made by the host, as often as it takes; a warning names the line and the fix, and so does
    ``run.report``.

    Args:
        step: Called with the state. Without it, a decorator is returned that makes a :class:`Loop`.
        *state: The tensors that steps read and change; they stay where they are. Without any, the
            :class:`Loop` is returned.
        max_steps: The most steps of a run.
        until: A tensor of booleans or integers: the loop ends once all of its elements are other
            than zero.
        emit: What each step publishes, one tensor or several; iterate over the run for them.
        unroll: Steps between two decisions, a divisor of ``max_steps``. Steps behind the one that
            ``until`` ends, up to ``unroll - 1``, change the state, and publish nothing. ``"auto"``
            makes none.
        pool: The pool of the capture, as for :class:`cgraph.graph`.

    Returns:
        The run, which has begun, if there is a state.

    Raises:
        ArgumentError: An argument is not what was expected.
        StateError: It is called inside a capture.
        Exception: The step raised it.

    Random numbers are those of as many calls. Until the run is over, generators stand where
    ``max_steps`` steps would leave them, and then behind the last one. The state is to be left
    alone, on other streams, until :meth:`LoopRun.result` has returned.
    """
    steps = 1 if unroll == "auto" else unroll
    for name, value in (("max_steps", max_steps), ("unroll", steps)):
        if type(value) is not int or not 1 <= value <= _MOST_STEPS:
            raise ArgumentError(
                f"{name} is {value!r:.40}, expected a number, at least 1 and below 2**32"
            )
    if isinstance(until, tuple | list):
        raise ArgumentError(f"until is {until!r:.40}, expected one tensor, or one name")
    if max_steps % steps:
        raise ArgumentError(
            f"unroll is {unroll}, expected a divisor of max_steps={max_steps}, so that no step runs"
            " behind that one"
        )
    if unroll == "auto" and until is None:
        # So that no further step runs: the state is that after the last one.
        steps = max(one for one in range(1, _MOST_UNROLLED + 1) if max_steps % one == 0)
    options = Options(max_steps, until, emit, steps, pool)
    if step is None:
        return functools.partial(Loop, options=options)
    made = Loop(step, options)
    return made(*state) if state else made


@dataclass(frozen=True)
class Options:
    """The options of a loop; see :func:`loop`."""

    max_steps: int
    until: Named | None
    emit: Named | Sequence[Named] | None
    unroll: int
    pool: Pool | None


class Loop:
    """A step that each call repeats by one launch; made by :func:`loop` as a decorator.

    As a method of a class it is a loop of its own for each object.
    """

    # The name of the method, the name under which objects keep their loops, and the class.
    _attribute = _kept_as = ""
    _class: type | None = None
    # The loop in the class, if this is that of one object.
    _bound_of: Loop | None = None

    def __init__(self, step: Callable[..., Any], options: Options) -> None:
        if not callable(step):
            raise ArgumentError(f"step is {step!r:.80}, expected a function or a method of objects")
        self.__wrapped__ = step
        for name in functools.WRAPPER_ASSIGNMENTS:
            if hasattr(step, name):
                setattr(self, name, getattr(step, name))
        self._options = options
        self._names = _names_of(step)
        self._step = graphed(in_place(step), static_args=self._names, pool=options.pool)
        # Values that the step reads make graphs of their own.
        self._loops: weakref.WeakKeyDictionary[_core.Entry, CapturedLoop | Reason] = (
            weakref.WeakKeyDictionary()
        )
        self._captures = 0
        self._against: Reason | None = None
        # The places of the state whose step could not be captured.
        self._refused_at: list[tuple[int, torch.dtype, torch.Size]] = []
        # The last run, and the loop that it launched.
        self._run: weakref.ref[LoopRun] | None = None
        self._launched: CapturedLoop | None = None

    def __call__(self, *state: torch.Tensor) -> LoopRun:
        """Begin a run.

        Raises:
            ArgumentError: The state, or what is published, is not what was expected.
            StateError: The run before is not over, or this is inside a capture.
        """
        if self._class is not None and state and isinstance(state[0], self._class):
            return self.__get__(state[0])(*state[1:])
        if is_busy() or _driver.current().is_capturing():
            raise StateError("a loop was to begin inside a capture, and cannot be part of one")
        with self._step._lock:
            if self._step._lock.is_replaying:
                raise StateError(
                    "a loop was to begin inside a break or a hook of a replay whose graph has the"
                    " same pool, and would overwrite its memory: give it a pool of its own"
                )
            return self._begin(state)

    def __set_name__(self, owner: type, name: str) -> None:
        """Learn the name of this method."""
        self._attribute, self._kept_as = name, f"{owner.__qualname__}.{name}"
        self._class = owner if is_method(self.__wrapped__) else None

    def __get__(self, instance: Any, owner: type | None = None) -> Loop:
        """Return the loop of an object."""
        if instance is None or not is_method(self.__wrapped__):
            return self
        if isinstance(instance, type):
            raise ArgumentError(
                f"{self._step.__qualname__} is a method of the class {instance.__qualname__},"
                " expected a method of objects, or a function"
            )

        def make(method: Callable[..., Any], kept_as: str) -> Loop:
            made = Loop(method, self._options)
            made._attribute, made._kept_as, made._bound_of = self._attribute, kept_as, self
            return made

        bound: Loop = bound_to(instance, self, self._kept_as, make)
        return bound

    def __deepcopy__(self, memo: dict[int, Any]) -> Loop:
        """Copy without graphs, as these know only the original."""
        step = copy.deepcopy(self.__wrapped__, memo)
        if step is self.__wrapped__:
            return self
        copied = Loop(step, self._options)
        copied._attribute, copied._kept_as = self._attribute, self._kept_as
        copied._bound_of = self._bound_of
        return copied

    def __reduce__(self) -> Any:
        """Pickle by name or by step, without graphs and without pool."""
        if self._bound_of is not None:
            return getattr, (self.__wrapped__.__self__, self._attribute)  # type: ignore[attr-defined]
        name = self._step.__qualname__
        if is_named(self, self.__wrapped__, name):
            return name
        return Loop, (self.__wrapped__, replace(self._options, pool=None))

    def report(self) -> LoopReport:
        """Report how the steps of the last run were made, and why."""
        return LoopReport.of(
            self._step.__qualname__, self._options.unroll, self._captures, self._against
        )

    def _begin(self, state: tuple[torch.Tensor, ...]) -> LoopRun:
        self._end_last_run()
        if len(state) > len(self._names):
            raise ArgumentError(
                f"the state has {len(state)} tensors, expected at most {len(self._names)}"
            )
        require_state(state)
        options = self._options
        emitted = self._tensors(options.emit, state)
        until = [Flags(one, "until") for one in self._tensors(options.until, state)]
        with torch.no_grad():
            captured = self._captured(state, emitted, until[0] if until else None)
        work: Launched | Stepwise
        self._launched = captured
        if captured is not None:
            # The function has the tensors that it reads besides.
            work = Launched(captured, (self._step, state, emitted, until))
        else:
            flags = until[0].tensor if until else None
            step = functools.partial(self._step, *state)
            work = Stepwise(step, emitted, flags, options.max_steps)
        is_single = not isinstance(options.emit, tuple | list)
        run = LoopRun(work, state, emits=bool(emitted), is_single=is_single, report=self.report())
        self._run = weakref.ref(run)
        return run

    def _end_last_run(self) -> None:
        """Let the last run take what the next one overwrites, or end it if nobody has it."""
        run = None if self._run is None else self._run()
        if run is not None:
            if not run._work.has_ended():
                raise StateError("another run of the loop is under way: wait for its result()")
            run._take()
        elif self._launched is not None:
            self._launched.end_dropped()

    def _captured(
        self, state: Sequence[torch.Tensor], emitted: Sequence[torch.Tensor], until: Flags | None
    ) -> CapturedLoop | None:
        """Return a loop of the step as it is now; None if the host makes the steps."""
        if self._step._is_intercepted:
            text = "a transform of torch.func, a mode or a tracer has to see the step's operators"
            fix = "begin the loop outside of it"
            self._against = Reason(Cause.LOOP_STEP, text, None, fix)
            return None
        entry = self._step.entry_for(*state)
        known = None if entry is None else self._loops.get(entry)
        if isinstance(known, CapturedLoop):
            self._against = None
            return known
        pair = self._step._captured_for(state)
        places = [(one.data_ptr(), one.dtype, one.shape) for one in state]
        if pair is None and places != self._refused_at:
            try:
                pair = self._recorded(state)
            except CaptureError as error:
                if not is_refusal(error):
                    raise
                self._refuse(reason_of(error))
                self._refused_at = places
        if pair is None:
            return None
        entry, recorded = pair
        found = self._loops.get(entry) or reason_against(recorded)
        if found is None:
            found = capture_loop(
                functools.partial(self._step, *state),
                state,
                recorded,
                Emitted(emitted, self._options.max_steps),
                until,
                most_steps=self._options.max_steps,
                unroll=self._options.unroll,
            )
            self._captures += 1
        self._loops[entry] = found
        if isinstance(found, Reason):
            self._refuse(found.at(place_of_function(self.__wrapped__)))
            return None
        self._against = None
        return found

    def _recorded(self, state: Sequence[torch.Tensor]) -> tuple[_core.Entry, Recorded]:
        """Capture the step; return its graph."""
        self._step.capture(*state, progress=False)
        pair = self._step._captured_for(state)
        if pair is None:
            raise CaptureError(
                f"{self._step.__qualname__} changes what it reads: its graph fits no later call"
            )
        return pair

    def _refuse(self, reason: Reason) -> None:
        """Let the host make the steps, as long as there is no other graph of the step."""
        if reason != self._against:
            reason.warn("The host makes each step of the loop", CgraphWarning)
        self._against = reason

    def _tensors(self, given: Any, state: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors that are given by themselves, or by the names of parameters."""
        if given is None:
            return []
        found, names = [], self._names[: len(state)]
        for one in given if isinstance(given, tuple | list) else [given]:
            if isinstance(one, torch.Tensor):
                found.append(one)
            elif one in names:
                found.append(state[names.index(one)])
            else:
                raise ArgumentError(
                    f"{one!r:.40} is no tensor, and none of the step's parameters that have one:"
                    f" {', '.join(names)}"
                )
        return found


def _names_of(step: Callable[..., Any]) -> list[str]:
    """Return the names of a step's parameters; those of ``*state`` have numbers."""
    try:
        parameters = [*inspect.signature(step).parameters.values()]
    except (TypeError, ValueError):  # some functions of C have none
        return [f"args[{place}]" for place in range(_MOST_STATE)]
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = [one.name for one in parameters if one.kind in kinds]
    rest = [one.name for one in parameters if one.kind == one.VAR_POSITIONAL]
    return [*names, *(f"{one}[{place}]" for one in rest for place in range(_MOST_STATE))]
