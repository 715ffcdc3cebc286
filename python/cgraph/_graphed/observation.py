"""The facts that a call has shown: its operators, its reads of Python, reasons against capture."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any

import torch

from cgraph import _torch
from cgraph._graphed.call import Call
from cgraph._graphed.options import Options, identifiers_in
from cgraph._graphed.reasons import ONE_SIZE
from cgraph._operators.observer import Observer
from cgraph._operators.trace import Trace
from cgraph._python.assignments import (
    Assigned,
    Assignments,
    is_alike,
    signature_of,
    unlike,
)
from cgraph._python.changing_lines import line_that_changes
from cgraph._python.guards import Change, Guards
from cgraph._python.named_objects import named_by
from cgraph._python.names import names_in, stored_in
from cgraph._python.places import Places
from cgraph._python.values import Form, tensors_behind
from cgraph._reason import Reason
from cgraph._text import nearest
from cgraph._torch import tree_iter
from cgraph.causes import Cause
from cgraph.errors import ArgumentError

__all__ = ["Observation", "Reads", "reads_gradients"]

Codes = dict[CodeType, dict[str, Any]]


@dataclass
class Reads:
    """The places that a function reads in Python, as far as its calls have shown.

    Attributes:
        function: The function.
        options: Its options.
        codes: The code that has run, with the globals of each.
        copied: The names of places whose tensors replays copy.
        moved: The names of places where the last call found another tensor than the one before.
    """

    function: Callable[..., Any]
    options: Options
    codes: Codes = field(default_factory=dict)
    copied: set[str] = field(default_factory=set)
    moved: frozenset[str] = frozenset()

    def require_names(self, call: Call) -> None:
        """Refuse dotted names in options that name nothing, once a call has shown what there is.

        Raises:
            ArgumentError: A name is that of no place.
        """
        given = [(option, name) for option, names in self.options.dotted.items() for name in names]
        if not given:
            return
        names = names_in(self.codes) | identifiers_in(name for _, name in given)
        walk = Places(names, self.codes, {})
        given_to = self.function, call.named_objects, call.named_modules
        # Hooks may run later.
        found = walk.walk(*given_to).found + named_by(*given_to, callees=True).found
        known = {one.name for one in found}
        for option, name in given:
            ends = tuple(f"{name}{end}" for end in ("", ".", "["))
            is_known = any(one == name or one.startswith(ends[1:]) for one in known)
            if not is_known and walk.stopped is None:
                near = nearest(name, known)
                hint = f", and the nearest one is {near!r}" if near else ""
                raise ArgumentError(
                    f"{option} has {name!r}, expected the name of something that the function"
                    f" reads or changes{hint}"
                )

    def is_left(self, name: str) -> bool:
        """Return whether replays do not assign to a place, as it is not guarded or is ignored."""
        return name in self.options.unguarded or self.options.ignores(name)

    def counted(
        self, changed: Sequence[Assigned], reals: Mapping[int, Any] | None = None
    ) -> list[Assigned]:
        """Return those of some changes that count.

        Those at places without guards and those to ignore do not, nor those that only put the same
        objects together anew.

        Args:
            changed: The changes.
            reals: The parameters by the ``id`` of their stand-ins.
        """
        counted = (one for one in changed if not self.is_left(one.target.name))
        return [one for one in counted if not is_alike(one.target.value, one.value, reals or {})]

    def changes(self, guards: Guards, objects: Sequence[Any]) -> list[Change]:
        """Return the changes of places, except those that replays need not make."""
        found = guards.changes(objects)
        return [one for one in found if not self.options.ignores(one.name)]

    def copy(self, assigned: Sequence[Assigned], outside: Container[int]) -> str | None:
        """Let replays copy tensors that a call has taken, and whose places it has assigned to.

        Returns:
            The name of the first of these places; None if there is none.
        """
        is_taken = taken_by(outside)
        names = [
            one.target.name
            for one in assigned
            if isinstance(one.target.value, torch.Tensor)
            and not isinstance(one.target.value, torch.nn.Parameter)
            and is_taken(one.target.value, one.target.name)
        ]
        self.copied.update(names)
        return names[0] if names else None

    def note_moves(self, changes: Sequence[Change], *, is_in_a_row: bool) -> None:
        """Let replays copy tensors that have moved in two calls in a row.

        Args:
            changes: What a call has found changed.
            is_in_a_row: True if the call before it found changes as well.
        """
        moved = frozenset(one.name for one in changes if one.is_move)
        if is_in_a_row:
            self.copied.update(moved & self.moved)
        self.moved = moved

    def walk(
        self, call: Call, codes: Codes, gradients: Mapping[int, torch.Tensor | None] | None
    ) -> Places:
        """Find the places that a call reads, with the present values.

        Args:
            call: The arguments.
            codes: The code that ran.
            gradients: The gradients at the beginning, of the leaves that matter; None for the
                present gradients of all leaves.
        """
        names = names_in(codes) | self.options.guarded_names
        walk = Places(names, codes, gradients, self.options.unguarded, self.copied)
        return walk.walk(self.function, call.named_objects, call.named_modules)


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
        assigned: What it assigned, by name, in a form to compare with other calls; None if that is
            not known.
        refused: The reason why no graph can change its arguments or return its result as it did.
        restore: Restores guarded places if calls of many sizes share the guards.
        is_of_size: True if the call had the rows of its key, so that a capture can be compared.
    """

    trace: Trace
    codes: dict[CodeType, dict[str, Any]]
    guards: Guards
    refusals: Sequence[Reason]
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
    assigned: Mapping[str, Any] | None = None
    refused: Reason | None = None
    is_of_size: bool = True
    restore: Assignments | None = None

    @classmethod
    def of(
        cls,
        observer: Observer,
        reads: Reads,
        call: Call,
        inputs: Sequence[torch.Tensor],
        result: Any,
        *,
        has_breaks: bool,
        before: Observation | None = None,
        begin: Places | None = None,
        assigned: Sequence[Assigned] | None = None,
        gradients: Mapping[int, torch.Tensor | None] | None = None,
    ) -> Observation:
        """Build the observation of a call that has just ended.

        Args:
            observer: The observer of the call.
            reads: What the function reads.
            call: The arguments.
            inputs: The tensors that the function got in place of those that are copied.
            result: The result.
            has_breaks: True if there was an eager break.
            before: The observation of the previous call.
            begin: The places of known code when the call began; None if none was known.
            assigned: What it assigned; None if that is not known.
            gradients: The gradients of leaves when the call began, if they matter.
        """
        codes = dict(observer.codes.globals)
        if before is not None:
            codes |= before.codes
        needs_grad = before is not None and before.needs_grad
        needs_grad |= any(
            isinstance(one, torch.Tensor)
            and one.grad_fn is not None
            and (call.mode.grad or observer.made(one))
            for one in tree_iter(result)
        )
        if before is not None and not gradients and before.covers(observer, call):
            guards = before.guards
        else:
            if begin is not None and not reads.codes.keys() >= codes.keys():
                begin = assigned = None
            if begin is None:
                if gradients is None and (observer.is_backward or not reads_gradients(codes)):
                    # Only a capture knows which gradients a backward pass inside begins with.
                    gradients = {}
                begin = reads.walk(call, codes, gradients)
            taken = taken_by(observer.trace.outside)
            guards = Guards(begin.settle(taken, copies=not needs_grad))
        reads.codes |= codes
        # A name that is only assigned to is not compared.
        stored = stored_in(codes)
        only = {one.target.way for one in assigned or () if one.target.key in stored}
        if stored and assigned is None:
            made = guards.made(observer.made, call.objects)
            only = {one.way for one in made if one.key in stored}
        guards = guards.without(only) if only else guards
        memories = ((one.name, _torch.memory_of(one.value)) for one in call.statics)
        statics = {one.data_ptr(): f"argument {name}" for name, one in memories if one is not None}
        observer.trace.inputs = call.origins
        found = guards.named_tensors
        for one in assigned or ():
            found += [(one.target.name, part) for part in tensors_behind(one.value)]
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
            needs_grad,
            observer.is_backward,
            tuple(observer.generators),
            frozenset(written),
            frozenset(one.name for one in call.statics if observer.writes(one.value)),
            observer.writes_outside(),
            observer.taken_outside(),
            next((name for name, one in found if observer.made(one)), None),
            None
            if assigned is None
            else {one.target.name: signature_of(one.value) for one in assigned},
            None if beside is None else _overlap(*beside),
        )

    def now(self, reads: Reads, call: Call) -> Observation | None:
        """Return this observation with guards for the present values.

        Return None if other tensors require gradients: another call has to be observed then.
        """
        names = self.guards.taken_names
        walk = reads.walk(call, self.codes, {})
        guards = Guards(walk.settle(lambda _, name: name in names, copies=not self.needs_grad))
        known, now = self.guards.requiring, guards.requiring
        is_same = all(now[name] == known[name] for name in now.keys() & known.keys())
        return replace(self, guards=guards) if is_same else None

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
        self,
        before: Observation,
        observer: Observer,
        changes: Sequence[Change],
        left: Sequence[Assigned],
        assigned: Sequence[Assigned] = (),
    ) -> Reason | None:
        """Find how a capture differs from the previous call; None if it may be replayed.

        Args:
            before: The observation of that call.
            observer: The observer of the capture.
            changes: The changes of what that call has read.
            left: What the capture has changed and no replay assigns.
            assigned: What replays assign.
        """
        for change in changes:
            if not change.is_gradient:
                return self._changes(change.name, change.verb, change.now)
        for target, value in left:
            if any(map(observer.made, tensors_behind(value))):
                text = f"the function leaves a new tensor in {target.name}"
                line = line_that_changes(target.name, self.codes)
                return Reason(Cause.NEW_STATE, text, line)
            return self._changes(target.name)
        if (other := unlike(assigned, before.assigned)) is not None:
            return self._changes(other.name, other.verb)
        return self.trace.difference(before.trace)

    def _changes(self, name: str, verb: str = "", value: Any = None) -> Reason:
        """Return the reason against a function that changes a place."""
        text = f"the function changes {name}" + (f": it {verb}" if verb else "")
        fix = ONE_SIZE if isinstance(value, Form) else None
        return Reason(Cause.PYTHON_STATE, text, line_that_changes(name, self.codes), fix)

    @property
    def uses_gradients(self) -> bool:
        """True if it may change or read the gradients of leaves."""
        return self.is_backward or reads_gradients(self.codes)

    @property
    def reason_against(self) -> Reason | None:
        """The reason against a capture; None if there is none."""
        if self.refused is not None:
            return self.refused
        if self.seeds is not None:
            return Reason(Cause.SEED, f"the function {Cause.SEED.what}", self.seeds)
        if self.needs_grad and self.made is not None:
            text = f"the function leaves a new tensor in {self.made}"
            return Reason(Cause.NEW_STATE, text, line_that_changes(self.made, self.codes))
        if self.needs_grad and self.written:
            text = f"{min(self.written)} is written while gradients are recorded"
            return Reason(Cause.WRITTEN_ARGUMENT, text)
        # If gradients are recorded, the rest of a call cannot go on eagerly.
        return self.refusals[0] if self.refusals and self.needs_grad else None


def _overlap(name: str, place: str | None) -> Reason:
    text = f"{name} shares memory with {place}, and one of them is written"
    return Reason(Cause.OVERLAP, text)


def taken_by(outside: Container[int]) -> Callable[[torch.Tensor, str], bool]:
    """Return a predicate: True if the tensor's storage is among those that operators took."""

    def is_taken(tensor: torch.Tensor, _: str) -> bool:
        memory = _torch.memory_of(tensor)
        return memory is not None and _torch.storage_id(memory) in outside

    return is_taken


def reads_gradients(codes: Iterable[CodeType]) -> bool:
    """Return whether code that ran names ``.grad``."""
    return "grad" in names_in(codes)
