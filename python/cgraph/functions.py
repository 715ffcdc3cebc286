"""``graphed``: a function whose calls are replays, a graph for each shape.

>>> import torch, cgraph
>>> with cgraph.sim.use():
...     @cgraph.graphed
...     def double(x):
...         return x * 2
...     print(double(torch.ones(3)), double(torch.ones(2)), double.report().captured)
tensor([2., 2., 2.]) tensor([2., 2.]) 2
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from cgraph import _core, _driver, _torch
from cgraph._captures.busy import is_busy
from cgraph._functions.binding import Binding
from cgraph._functions.capturing import Capturing
from cgraph._functions.ladder import capture_ladder
from cgraph._functions.serving import Request, Serving
from cgraph._recording.arguments import Arguments
from cgraph._recording.options import OnHeld, Options, Pad
from cgraph._source import place_of_function
from cgraph._text import plural
from cgraph.breaks import order_hint, require_work_in_call
from cgraph.errors import ArgumentError, CaptureError
from cgraph.reports import FunctionReport, Report

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["GraphedFunction", "graphed", "report"]

_living: weakref.WeakSet[GraphedFunction] = weakref.WeakSet()
_lock = threading.Lock()


def graphed(
    fn: Callable[..., Any] | None = None,
    *,
    sizes: Sequence[int] | None = None,
    pad: Pad = "zero",
    dim: int | Mapping[str, int] = 0,
    check_padding: bool = True,
    outputs: Literal["static", "clone"] = "static",
    on_held: OnHeld = "warn",
    static_argnums: Sequence[int] | int = (),
    static_argnames: Sequence[str] | str = (),
    max_graphs: int | None = None,
    max_bytes: int | None = None,
    keep_templates: bool = False,
    max_recording: int = 5,
    max_open: int = 4,
    warmup: int = 3,
    pool: _driver.Pool | None = None,
    on_fail: Literal["eager", "raise"] = "eager",
    preserve_state: bool = True,
    measure: bool = True,
    capture_error_mode: str = "thread_local",
    debug: str | None = None,
) -> Any:
    """Make a function, method or module replay graphs, one for each key of its calls.

    A key is what calls have in common that one graph can serve: how the arguments are put together;
    shape, dtype, strides and device of each tensor, and whether it requires a gradient; each value
    that is no tensor; the order of keywords for a function that sees it in ``**kwargs``; whether
    gradients are recorded, inference mode and autocast; whether its modules are training and, where
    gradients are recorded, which of their tensors require one; and the numbers and texts that its
    code names and reads in attributes, globals, closures, defaults, classes and containers of up to
    64 there (4096 in all; not constants of installed libraries, nor what only breaks read). The
    first call of a key warms up, captures and replays. Modules are found among what the function
    is, has, closes over, names or is given; their parameters and buffers are read where they lie,
    and so are tensors that the function closes over, names or has as a default, or that its object
    or its class, an object there or such a module has as an attribute; and likewise of what it may
    call: methods, the forward and the hooks of a module, functions of a module of Python. They may
    lie six steps away, in containers of up to 4096 items, 8192 in all. A call after one that the
    graph uses has moved or was laid out anew (of torch's own classes), or after a module or a
    function was exchanged or something put where None was, captures anew, and so does one after a
    module, a leaf of a backward pass inside or an optimizer got or lost a hook, or a setting of an
    optimizer was changed. What containers get later counts where code uses all of them, as a loop
    does, and does not fill them itself; values inside objects among the arguments that compare as
    objects do not. Modules behind objects are looked at as well; where a backward pass outside is
    to reach their parameters, calls run eagerly. If the result requires a gradient, backward passes
    are graphs too, as those of :func:`cgraph.make_graphed_callables`; all results come from one
    node of autograd then, so that hooks of one do not see what goes through another, and an
    argument that is returned is another tensor. Calls whose backward passes are still to come have
    a graph each (``max_open``), and run eagerly if they change gradients themselves, unless with
    ``warmup=0``. A training step with its backward pass and optimizer inside is one graph, and
    returns a loss without history (with torch 2.8 it is to detach it).

    The function is given copies of tensors: those with gaps, or that are expanded, have none there,
    and a result that is a view of an argument is one of the copy. A graphed module is no
    ``torch.nn.Module``: inside another one, graph its method, ``part.forward =
    cgraph.graphed(part.forward)``. After eight keys in a row that served one call each, others run
    eagerly until their third call: give ``sizes``, and :meth:`GraphedFunction.capture` them.

    Whatever else the function reads, as torch's default dtype, attributes of torch's own modules
    (but for what a dropout drops and the momentum of a norm), what code comes by without a name in
    it (but for names that it puts together, and for dataclasses and ``vars()``, which take objects
    apart), what objects compare, defaults and methods of classes that are assigned, what a tensor
    is that no operator gets, or a cache of ``functools`` that is cleared, is as it was at the
    capture, until :meth:`GraphedFunction.reset`: Python runs only then. ``debug="compare"`` shows
    whether something is. Tensors that it writes among its arguments are written for the caller as
    well (by kernels that torch does not see if warm-up calls show it, which are not put back
    elsewhere), and parameters have the gradients of a backward pass inside it, which the next call
    of the key overwrites, unless somebody keeps them and no call adds to them. A call with an
    argument that shares memory with a tensor which the function writes and finds elsewhere runs
    eagerly. A function that changes containers or sets among its arguments, or the shape of a
    tensor, or that gives a parameter other memory, or puts another tensor or module where it has
    read one, runs eagerly, and so does one that changes settings or counts of an optimizer, as a
    learning rate scheduler does, whether a module trains, or a number or text that its code names
    (also a tuple or a small array of NumPy's) in an attribute, a dictionary, a list, a closure, a
    global or a class, or draws from ``random``, ``numpy.random`` or a generator of theirs, or names
    an iterator and ``next``, or leaves a tensor in an attribute, a dictionary, a list or a deque,
    also by a hook, and the first call of one that only then changes a number, returns something
    else, or writes to tensors which it makes then and keeps; what else it adds to a list or a set
    itself, the order of a dictionary, and objects that it exchanges are not noticed. Such a call
    leaves of what it has set up what an eager one does. A dataclass with tensors is a container of
    what it has, unless in slots. Calls that get or return a function, or an object that pytree does
    not know, that leads to tensors run eagerly; one without any is returned as at the capture. A
    copied argument has no ``.grad``; attributes of its own make calls eager, unless they came
    later. What a warm-up call raises is raised. One that seeds is eager.

    Calls inside a transform of ``torch.func``, a mode of functions or of dispatch (but for a
    default device) or a tracer run eagerly: these have to see the operators. A second backward pass
    through one call (``retain_graph=True``) and second derivatives are refused. Backward passes are
    computed without autocast, as torch asks for, also where it is on around them. Of several
    decorators of a method this is the outermost one: below ``@property`` or ``@torch.no_grad()`` it
    would take the object for an argument.

    What ``torch.compile`` is to compile is captured as compiled kernels. Calls before the capture
    run it as it was written, which shows what it writes, and then compiled; it must do the same in
    both. On the simulator, with ``debug`` and with ``warmup=0`` it is captured as it was written,
    but for ``warmup=0, preserve_state=False``: then it has to be compiled before.

    A function that a break of its own calls runs eagerly there. One thread at a time captures or
    replays a function; others wait. So the function must not wait for a thread that calls it. Where
    several run backward passes at a time, give it ``outputs="clone"``. While a call with gradients
    captures, its modules have other parameters of the same memory, through which other threads must
    not run backward passes. Weights and results are not to be written between a call and its
    backward pass: eager raises then if it needs what was there, and a graph takes the new.

    Args:
        fn: The function. Without it, a decorator is returned.
        sizes: Numbers of rows to capture for. A call of fewer rows is padded to the next size, and
            its outputs are cut; one of more rows runs eagerly, and so does one whose padding shows.
        pad: What padding rows contain: ``"zero"``, ``"repeat"`` (the last row) or a function of a
            tensor and a size that returns the padded tensor.
        dim: The dimension of the rows, or one for each name of an argument that has rows.
        check_padding: Try out, once for each size, whether padding changes other rows or what the
            function writes. It takes a call and eleven replays, up to 100 where equal replays
            differ, eight calls more where random numbers are drawn, and a few times the memory of
            what is written. They put larger and smaller numbers than those of the call into the
            rows, equal and mixed ones; what shows for other contents alone may be missed, and of
            what is random whatever all paddings do to it alike. Padding may write to the rows
            behind those of the call in a tensor that is not copied, as a cache.
        outputs: ``"static"``: results lie in memory of the graph, and the next call overwrites
            them: always one of the same key (not before the backward pass), maybe one of a key
            that was captured before it in the same pool. Gradients that somebody still has then
            get memory of their own, but for views of them and what a hook took from a ``.grad``.
            ``"clone"``: results and gradients are copies, each of its own.
        on_held: What happens to a static result that is still referenced when a call is about to
            overwrite it: ``"warn"`` (once for each line), ``"clone"`` (it gets memory of its own),
            ``"raise"`` or ``"ignore"``. The variable that the result is assigned to may have it, as
            in any loop. What autograd has saved of one that is overwritten it refuses to use, as
            after a write in place. One that the call returns again gets memory of its own, unless
            with ``"ignore"``. ``"clone"`` warns of views, but not of exports, nor with gradients,
            and is not for calls that write through one. Of views of results with gradients you are
            told where they pile up.
        static_argnums: Places of positional arguments, without ``self``, whose tensors stay where
            they are, such as caches. They are not copied; a call with one elsewhere captures anew.
        static_argnames: Names of such arguments.
        max_graphs: How many keys have a graph; the one that was not used for longest goes first.
            By default 64, or as many as there are ``sizes``. Up to 256 others are remembered
            for the report.
        max_bytes: How many bytes of the device they hold together, with the memory that arguments
            are copied to, likewise. The graph of the call that is under way stays, however large.
        keep_templates: Keep the template of a graph that is one too many, and its memory in the
            pool: the next call of its key instantiates it, which takes less than a capture. Not
            for graphs with gradients or breaks. ``max_bytes`` counts templates, which go first.
        max_recording: How often a key is captured anew because one argument, parameter or setting
            of an optimizer is another one or lies elsewhere fewer than 64 replays after a capture.
            When that happens once more, its calls run eagerly.
        max_open: How many calls of a key may wait for their backward passes at a time, as those of
            a network that is called twice for one loss. Each has a graph of its own; further ones
            run eagerly, and so do those that would need a capture after :meth:`freeze`.
        warmup: Calls before the first capture; before later ones there is one. With gradients there
            are two at least, the first one without a backward pass. With 0 there is one
            if the function has a break, as captures with breaks run it: what that writes is put
            back, but with ``preserve_state=False``; and a library of CUDA's that the thread has not
            used yet, as cuBLAS, makes the first call run eagerly, and the next one capture. What
            the function puts into a dictionary then is taken for a table, which replays compute
            anew: it must be no state.
        pool: The pool of all graphs without gradients. By default a new one; those with gradients
            have their own. Of functions that share one, one thread at a time may call any, and no
            break of one another one.
        on_fail: What becomes of a key that cannot be captured. ``"eager"``: it runs eagerly, with a
            warning. ``"raise"``: the error comes out. Calls without elements or rows, of more rows
            than all sizes, of too many keys and of what moves too often run eagerly in both, and so
            do the first three calls of a key that set up, change or draw what replays would not,
            as a first call alone may do; the fourth one that does so is a failure.
        preserve_state: Put back what warm-up calls change: tensors, random states, gradients,
            optimisers. The capture itself computes nothing. Without it writes to arguments by
            ``.data``, arguments that share memory with what the function writes elsewhere, and
            state that the first call makes are not noticed, nor are gradients of a backward pass
            inside a call under ``torch.no_grad()``, generators of the user's own, numbers that the
            function changes or reads, and tensors that have moved and are no parameters or buffers.
        measure: Take the times of eager calls and replays at a capture, for the report: two warm-up
            calls at least, with hooks of replays, and no times where a replay would write what the
            warm-up has not, which could not be put back. Without it
            :meth:`capture` instantiates all sizes at once, which takes less time, if ``max_graphs``
            and ``max_bytes`` leave room for all.
        capture_error_mode: As for :class:`cgraph.graph`.
        debug: What calls do to find a mistake: one or more of these words, joined by commas. By
            default those of the environment variable ``CGRAPH_DEBUG`` as it is now. An empty text
            is none, and then calls cost nothing more.

            - ``"sync"``: replay in steps of one operator and wait for the device behind each. What
              fails is raised by the call, with a note that names operator, line and module. With
              gradients those are steps of the forward pass, before it is replayed as a whole; with
              ``compare`` or ``poison`` they come before the eager call, and are put back: breaks
              run once more.
            - ``"eager"``: call the function on the graph's own tensors and copy its result to where
              the graph's is, so that memory is as with a graph, and there is none.
            - ``"compare"``: call the function, put back the tensors and random states that it has
              written, replay, and compare all results and written tensors, up to rounding. What
              Python does besides is done twice. A difference is a
              :class:`~cgraph.errors.CompareError` that names the first operator that differs. With
              gradients the backward pass compares the gradients with eager's, and names the first
              that differs.
            - ``"poison"``: before each replay, set the memory of the pool that no tensor uses to
              NaN. NaN in a result that eager does not have is a ``CompareError``. What Python does
              in breaks is done twice. Not for
              functions that were captured with gradients; other graphs in the same pool must not
              be between forward and backward pass.

            A key takes longer to capture then. With ``compare`` and ``poison`` it keeps the memory
            of all intermediate results.

    Returns:
        What is called instead. :meth:`GraphedFunction.capture`, ``freeze`` and ``report`` are its
        methods; other attributes are those of ``fn``.

    Raises:
        ArgumentError: An option is not what was expected.

    A graph that is stale, found by comparison:

    >>> import torch, cgraph
    >>> factor = 2
    >>> def scale(x):
    ...     return x * factor
    >>> with cgraph.sim.use():
    ...     scaled = cgraph.graphed(scale, debug="compare")
    ...     print(scaled(torch.ones(3)))
    ...     factor = 5  # the graph still multiplies by 2
    ...     try:
    ...         scaled(torch.ones(3))
    ...     except cgraph.errors.CompareError as error:
    ...         print(error.output, error.operator.split(" at ")[0])
    tensor([2., 2., 2.])
    result aten.mul.Tensor (node 0)
    """
    given = {name: value for name, value in locals().items() if name != "fn"}
    options = Options.of(given)
    if fn is None:
        return functools.partial(GraphedFunction, options=options)
    return GraphedFunction(fn, options)


def report() -> Report:
    """What became of the calls of all graphed functions of the process."""
    with _lock:
        living = list(_living)
    reports = [function.report() for function in living]
    return Report(tuple(sorted(reports, key=lambda one: (one.name, one.where or ""))))


class GraphedFunction(Binding):
    """A function whose calls are replays; made by :func:`cgraph.graphed`."""

    def __new__(cls, fn: Callable[..., Any], options: Options) -> Self:
        """Make a native dispatcher with torch's modes."""
        return super().__new__(
            cls,
            _is_capturing,
            _torch.is_followed,
            _torch.forward_ad,
            torch.is_grad_enabled,
            torch.is_inference_mode_enabled,
            _torch.is_any_autocast_enabled,
            _torch.autocast_state,
            _torch.mode_addresses(),
            _torch.follower_keys(),
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
        arguments = Arguments(signed, options.static_argnums, options.static_argnames)
        if isinstance(options.dim, Mapping):
            arguments.require_names("dim", options.dim)
        self._attribute = self._kept_as = self._name
        self._turn = _core.Turn()
        self._capturing = Capturing(self, fn, arguments, options, self._turn)
        self._serving = Serving(self._capturing, arguments, options, self._turn)
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

        Args:
            *args: The arguments of one call, from which those of the other sizes are made: its rows
                are cut, or repeated.
            sizes: The numbers of rows. By default those of :func:`cgraph.graphed`, to which alone
                calls are padded; without any, only the key of these arguments is captured.
            progress: Show a bar.
            **kwargs: Its keyword arguments.

        Returns:
            The function itself.

        Raises:
            Exception: What the function or its capture raised first, whatever ``on_fail`` says. The
                sizes before it that could be are captured; with ``warmup=0, preserve_state=False``
                and without gradients also those behind one whose result no replay could return.
        """
        if _is_capturing():
            raise CaptureError(
                f"{self._name} was to be captured inside another capture, or a call that prepares"
                " one, and captures cannot be nested: capture it before"
            )
        if self._is_followed:
            raise CaptureError(
                f"{self._name} was to be captured inside a transform of torch.func, forward-mode"
                " differentiation, a mode or a tracer, where calls run eagerly: capture it before"
            )
        with self._turn:
            if self._turn.is_replaying:
                raise CaptureError(
                    f"{self._name} was to be captured inside one of its own breaks, whose replay"
                    " still reads the memory of its graphs: capture it before"
                )
            call = self._capturing.taken(args, kwargs)
            of_ladder = self._options, sizes, progress, self._name, self._is_frozen
            with call.on_device():
                capture_ladder(self._capturing, call, *of_ladder)
        return self

    def freeze(self) -> Self:
        """Forbid captures from now on: a call that would need one raises, and names its key.

        :meth:`capture` does so too. :meth:`reset` allows them again.
        """
        self._is_frozen = True
        return self

    @property
    def is_frozen(self) -> bool:
        """Whether captures are forbidden."""
        return self._is_frozen

    def report(self) -> FunctionReport:
        """What became of the calls, for each key."""
        keys = tuple(key.report() for key in list(self._capturing.keys.values()))
        return FunctionReport(self._name, place_of_function(self._fn), keys)

    def reset(self) -> None:
        """Let all graphs go. Calls capture anew, also after :meth:`freeze`."""
        with self._turn:
            self._capturing.require_idle()
            try:
                self._capturing.reset()
            finally:
                self._serving.clear()
                self._is_frozen = False

    def _miss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve a call that fits no native entry."""
        if self._is_called_on(args):
            return self.__get__(args[0])(*args[1:], **kwargs)
        if _is_capturing() or self._is_followed or _torch.is_traced_by_fx():
            # Inside a capture and its warm-up, its work becomes part of that one. A transform of
            # torch.func, forward-mode differentiation, modes and tracers have to see the operators.
            return self._fn(*args, **kwargs)
        with self._turn:
            if self._turn.is_replaying:
                # A break of a replay of its own: another one would overwrite what that still reads.
                return self._fn(*args, **kwargs)
            call = self._capturing.taken(args, kwargs)
            with call.on_device():
                request = Request.of(call, args, kwargs, self._is_frozen)
                answer = self._serving.serve(request)
                if isinstance(answer, _core.Entry):
                    return answer.call(args, kwargs, call.tensors)
        return answer()

    def __repr__(self) -> str:
        captured = sum(key.state == "captured" for key in self.report().keys)
        return f"<graphed {self._name}: {plural(captured, 'graph')}>"


def _is_capturing() -> bool:
    return is_busy() or _driver.current().is_capturing()
