"""``make_graphed_callables``: forward and backward of a callable as graphs, inside autograd.

Source: https://docs.pytorch.org/docs/stable/generated/torch.cuda.make_graphed_callables.html
"""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from cgraph import _driver, _torch
from cgraph._callables.conditions import Conditions
from cgraph._callables.graphed import Graphed
from cgraph._callables.passes import (
    Captures,
    DividedCaptures,
    name_of,
    parameters_of,
    pass_inputs,
    warm_up,
    without_hooks,
)
from cgraph._callables.sample import Sample
from cgraph._driver import Pool
from cgraph._reason import Reason
from cgraph.causes import Cause
from cgraph.errors import ArgumentError, CallableError, CgraphWarning, StateError
from cgraph.graphs import graph_pool_handle

__all__ = ["callables_on", "make_graphed_callables"]


def make_graphed_callables(
    callables: Any,
    sample_args: tuple[Any, ...],
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    pool: Pool | None = None,
    capture_error_mode: str = "global",
    enable_annotations: bool = False,
    *,
    sample_kwargs: Any = None,
    preserve_state: bool = False,
    clone_outputs: bool = False,
) -> Any:
    """Make graphed versions of functions or modules, for training and inference.

    The forward pass of each is one graph and one autograd node, whose backward pass is another
    graph. A call copies its arguments into the tensors of the sample and replays.

    Args:
        callables: A function or ``nn.Module``, or a tuple of them in the order in which they will
            be called. A module gets a new ``forward``, which is graphed as long as the module is in
            the mode (training or not) that it has now. Its parameters and buffers must stay the
            same tensors.
        sample_args: The positional arguments of the callable, or a tuple of such tuples. Tensors
            may be nested in containers that pytree knows. They are the static inputs from now on:
            do not use them for something else. ``requires_grad`` must be as in later calls. Other
            values are constants: a call with another value is refused.
        num_warmup_iters: Number of runs of each callable before its capture; more than 10 for a
            module
            under ``DistributedDataParallel``, which needs 11.
        allow_unused_input: Give None as gradient of an input that no output depends on, instead of
            failing.
        pool: As for :class:`cgraph.graph`.
        capture_error_mode: As for :class:`cgraph.graph`.
        enable_annotations: As for :class:`cgraph.graph`.
        sample_kwargs: The keyword arguments of the callable, or a tuple with those of each.
        preserve_state: Put random state and the modules' buffers back after the warm-up, which
            otherwise leaves its traces in them as any call does.
        clone_outputs: Return copies. Otherwise the next call overwrites a result. A gradient that
            is still referenced then gets memory of its own, but views of it do not.

    Returns:
        The graphed callable, or a tuple of them. A module itself is returned.

    Raises:
        CallableError: A callable or its sample cannot be graphed; the text says why.
        StateError: Autocast is on with its cache.

    Hooks of a module itself may be registered afterwards, and then run at each call. Hooks of its
    submodules are part of the capture: their work on the device is replayed, their Python runs only
    now. A call whose tensors have other shapes than the sample raises ``ArgumentError``; those of
    other types, devices or strides are copied as by ``copy_``. Backward works once for each call,
    before the next one; a second derivative is refused. Several callables of one pool are called in
    the order of the tuple, and their backward passes run in reverse order; a backward pass whose
    saved tensors another replay has overwritten is refused. Gradients accumulate as in eager, and
    are computed without autocast, as torch requires. Writes of a callable to its arguments do not
    reach the caller's. A deep copy of a graphed module is not graphed.
    """
    return callables_on(
        _driver.current().new_stream(),
        callables,
        sample_args,
        num_warmup_iters,
        allow_unused_input,
        pool,
        capture_error_mode,
        enable_annotations,
        sample_kwargs=sample_kwargs,
        preserve_state=preserve_state,
        clone_outputs=clone_outputs,
    )


def callables_on(
    stream: Any,
    callables: Any,
    sample_args: tuple[Any, ...],
    num_warmup_iters: int,
    allow_unused_input: bool,
    pool: Pool | None,
    capture_error_mode: str,
    enable_annotations: bool = False,
    *,
    sample_kwargs: Any,
    preserve_state: bool,
    clone_outputs: bool,
    clone_gradients: bool | None = None,
    is_divided: bool = False,
    is_public: bool = True,
) -> Any:
    """Make graphed callables as :func:`make_graphed_callables`, with captures on a given stream.

    Later captures on the stream use its memory again. ``is_divided`` lets breaks divide the
    captures. ``is_public`` warns of hooks of submodules and compares :class:`Conditions` with each
    call; otherwise the caller does. ``clone_gradients`` does for gradients what ``clone_outputs``
    does for results, and has its value by default.
    """
    clone_gradients = clone_outputs if clone_gradients is None else clone_gradients
    driver = _driver.current()
    if torch.is_autocast_enabled(driver.device_type) and torch.is_autocast_cache_enabled():
        raise StateError(
            "make_graphed_callables does not support the autocast caching. Please set"
            " `cache_enabled=False`."
        )
    functions, samples, single = _normalised(callables, sample_args, sample_kwargs)
    for function, sample in zip(functions, samples, strict=True):
        _check(function, sample, driver.device_type)
        if is_public:
            _tell_of_hooks(function)
        sample.separate(parameters_of(function))
    if not isinstance(num_warmup_iters, int) or num_warmup_iters < 0:
        raise ArgumentError(f"num_warmup_iters is {num_warmup_iters!r}, expected a number >= 0")
    everything = [t for f, s in zip(functions, samples, strict=True) for t in pass_inputs(f, s)]
    with (
        _preserved(functions, driver) if preserve_state else nullcontext(),
        _parts_put_back(functions) if is_public else nullcontext(),
        without_hooks(everything),
    ):
        # For work on other streams, and for the copies of what is to be preserved.
        driver.synchronize()
        with driver.stream(stream):
            for function, sample in zip(functions, samples, strict=True):
                warm_up(function, sample, num_warmup_iters, allow_unused_input)
        driver.synchronize()
        pool = graph_pool_handle() if pool is None else pool
        if is_divided:
            capture: Captures = DividedCaptures(pool, stream, capture_error_mode)
        else:
            capture = Captures(pool, stream, capture_error_mode, enable_annotations)
        conditions = [
            Conditions(name_of(function), function, driver.device_type) if is_public else None
            for function in functions
        ]
        # In the order of the calls, so that they can share memory.
        passes = [
            capture.forward(function, sample)
            for function, sample in zip(functions, samples, strict=True)
        ]
        for one in reversed(passes):
            capture.backward(one, allow_unused_input)
        for function, its in zip(functions, conditions, strict=True):
            if its is not None:
                its.require_unchanged(function)
    graphed = [
        _installed(function, Graphed(one, clone_outputs, clone_gradients), its)
        for function, one, its in zip(functions, passes, conditions, strict=True)
    ]
    return graphed[0] if single else tuple(graphed)


def graphed_of(module: torch.nn.Module) -> Graphed:
    """Return the replayed function of a graphed module's forward."""
    forward: Any = module.forward
    found: Graphed = forward._graphed
    return found


def _normalised(
    callables: Any, sample_args: Any, sample_kwargs: Any
) -> tuple[tuple[Any, ...], list[Sample], bool]:
    """Return callables and samples as equally long sequences, and whether there was only one."""
    single = not isinstance(callables, tuple)
    if isinstance(callables, list):
        raise CallableError(
            f"callables is a list of {len(callables)}, expected a callable or a tuple of callables"
        )
    functions = (callables,) if single else callables
    all_args = (sample_args,) if single else sample_args
    all_kwargs = (sample_kwargs,) if single else sample_kwargs
    if all_kwargs is None:
        all_kwargs = (None,) * len(functions)
    for name, given in (("sample_args", all_args), ("sample_kwargs", all_kwargs)):
        if not isinstance(given, tuple) or len(given) != len(functions):
            raise CallableError(
                f"{name} is {_brief(given)}, expected a tuple with those of each of the"
                f" {len(functions)} callables"
            )
    samples = []
    for function, args, kwargs in zip(functions, all_args, all_kwargs, strict=True):
        if not callable(function):
            raise CallableError(f"{_brief(function)} is not callable")
        if not isinstance(args, tuple):
            raise CallableError(
                f"the sample_args of {name_of(function)} are {_brief(args)}, expected a tuple"
            )
        if not isinstance(kwargs, dict | None):
            raise CallableError(
                f"the sample_kwargs of {name_of(function)} are {_brief(kwargs)}, expected a dict"
            )
        samples.append(Sample(args, kwargs or {}))
    return functions, samples, single


def _tell_of_hooks(function: Any) -> None:
    """Warn of a module whose submodules have hooks."""
    modules = function.named_modules() if isinstance(function, torch.nn.Module) else ()
    hooked = [name for name, module in modules if name and _has_hooks(module)]
    if hooked:
        text = (
            f"submodules of {name_of(function)} have hooks ({', '.join(hooked)}): their work on"
            " the device becomes part of the graph, and their Python does not run in replays"
        )
        Reason(Cause.INNER_HOOKS, text).warn(kind=CgraphWarning)


def _check(function: Any, sample: Sample, device_type: str) -> None:
    """Raise if a callable cannot be graphed with a sample."""
    tensors = [(f"sample argument {path}", t) for path, t in sample.named_tensors()]
    if isinstance(function, torch.nn.Module):
        if _has_hooks(function):
            raise CallableError(
                f"{name_of(function)}: Modules must not have hooks registered at the time they are"
                " passed. However, registering hooks on modules after passing them through"
                " make_graphed_callables is allowed."
            )
        for name, buffer in function.named_buffers():
            if buffer.requires_grad:
                raise CallableError(
                    f"{name_of(function)}: only parameters may be trainable. All buffers must have"
                    f" requires_grad=False, and {name} has True"
                )
        tensors += [(f"parameter {name}", p) for name, p in function.named_parameters()]
        # A buffer on the host may hold a count that only the host reads.
        tensors += [
            (f"buffer {name}", buffer)
            for name, buffer in function.named_buffers()
            if buffer.device.type != "cpu" or device_type == "cpu"
        ]
    devices = {tensor.device for _, tensor in tensors if tensor.device.type == device_type}
    for name, tensor in tensors:
        if tensor.device.type != device_type or len(devices) > 1:
            others = " and ".join(sorted(map(str, devices))) or device_type
            raise CallableError(
                f"{name_of(function)}: {name} is on {tensor.device}, expected all tensors on one"
                f" {device_type} device, as the others on {others}"
            )


def _has_hooks(module: torch.nn.Module) -> bool:
    return any(map(_torch.hooks_of_users, _torch.hooks_of(module)))


def _installed(function: Any, graphed: Graphed, conditions: Conditions | None) -> Any:
    """Return the graphed function, or the module with a graphed forward."""
    if not isinstance(function, torch.nn.Module):

        @functools.wraps(function, updated=())
        def graphed_function(*args: Any, **kwargs: Any) -> Any:
            if graphed.loses_gradients(args, kwargs):
                return function(*args, **kwargs)
            if conditions is not None:
                conditions.require(None)
            return graphed(*args, **kwargs)

        return graphed_function
    function.forward = _Forward(function, graphed, conditions)
    return function


class _Forward:
    """The forward of a graphed module, which is graphed in the modes that it was captured in.

    It does not refer to the module: the cycle would keep the module and the graphs alive until the
    garbage collector finds it.
    """

    def __init__(
        self, module: torch.nn.Module, graphed: Graphed, conditions: Conditions | None
    ) -> None:
        forward: Any = module.forward
        self._module = weakref.ref(module)
        self._training = module.training
        self._graphed = graphed
        self._conditions = conditions
        self._is_method = isinstance(forward, types.MethodType) and forward.__self__ is module
        self._original = forward.__func__ if self._is_method else forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        if module is None:
            raise StateError(
                "the graphed module has been freed; its forward cannot be called on its own"
            )
        is_of_mode = module.training == self._training
        if is_of_mode and not self._graphed.loses_gradients(args, kwargs):
            if self._conditions is not None:
                self._conditions.require(module)
            return self._graphed(*args, **kwargs)
        if self._is_method:
            return self._original(module, *args, **kwargs)
        return self._original(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return the original forward of the copied module: the graphs know only this one."""
        if not self._is_method:
            return copy.deepcopy(self._original, memo)
        return types.MethodType(self._original, copy.deepcopy(self._module(), memo))


@contextmanager
def _preserved(functions: Sequence[Any], driver: _driver.Driver) -> Iterator[None]:
    """Restore random state and buffers after the ``with`` block."""
    buffers = [b for f in functions if isinstance(f, torch.nn.Module) for b in f.buffers()]
    before = [buffer.clone() for buffer in buffers]
    devices = [torch.cuda.current_device()] if driver.device_type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        try:
            # A failed warm-up may have left work on its stream.
            driver.synchronize()
        finally:
            # Autograd must not see a change of values: it may have saved one in an earlier call.
            for buffer, value in zip(buffers, before, strict=True):
                buffer.data.copy_(value)


@contextmanager
def _parts_put_back(functions: Sequence[Any]) -> Iterator[None]:
    """Put submodules, parameters and buffers back that a failing capture has replaced."""
    parts = [p for f in functions if isinstance(f, torch.nn.Module) for p in f.modules()]
    places: list[Any] = [one for p in parts for one in (p._modules, p._parameters, p._buffers)]
    before = [dict(one) for one in places]
    try:
        yield
    except BaseException:
        for place, entries in zip(places, before, strict=True):
            place.clear()
            place.update(entries)
        raise


def _brief(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"{type(value).__name__} {value!r:.80}"
