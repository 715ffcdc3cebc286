"""The facts that a call has shown: its operators, its reads of Python, reasons against capture."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

import torch

from cgraph import _torch
from cgraph._graphed.call import Call
from cgraph._graphed.guards import Guards
from cgraph._graphed.options import Options
from cgraph._graphed.reasons import refused_in_words
from cgraph._graphed.restore import Restore
from cgraph._operators.observer import Observer, Refusal
from cgraph._operators.trace import Difference, Trace
from cgraph._python.places import NOTHING, Places, found_at, names_in
from cgraph._torch import tree_iter

__all__ = ["Observation", "guards_of", "reads_gradients"]


@dataclass
class Observation:
    """The facts that a call has shown.

    Attributes:
        trace: Its operators.
        codes: The code that ran, with the globals of each.
        guards: The guards on what it reads of Python, as at its end.
        refusals: The operators that a capture refuses.
        seeds: The line that seeds random numbers; None if there is none.
        has_breaks: True if there was an eager break.
        needs_grad: True if its result has a backward pass to come.
        is_backward: True if a backward pass ran inside.
        generators: The generators that it drew from besides the default ones.
        written: The names of the copied arguments that it wrote.
        written_in_place: The names of arguments that it wrote and that are read where they lie.
        writes: The ends of each piece of memory from outside that it wrote, in order.
        takes: The ends of all memory from outside that it worked on, in order.
        made: A place where it left a tensor that it made; None if there is none.
        refused: The reason why no graph can change its arguments or return its result as it did.
        restore: Restores guarded places if calls of many sizes share the guards.
        is_of_size: True if the call had the rows of its key, so that a capture can be compared.
    """

    trace: Trace
    codes: dict[CodeType, dict[str, Any]]
    guards: Guards
    refusals: Sequence[Refusal]
    seeds: str | None
    has_breaks: bool
    needs_grad: bool
    is_backward: bool
    generators: Sequence[torch.Generator]
    written: frozenset[str]
    written_in_place: frozenset[str]
    writes: Sequence[tuple[int, int]] = ()
    takes: Sequence[tuple[int, int]] = ()
    made: str | None = None
    refused: str | None = None
    is_of_size: bool = True
    restore: Restore | None = None

    @classmethod
    def of(
        cls,
        observer: Observer,
        function: Callable[..., Any],
        call: Call,
        inputs: Sequence[torch.Tensor],
        result: Any,
        options: Options,
        *,
        has_breaks: bool,
        before: Observation | None = None,
        gradients: Mapping[int, torch.Tensor | None] | None = None,
    ) -> Observation:
        """Build the observation of a call that has just ended.

        Args:
            observer: The observer of the call.
            function: The function that was called.
            call: The arguments.
            inputs: The tensors that the function got in place of those that are copied.
            result: The result.
            options: The function's options.
            has_breaks: True if there was an eager break.
            before: The observation of the previous call.
            gradients: The gradients of leaves when the call began, if they matter.
        """
        codes = dict(observer.codes.globals)
        if before is not None:
            codes |= before.codes
        tensors = (one for one in tree_iter(result) if isinstance(one, torch.Tensor))
        if before is not None and not gradients and before.covers(observer, call):
            guards = before.guards
        else:
            if gradients is None and (observer.is_backward or not reads_gradients(codes)):
                # Only a capture knows which gradients a backward pass inside begins with.
                gradients = {}
            outside = observer.trace.outside
            guards = guards_of(function, call, codes, taken_by(outside), options, gradients)
        memories = ((one.name, _torch.memory_of(one.value)) for one in call.statics)
        statics = {one.data_ptr(): f"argument {name}" for name, one in memories if one is not None}
        observer.trace.inputs = call.names
        observer.trace.name_outside({**statics, **guards.addresses})
        pairs = [*zip(call.names, inputs, strict=True)]
        written = {name for name, one in pairs if observer.has_written(one)}
        shared = ((name, guards.name_beside(one)) for name, one in pairs if observer.shares(one))
        beside = next((pair for pair in shared if pair[1] is not None), None)
        return cls(
            observer.trace,
            codes,
            guards,
            tuple(observer.refusals),
            observer.codes.seeds,
            has_breaks,
            any(
                one.grad_fn is not None and (call.mode.grad or observer.made(one))
                for one in tensors
            ),
            observer.is_backward,
            tuple(observer.generators),
            frozenset(written),
            frozenset(one.name for one in call.statics if observer.writes(one.value)),
            observer.writes_outside(),
            observer.taken_outside(),
            next((name for name, one in guards.named_tensors if observer.made(one)), None),
            beside and f"{beside[0]} shares memory with {beside[1]}, and one of them is written",
        )

    def now(self, function: Callable[..., Any], call: Call, options: Options) -> Observation | None:
        """Return this observation with guards for the present values.

        Return None if other tensors require gradients: another call has to be observed then.
        """
        names = self.guards.taken_names

        def is_taken(_: torch.Tensor, name: str) -> bool:
            return name in names

        guards = guards_of(function, call, self.codes, is_taken, options, {})
        return replace(self, guards=guards) if guards.requiring == self.guards.requiring else None

    def covers(self, observer: Observer, call: Call) -> bool:
        """Return whether another call ran known code, took the same tensors and changed nothing."""
        if not self.codes.keys() >= observer.codes.globals.keys():
            return False
        if not self.guards.fit(call.objects):
            return False
        memories = (one.storage for one in observer.trace.outside.values())
        taken = (one.data_ptr() for one in memories if one is not None)
        return all(one in self.guards.taken or one not in self.guards.addresses for one in taken)

    def difference(
        self, before: Observation, observer: Observer, call: Call, options: Options
    ) -> Difference | None:
        """Find how a capture differs from the previous call; None if it may be replayed.

        Args:
            before: The observation of that call.
            observer: The observer of the capture.
            call: The call that was captured.
            options: The function's options.
        """
        for change in before.guards.changes(call.objects):
            if not change.is_gradient and not options.ignores(change.name):
                return Difference(f"the function changes {change.name}: it {change.verb}", None)
        for holder, step, name in before.guards.unread:
            now = found_at(holder, step)
            if now is not NOTHING and isinstance(now, torch.Tensor) and observer.made(now):
                if not options.ignores(name):
                    return Difference(f"the function leaves a new tensor in {name}", None)
        return self.trace.difference(before.trace)

    @property
    def uses_gradients(self) -> bool:
        """True if it may change or read the gradients of leaves."""
        return self.is_backward or reads_gradients(self.codes)

    @property
    def reason_against(self) -> tuple[str, str | None, str | None] | None:
        """The reason against a capture, its line, and its kind; None if there is none."""
        if self.refused is not None:
            return self.refused, None, self.refused
        if self.seeds is not None:
            return "it seeds random numbers or sets their state", self.seeds, "seed"
        if self.needs_grad and self.made is not None:
            return f"the function leaves a new tensor in {self.made}", None, "the function leaves"
        if self.needs_grad and self.written:
            text = f"{min(self.written)} is written while gradients are recorded"
            return text, None, "is written while"
        # If gradients are recorded, the rest of a call cannot go on eagerly.
        if self.refusals and self.needs_grad:
            refusal = self.refusals[0]
            return refused_in_words(refusal), refusal.line, refusal.kind
        return None


def taken_by(outside: Container[int]) -> Callable[[torch.Tensor, str], bool]:
    """Return a predicate: True if the tensor's storage is among those that operators took."""

    def is_taken(tensor: torch.Tensor, _: str) -> bool:
        memory = _torch.memory_of(tensor)
        return memory is not None and _torch.storage_id(memory) in outside

    return is_taken


def reads_gradients(codes: Iterable[CodeType]) -> bool:
    """Return whether code that ran names ``.grad``."""
    return "grad" in names_in(codes)


def guards_of(
    function: Callable[..., Any],
    call: Call,
    codes: dict[CodeType, dict[str, Any]],
    is_taken: Callable[[torch.Tensor, str], bool],
    options: Options,
    gradients: Mapping[int, torch.Tensor | None] | None,
) -> Guards:
    """Build guards on what a call reads of Python, with the present values.

    Args:
        function: The function that was called.
        call: The arguments.
        codes: The code that ran.
        is_taken: Tells whether an operator took a tensor, given the name of its place.
        options: The function's options.
        gradients: The gradients at the beginning, of the leaves that matter; None for the present
            gradients of all leaves.
    """
    names = names_in(codes) | options.guarded_names
    walk = Places(names, codes, is_taken, gradients, options.unguarded)
    return Guards(walk.walk(function, call.named_objects, call.named_modules))
