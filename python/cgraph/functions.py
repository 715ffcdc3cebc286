"""``graphed``: a function whose calls are replays, a graph for each shape.

>>> import torch, cgraph
>>> with cgraph.sim.use():
...     @cgraph.graphed
...     def double(x):
...         return x * 2
...     print(*[double(torch.full((3,), float(n))) for n in range(3)], double.report().replays)
tensor([0., 0., 0.]) tensor([2., 2., 2.]) tensor([4., 4., 4.]) 2
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, TypeVar, overload

import torch

from cgraph import _core, _driver, _torch
from cgraph._captures.busy import is_busy
from cgraph._graphed.arguments import Arguments
from cgraph._graphed.cache import Keys
from cgraph._graphed.method import Binding
from cgraph._graphed.miss import Answers, Replay
from cgraph._graphed.options import Guarded, Options, Pad, SideEffects
from cgraph._graphed.recorded import Recorded
from cgraph._graphed.static_memory import lock_of
from cgraph._padding.sizes import PaddedSizes
from cgraph._source import place_of_function
from cgraph._text import plural
from cgraph.breaks import order_hint, require_work_in_call
from cgraph.errors import ArgumentError, CaptureError, StateError
from cgraph.reports import FunctionReport, Report

if TYPE_CHECKING:
    from typing import Concatenate

    from typing_extensions import Self, Unpack

    from cgraph._graphed.options import GraphedOptions

__all__ = ["GraphedFunction", "graphed", "report"]

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
S = TypeVar("S")

_living: weakref.WeakSet[GraphedFunction[..., Any]] = weakref.WeakSet()
_lock = threading.Lock()


@overload
def graphed(fn: Callable[P, R], **options: Unpack[GraphedOptions]) -> GraphedFunction[P, R]: ...
@overload
def graphed(
    fn: None = None, **options: Unpack[GraphedOptions]
) -> Callable[[Callable[P, R]], GraphedFunction[P, R]]: ...
def graphed(
    fn: Callable[..., Any] | None = None,
    *,
    sizes: Sequence[int] | None = None,
    pad: Pad = "repeat",
    dim: int | Mapping[str, int] = 0,
    check_padding: bool = True,
    outputs: Literal["fresh", "static"] = "fresh",
    static_args: Sequence[str] | str = (),
    guards: Guarded | None = None,
    side_effects: SideEffects = "refuse",
    warmup: int = 1,
    max_graphs: int | None = None,
    pool: _driver.Pool | None = None,
    on_fail: Literal["eager", "raise"] = "eager",
    debug: str | None = None,
    check_every: int | None = None,
) -> Any:
    """Make a function, method or module replay graphs, one for each key of its calls.

    The first call of a key runs eagerly and is observed. The second is captured and its graph does
    its work; from then on Python does not run: calls are replays. A key is the structure of
    arguments; dtype, shape, strides, device and ``requires_grad`` of tensors; plain arguments;
    torch's modes; and the plain values under names in code that ran, which are compared before each
    replay. A call that a graph cannot hold runs eagerly, with a warning that names the line and the
    fix; :func:`cgraph.eager_break` marks such work. ``docs/graphed.md`` has the whole contract with
    an example of each part, also of training.

    Args:
        fn: The function. Without it, a decorator is returned.
        sizes: Numbers of rows to capture for. A call of fewer rows is padded to the next size, and
            its results are cut; one of more rows runs eagerly, and so does one whose padding shows.
        pad: Contents of padding rows: ``"repeat"`` (the last row), ``"zero"``, a number, or a
            function of a tensor and a size that returns it padded; or one for each argument's name.
        dim: The dimension of the rows, or one for each name of an argument that has rows.
        check_padding: Compare the first padded call of each size with an eager one, written state
            included; Python runs for that.
        outputs: ``"fresh"``: results are the caller's own. ``"static"``: they lie in the graph's
            memory, and the next call of a function that shares the pool overwrites them.
        static_args: Names of arguments whose tensors stay where they are: their addresses belong to
            the key. Parameters are static anyway.
        guards: Dotted names that count in addition to those in the code, as ``["self.cfg.scale"]``;
            names with False that do not count, as ``{"self.step": False}``; or a function of the
            arguments whose plain result belongs to the key.
        side_effects: ``"ignore"``, or dotted names: these changes in Python need not happen in
            replays. By default replays assign, and a function with other changes runs eagerly.
        warmup: Number of eager calls of a key before the capture; 11 with DDP.
        max_graphs: Number of keys that may have a graph; the least recently used one goes first. By
            default 64, or the number of ``sizes`` if that is larger.
        pool: The pool of all graphs without gradients, by default a new one. Functions of one pool
            share its memory: their calls wait for each other.
        on_fail: ``"raise"``: raise instead of letting a key run eagerly.
        debug: Actions of calls to find a mistake, by default the words of ``CGRAPH_DEBUG``: one or
            more of ``"sync"`` (wait after each operator), ``"compare"`` (with an eager call; a
            difference is a :class:`~cgraph.errors.CompareError` that names the operator)
            and ``"poison"`` (fill unused memory of the pool with NaN), joined by commas.
        check_every: Compare one replay in so many with an eager call; by default ``CGRAPH_CHECK``.

    Returns:
        The callable to use instead. :meth:`GraphedFunction.capture`, ``freeze`` and ``report`` are
        its methods; other attributes are those of ``fn``.

    Raises:
        ArgumentError: An option is not what was expected.

    A value that the code names is part of the key:

    >>> import torch, cgraph
    >>> factor = 2
    >>> with cgraph.sim.use():
    ...     @cgraph.graphed
    ...     def scale(x):
    ...         return x * factor
    ...     before = [scale(torch.ones(1)).item() for _ in range(3)]
    ...     factor = 5
    ...     print(before, [scale(torch.ones(1)).item() for _ in range(3)])
    [2.0, 2.0, 2.0] [5.0, 5.0, 5.0]
    """
    options = Options.of({name: value for name, value in locals().items() if name != "fn"})
    if fn is None:
        return functools.partial(GraphedFunction, options=options)
    return GraphedFunction(fn, options)


def report() -> Report:
    """Report on the calls of all graphed functions of the process."""
    with _lock:
        living = list(_living)
    reports = [function.report() for function in living]
    return Report(tuple(sorted(reports, key=lambda one: (one.name, one.where or ""))))


class GraphedFunction(Binding, Generic[P, R_co]):
    """A function whose calls are replays; made by :func:`cgraph.graphed`.

    It has the parameters and the result of its function, also for type checkers.
    """

    if TYPE_CHECKING:
        __wrapped__: Callable[P, R_co]

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
            """Replay a graph, or call the function."""

        @overload
        def __get__(self, instance: None, owner: type | None = None) -> Self: ...
        @overload
        def __get__(
            self: GraphedFunction[Concatenate[S, Q], R], instance: S, owner: type | None = None
        ) -> GraphedFunction[Q, R]: ...
        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            """Return the method of an object."""

    def __new__(cls, fn: Callable[..., Any], options: Options) -> Self:
        """Make a native dispatcher with torch's modes."""
        return super().__new__(
            cls,
            _is_capturing,
            _torch.is_intercepted,
            _torch.forward_ad,
            torch.is_grad_enabled,
            torch.is_inference_mode_enabled,
            _torch.is_any_autocast_enabled,
            _torch.autocast_state,
            _torch.mode_addresses(),
            _torch.interception_keys(),
            _torch.torch_settings(),
        )

    def __init__(self, fn: Callable[..., Any], options: Options) -> None:
        if not callable(fn):
            raise ArgumentError(
                f"fn is {fn!r:.80}, expected a function, a method or a module"
                f"{order_hint(fn, 'graphed')}"
            )
        if isinstance(fn, GraphedFunction):
            raise ArgumentError(
                f"{fn!r} is graphed already: call it as it is, or graph fn.__wrapped__"
            )
        if isinstance(fn, type):
            raise ArgumentError(
                f"fn is the class {fn.__qualname__}, expected a function, a method or a module:"
                " decorate its forward, or graph one of its objects"
            )
        require_work_in_call(fn)
        _torch.keep_from_tracing()
        self._fn = fn
        self._options = options
        signed = fn.forward if isinstance(fn, torch.nn.Module) else fn
        arguments = Arguments(signed, options.static_args)
        for name, given in (("dim", options.dim), ("pad", options.pad)):
            if isinstance(given, Mapping):
                arguments.require_names(name, given)
        self._attribute = self._kept_as = self._name
        self._lock = lock_of(options.pool)
        # A function that is dropped frees its memory at once, not at the next garbage collection.
        own: Any = weakref.proxy(self)
        self._keys = Keys(options, own)
        debug: Callable[..., None] | None = None
        if options.debug or options.check_every:
            # Only users who debug pay for the import.
            from cgraph._debug import debug_key

            debug = debug_key.debug
        self._answers = Answers(
            fn, self._name, arguments, options, self._keys, own, self._lock, PaddedSizes, debug
        )
        self._is_frozen = False
        self.__wrapped__ = fn
        for name in functools.WRAPPER_ASSIGNMENTS:
            if hasattr(fn, name):
                setattr(self, name, getattr(fn, name))
        with _lock:
            _living.add(self)

    def capture(
        self,
        *args: Any,
        sizes: Sequence[int] | None = None,
        progress: bool = True,
        **kwargs: Any,
    ) -> Self:
        """Capture ahead of time, the largest size first.

        The function is called eagerly once and captured once for each size; tensors and random
        states that it wrote are put back.

        *args: The arguments of one call, from which those of the other sizes are made: its rows are
            cut, or repeated.

        Returns:
            The function itself.

        Raises:
            CaptureError: A call leaves new tensors, or changes a guarded value after the first
                call: create that state first, by calling the function once.
            Exception: Raised by the function or its capture, whatever ``on_fail`` says.
        """
        from cgraph._padding.ladder import capture_ladder

        if _is_capturing():
            raise CaptureError(
                f"{self._name} was to be captured inside another capture, or a call that prepares"
                " one, and captures cannot be nested: capture it first"
            )
        if self._is_intercepted:
            raise CaptureError(
                f"{self._name} was to be captured inside a transform of torch.func, forward-mode"
                " differentiation, a mode or a tracer, where calls run eagerly: capture it first"
            )
        with self._lock:
            if self._lock.is_replaying:
                raise CaptureError(
                    f"{self._name} was to be captured inside a break or a hook of its own replay,"
                    " which still reads the memory of its graphs: capture it first"
                )
            if self._is_frozen:
                raise StateError(
                    f"{self._name} was frozen and cannot be captured: call reset() first"
                )
            call = self._answers.taken(args, kwargs)
            with call.on_device():
                capture_ladder(self._answers, call, sizes, progress)
        return self

    def freeze(self) -> Self:
        """Forbid captures from now on: a call that would need one raises, and names its key.

        :meth:`reset` allows them again.
        """
        self._is_frozen = True
        return self

    @property
    def is_frozen(self) -> bool:
        """True if captures are forbidden."""
        return self._is_frozen

    def report(self) -> FunctionReport:
        """Report on the calls of each key."""
        keys = tuple(key.report() for key in self._keys.reported)
        totals = self._keys.totals()
        pool_bytes = self._answers.captures.memory.pool_bytes()
        return FunctionReport(self._name, place_of_function(self._fn), keys, pool_bytes, totals)

    def reset(self) -> None:
        """Drop all graphs. Calls capture anew, also after :meth:`freeze`."""
        with self._lock:
            if self._lock.is_replaying or any(key.is_running for key in self._keys):
                raise StateError(
                    f"{self._name} was to be reset inside a break or a hook of its own call: call"
                    " reset() after the call"
                )
            try:
                self._answers.clear()
            finally:
                self._is_frozen = False

    def _captured_for(self, args: Sequence[Any]) -> tuple[_core.Entry, Recorded] | None:
        """Return the entry that a call with these arguments would replay now, and its graph."""
        with self._lock:
            call = self._answers.taken(tuple(args), {})
            with call.on_device():
                return self._answers.captured_for(call)

    def _miss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve a call that fits no native entry."""
        if self._is_called_on(args):
            return self.__get__(args[0])(*args[1:], **kwargs)
        if _is_capturing() or self._is_intercepted or _torch.is_traced_by_fx():
            # Inside a capture or its warm-up, its work becomes part of that capture. A transform of
            # torch.func, forward-mode differentiation, modes and tracers must see the operators.
            return self._fn(*args, **kwargs)
        with self._lock:
            if self._lock.is_replaying:
                # A break or a hook inside a replay of this function: another replay would overwrite
                # memory still read.
                return self._fn(*args, **kwargs)
            call = self._answers.taken(args, kwargs)
            with call.on_device():
                answer = self._answers.answer(call, self._is_frozen)
                if isinstance(answer, Replay):
                    taken = answer.call
                    return answer.entry.call(args, kwargs, taken.tensors, taken.objects)
        return answer()

    def __repr__(self) -> str:
        captured = self.report().captured
        return f"<graphed {self._name}: {plural(captured, 'graph')}>"


def _is_capturing() -> bool:
    return is_busy() or _driver.current().is_capturing()
