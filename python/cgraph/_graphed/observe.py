"""The observed call: it runs eagerly, for real, while its operators and reads are noted."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils import checkpoint

from cgraph import _driver
from cgraph._autograd.history import leaves_behind
from cgraph._breaks.flows import unreached
from cgraph._graphed.call import Call
from cgraph._graphed.leaf_gradients import detached
from cgraph._graphed.observation import Observation, Reads
from cgraph._graphed.reasons import Containers, reason_against_devices, reason_against_result
from cgraph._graphed.record import observer_of
from cgraph._operators.observer import ObservedBreaks
from cgraph._python.assignments import Assignments, assignable_in
from cgraph._python.guards import Guards
from cgraph._python.names import names_in
from cgraph._reason import Reason
from cgraph._torch import tree_iter
from cgraph.breaks import breakable
from cgraph.causes import Cause

__all__ = ["observe"]


def observe(
    reads: Reads, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Observation]:
    """Call a function, and note what it does.

    Returns:
        The result, without a history that is spent, and the observation.
    """
    device_type = _driver.current().device_type
    observer = observer_of(device_type, call.tensors, call.tensors, lines=False)
    begin = state = None
    names = names_in(reads.codes)
    if reads.codes and "grad" not in names and "backward" not in names:
        begin = reads.walk(call, dict(reads.codes), {})
        given = call.objects, (args, kwargs), call.places
        state = Assignments(Guards(begin, compares=False), names, *given)
    breaks = ObservedBreaks(observer, aside=nullcontext if state is None else state.aside)
    containers = Containers((args, kwargs))
    assignable = {id(one) for *_, one in assignable_in((args, kwargs), call.places)}
    with observer.watching(), observer.noting(), breakable(breaks):
        result = reads.function(*args, **kwargs)
    if observer.is_backward and torch.is_grad_enabled():
        result = detached(result)
    shown = Observation.of(
        observer,
        reads,
        call,
        call.tensors,
        result,
        has_breaks=breaks.are_met,
        begin=begin,
        assigned=None if state is None else state.changed(),
    )
    if (changed := containers.changed(() if shown.needs_grad else assignable)) is not None:
        text = f"the function changes an argument: {changed}"
        shown.refused = Reason(Cause.CHANGED_ARGUMENT, text)
    elif observer.codes.is_blind:
        text = "a profiler is active, which hides the code that runs"
        shown.refused = Reason(Cause.PROFILER, text)
    elif observer.has_nested:
        text = "more than its elements: the function works on a nested tensor"
        shown.refused = Reason(Cause.WRAPPED_TENSOR, text)
    elif breaks.written is not None:
        text = f"the break {breaks.written} has returned its argument, which later code writes"
        shown.refused = Reason(Cause.BREAK_ALIAS, f"{text} in place")
    elif observer.draws and any(one.co_filename == checkpoint.__file__ for one in shown.codes):
        # Its recomputation sets the states of generators.
        text = "checkpoint recomputes random numbers, and replays would draw others"
        shown.refused = Reason(Cause.CHECKPOINT, text)
    elif call.mode.grad and reads.options.warmup < _OF_DDP and _has_ddp(shown):
        text = "DistributedDataParallel puts its buckets together in its first calls"
        shown.refused = Reason(Cause.DDP_WARMUP, text)
    elif (several := reason_against_devices(observer.devices, device_type)) is not None:
        shown.refused = several
    elif shown.refused is None:
        named = shown.guards.name_beside
        is_new = functools.partial(observer.is_new, name_of_place=named)
        shown.refused = reason_against_result(result, device_type, is_new)
    if shown.refused is None and shown.needs_grad:
        outputs = [one for one in tree_iter(result) if isinstance(one, torch.Tensor)]
        known = [one.value for one in call.statics]
        known += [one for module in shown.guards.modules for one in module.parameters()]
        numbers = {id(one) for one in (*call.tensors, *known)}
        for leaf in leaves_behind(outputs, call.tensors):
            if id(leaf) not in numbers:
                shown.refused = unreached("the result", leaf)
                break
    return result, shown


# The eager calls that torch asks for before a capture.
_OF_DDP = 11


def _has_ddp(shown: Observation) -> bool:
    return any(
        isinstance(one, torch.nn.parallel.DistributedDataParallel) for one in shown.guards.modules
    )
