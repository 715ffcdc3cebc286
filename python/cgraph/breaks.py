"""``eager_break``: work that runs eagerly in the middle of a captured function.

>>> import torch, cgraph
>>> @cgraph.eager_break
... def largest(x):
...     return x / x.max().item()  # a capture refuses item()
>>> with cgraph.sim.use():
...     x = torch.tensor([1.0, 4.0])
...     graph, y = cgraph.SegmentedGraph.capture(lambda: largest(x + 1) * 2)
...     _ = x.fill_(7)
...     graph.replay()
...     print(y, len(graph.segments), "segments")
tensor([2., 2.]) 2 segments
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec, Protocol, TypeVar, overload

import torch

from cgraph import _driver, _torch
from cgraph._autograd.materialized import materialized
from cgraph.errors import ArgumentError, CaptureError, NoDriverError

__all__ = [
    "Breakable",
    "GradientBreakError",
    "Work",
    "breakable",
    "eager_break",
    "in_backward_pass",
    "innermost",
    "on_one_thread",
    "require_work_in_call",
]

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Work:
    """A break: a function to call, and how.

    Attributes:
        fn: The function to call.
        name: Its name in errors.
        materialize_grads: See :func:`eager_break`.
        is_pause: True if it has no operators of its own, and may come inside a torch operator.
        is_backward: True if it is part of a backward pass, through which no other pass comes.
        stand_in: Called instead by a capture whose segments do not run; None if that is impossible.
    """

    fn: Callable[..., Any]
    name: str
    materialize_grads: bool = False
    is_pause: bool = False
    is_backward: bool = False
    stand_in: Callable[..., Any] | None = None


class Breakable(Protocol):
    """A capture that breaks may divide."""

    def run(self, work: Work, args: Any, kwargs: Any) -> Any:
        """End the present segment, call the function, and begin the next segment."""


@overload
def eager_break(
    fn: Callable[P, R], *, name: str | None = None, materialize_grads: bool = False
) -> Callable[P, R]: ...
@overload
def eager_break(
    fn: None = None, *, name: str | None = None, materialize_grads: bool = False
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def eager_break(fn: Any = None, *, name: str | None = None, materialize_grads: bool = False) -> Any:
    """Make a function run eagerly where it is called inside a captured function.

    Use it for work that a capture refuses or would freeze: waits for the device, shapes that depend
    on data, values that Python computes. Outside a capture the function is just called. Apply it as
    the outermost decorator, or the work of the others is captured once.

    Inside :meth:`cgraph.SegmentedGraph.capture` each call ends a segment of the capture, and each
    replay calls the function again, with the arguments of the first call: tensors at the same
    addresses, with new values. Grad mode, inference mode and autocast are those of the first call.
    The results are bridged:

    - Tensors, also in containers that pytree knows, must keep shape, type and device. The first
      result is copied into memory that stays, and each later one into the same.
    - Everything else is a constant of the segments after the break, as is a tensor of another type
      of device: it must stay equal. Objects that hide tensors from pytree are refused.

    Later work takes the memory of the arguments: a break that keeps one clones it, and its work on
    other streams has been joined when it returns. As the result is copied, later writes to a tensor
    that it lies in, such as a buffer of a module, do not show in it. Tensors that a break only
    leaves somewhere, as in an attribute or in a list among its arguments, are not bridged: in each
    call, the list is the first call's. A break must not let a parameter or another tensor that
    segments read lie elsewhere, as ``.data = ...`` does: they read it at its old place. After a
    backward pass inside a graphed function, a break finds the gradients of that call in ``.grad``,
    and may write to them in place, as collectives and clipping do; it must clone the ones it keeps.
    Inside of another break it just runs. Variables of its caller are as the capture left them. In a
    graphed function nothing guards values that only the break reads, and its changes are not
    tracked.

    Gradients get back through a break, in the backward pass of a graphed function's result and in
    one inside the captured function: each call of the break has a history of its own, and its part
    of the backward pass runs eagerly between the segments of the others. Tensors that require
    gradients are given to it as arguments, as leaves of the same memory, or are parameters of
    modules that the function names. It must not write to the arguments in place, register hooks on
    them or keep tensors that have their history; a result must not require a gradient where that of
    the first call required none. There are no second derivatives, and no backward pass inside a
    function whose result requires a gradient as well.

    An exception of a break in a replay comes out of the call: code of the function that catches it,
    or that is to run finally, runs in the capture alone. Catch it inside the break.

    Arguments that a break has not used in a call get zeros. Parameters that it finds elsewhere and
    has not used get no gradient, as in eager. A backward pass inside the function cannot leave them
    out: an optimizer after it was captured with them or without. Let them get zeros there, see
    ``materialize_grads``. A backward pass inside the function may also call a break.

    Args:
        fn: The function, method or callable object. Without it, a decorator is returned.
        name: Its name in errors and in ``SegmentedGraph.breaks``. Default: its qualified name.
        materialize_grads: Give zeros to parameters that a call has not used, instead of no
            gradient, also outside a capture. This applies to the parameters of all modules that the
            function, its object or its arguments have: let it be a function of the module that has
            them, as each parameter costs a call some microseconds. An optimizer then does not skip
            them. Without it a function with a backward pass inside cannot be captured if its break
            uses parameters that are not arguments; a graphed one runs eagerly.

    Raises:
        ArgumentError: It cannot be called, or it is a generator or coroutine function, whose body
            does not run when it is called; or an option is not what was expected.
        CaptureError: Raised by a call in any other capture, and where a replay cannot keep the
            rules above.
    """
    if not isinstance(name, str | None):
        raise ArgumentError(f"name is {name!r:.80}, expected a text or None")
    if not isinstance(materialize_grads, bool):
        raise ArgumentError(
            f"materialize_grads is {materialize_grads!r:.80}, expected True or False"
        )
    if fn is None:
        return functools.partial(eager_break, name=name, materialize_grads=materialize_grads)
    if isinstance(fn, staticmethod):
        made = eager_break(fn.__func__, name=name, materialize_grads=materialize_grads)
        return staticmethod(made)
    if not callable(fn):
        raise ArgumentError(f"fn is {fn!r}, expected a callable{order_hint(fn, 'eager_break')}")
    require_work_in_call(fn)
    title = str(name or getattr(fn, "__qualname__", type(fn).__qualname__))
    work = Work(materialized(fn) if materialize_grads else fn, title, materialize_grads)

    @functools.wraps(fn, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        capture = innermost()
        if capture is not None:
            return capture.run(work, args, kwargs)
        if _is_capturing():
            # On a GPU backward passes have a thread of their own.
            if _torch.backward_pass() != -1:
                raise in_backward_pass(title)
            raise CaptureError(
                f"the break {title} was called inside a capture that cannot be divided: capture the"
                " function with cgraph.graphed or SegmentedGraph.capture instead"
            )
        return work.fn(*args, **kwargs)

    return call


class GradientBreakError(CaptureError):
    """A break in an undivided capture, which it may divide if the capture is made anew."""


def in_backward_pass(title: str) -> GradientBreakError:
    """Return the error of a break that a backward pass inside a capture has called."""
    return GradientBreakError(
        f"the break {title} was called in a backward pass, which this capture cannot divide: call"
        " it before or after the backward pass"
    )


def order_hint(fn: object, decorator: str) -> str:
    """Return advice for a decorator that got another decorator's result instead of a function."""
    kind = type(fn).__name__
    is_order = isinstance(fn, classmethod | property)
    return f": put @{kind} above @{decorator}" if is_order else ""


def require_work_in_call(fn: Callable[..., Any]) -> None:
    """Refuse generator and coroutine functions."""
    kinds = (
        inspect.isgeneratorfunction,
        inspect.iscoroutinefunction,
        inspect.isasyncgenfunction,
    )
    bodies = (fn, getattr(fn, "forward", None), inspect.getattr_static(type(fn), "__call__", None))
    if any(kind(body) for kind in kinds for body in bodies):
        raise ArgumentError(
            f"fn is {fn!r}, whose body runs after the call, expected a function that does its work"
            " when it is called"
        )


_local = threading.local()


@contextmanager
def breakable(capture: Breakable) -> Iterator[None]:
    """Let the breaks that this thread calls in the ``with`` block divide a capture."""
    before = innermost()
    _local.capture = capture
    try:
        yield
    finally:
        _local.capture = before


def on_one_thread() -> AbstractContextManager[Any]:
    """Return a context without threads of autograd, which could not divide a capture."""
    return torch.autograd.set_multithreading_enabled(False)


def innermost() -> Breakable | None:
    """Return the capture that the breaks of this thread divide; None if they just run."""
    capture: Breakable | None = getattr(_local, "capture", None)
    return capture


def _is_capturing() -> bool:
    try:
        return _driver.current().is_capturing()
    except NoDriverError:  # nothing can be captured then
        return False
