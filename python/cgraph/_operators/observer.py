"""``Observer``: notes the actions of a call while it runs eagerly or is captured.

It sees each operator: its arguments, the origin of its tensors, the memory that it writes, and
whether a capture would refuse it. It also sees each code object that begins to run: guards look at
the names in it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from cgraph import _core, _torch
from cgraph._operators.codes import Codes
from cgraph._operators.facts import Facts, facts_of, operator_reader
from cgraph._operators.launches import Launch, Suspects
from cgraph._operators.operator_mode import OperatorMode, Run, run_operator
from cgraph._operators.refused import cause_against
from cgraph._operators.schemas import name_of, tensors_in, tensors_of, written_by
from cgraph._operators.trace import Operator, OutsideMemory, Trace
from cgraph._reason import Reason, refused
from cgraph._source import is_branch, user_frame, user_line
from cgraph.breaks import Breakable, Work
from cgraph.causes import Cause

__all__ = ["ObservedBreaks", "Observer"]

_LITERAL = torch.ops.aten.lift_fresh.default


class ObservedBreaks:
    """The breaks of an observed call; their operators are not noted.

    Args:
        observer: Notes only that they ran.
        divided: The call that they divide; None if they just run.
        aside: Returns a block for each break, whose assignments are its own.

    Attributes:
        are_met: True if there was one.
    """

    are_met = False

    def __init__(
        self,
        observer: Observer,
        divided: Breakable | None = None,
        aside: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._observer = observer
        self._divided = divided
        self._aside = aside
        # Breaks' arguments that were returned: the break, the tensor, and its version at that time.
        self._passed: list[tuple[str, torch.Tensor, int]] = []

    @property
    def written(self) -> str | None:
        """The name of a break whose argument was returned and then written; None if none was."""
        changed = (name for name, one, version in self._passed if one._version != version)
        return next(changed, None)

    def run(self, work: Work, args: Any, kwargs: Any) -> Any:
        """Run a break."""
        self.are_met = True
        self._observer.suspect((args, kwargs))
        if self._divided is not None:
            # The work that begins and ends segments is not the function's.
            with self._observer.aside(), self._aside():
                result = self._divided.run(work, args, kwargs)
        else:
            with self._observer.aside(), self._aside():
                result = work.fn(*args, **kwargs)
            given = set(map(_torch.storage_id, _torch.memories_of(tensors_in((args, kwargs)))))
            for one in tensors_in(result):
                memory = None if one.is_inference() else _torch.memory_of(one)
                if memory is not None and _torch.storage_id(memory) in given:
                    self._passed.append((work.name, one, one._version))
        self._observer.note_break(work.name, result)
        return result


class Observer(OperatorMode):
    """A mode that notes the actions of one call.

    Args:
        device_type: The device type of the tensors that a capture works on.
        inputs: The tensors that the function gets in place of those that are copied.
        given: The tensors of the call in their places.
        are_dense: For each of them, true if the copy has its strides.
        lines: True to note the line of each operator, which takes time.

    Attributes:
        trace: The operators.
        codes: The code that Python ran.
        refusals: The operators that a capture refuses.
        generators: The generators that operators drew from, besides the default ones.
        draws: True if an operator draws random numbers.
        is_backward: True if an operator was part of a backward pass.
        stop: Called, if this is a capture, at the first operator that it refuses; it ends the
            capture, and the rest of the call runs eagerly.
        is_over: True if nothing is noted any more.
        by_recorder: True if a recorder calls :meth:`seen`, as the simulator's does in captures.
        is_capture: True if the call is captured.
        suspects: Inputs that kernels launched by hand may have written.
    """

    def __init__(
        self,
        device_type: str,
        inputs: Sequence[torch.Tensor],
        given: Sequence[torch.Tensor],
        are_dense: Sequence[bool],
        *,
        lines: bool,
    ) -> None:
        super().__init__()
        self.trace = Trace()
        self.codes = Codes()
        self.refusals: list[Reason] = []
        self.generators: list[torch.Generator] = []
        self.draws = False
        self.is_backward = False
        self.stop: Callable[[Reason], None] | None = None
        self.is_over = False
        self.by_recorder = False
        self.is_capture = False
        self._is_paused = True
        self._device_type = device_type
        self._lines = lines
        # A tensor may be given in several places, and each place has its own copy.
        firsts = {id(one): place for place, one in reversed([*enumerate(given)])}
        places = [firsts[id(one)] for one in given]
        self._inputs = {id(one): ("input", places[place]) for place, one in enumerate(inputs)}
        self._versions = {id(one): version_of(one) for one in inputs}
        self._origins: dict[int, tuple[Any, ...]] = {}
        for one in reversed(inputs):
            if (memory := _torch.memory_of(one)) is not None:
                self._origins[_torch.storage_id(memory)] = self._inputs[id(one)]
        # Storages that operators made, by number; the weak reference keeps the number taken.
        self._made: dict[int, _torch.WeakStorage] = {}
        begins = [
            _begin_of(one) if is_dense else None
            for one, is_dense in zip(inputs, are_dense, strict=True)
        ]
        self._reader = operator_reader(device_type)
        self._notes = _core.OperatorNotes(
            self._reader,
            self._inputs,
            self._origins,
            self._made,
            _torch.WeakStorage,
            begins,
        )
        self.suspects = Suspects(inputs, None)
        self.codes.launches = self._launched
        self.codes.steps = functools.partial(self._called, Cause.OPTIMIZER)
        self._of_breaks: list[torch.UntypedStorage] = []
        self._written: dict[int, list[tuple[int, int]]] = {}
        if device_type == "cpu":
            self.codes.reads = functools.partial(self._called, Cause.HOST_READ)
        # Autograd has a thread for each GPU.
        self._lock = threading.RLock()

    @property
    def devices(self) -> set[torch.device]:
        """The devices that operators work on, also the host."""
        return {*self._reader.devices}

    @property
    def has_nested(self) -> bool:
        """True if an operator works on a nested tensor."""
        return self._notes.has_nested

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Observe a ``with`` block."""
        _torch.enter_mode(self)
        try:
            yield
        finally:
            self.is_over = True
            _torch.leave_mode(self)
            # No reference cycle may keep arguments alive.
            self.codes.launches = self.codes.reads = self.codes.steps = None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Note nothing in a ``with`` block, as in a break; its results count as from outside."""
        before, self._is_paused = self._is_paused, True
        try:
            with self.codes.aside():
                yield
        finally:
            self._is_paused = before

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note operators and code in a ``with`` block, in which the function runs."""
        self._is_paused = False
        try:
            with self.codes.noted(), _torch.around_compilations(self._compiling):
                yield
        finally:
            self._is_paused = True
            # A backward pass of code that torch has compiled has no operators.
            self.is_backward |= torch.autograd.backward.__code__ in self.codes.globals

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        """Note nothing of a compilation, which runs code and operators of its own."""
        with self.aside(), self.codes.off():
            yield

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note an operator, unless a recorder reports those that are captured."""
        given = kwargs or {}
        if self.by_recorder and not self.is_over:
            return func(*args, **given)
        # Each __torch_dispatch__ of a class costs one more call of torch's.
        return self.seen(func, args, given, run_operator)

    def note_break(self, name: str, result: Any) -> None:
        """Note a break that has just run, and its results as an origin of later tensors."""
        if self.is_over or self._is_paused:
            return
        with self._lock:
            line = user_line() if self._lines else None
            self.trace.operators.append(Operator(f"the break {name}", (), (), line))
            place = len(self.trace.operators) - 1
            for order, tensor in enumerate(tensors_in(result)):
                if (memory := _torch.memory_of(tensor)) is not None:
                    number = _torch.storage_id(memory)
                    if number not in self._origins:
                        self._origins[number] = "operator", place, order
                        self._of_breaks.append(memory)

    def seen(self, func: Any, args: Any, kwargs: dict[str, Any], run: Run) -> Any:
        """Note an operator and run it; return its result."""
        if self.is_over or self._is_paused:
            return run(func, args, kwargs)
        facts = facts_of(func)
        if facts.decomposes and torch.is_inference_mode_enabled():
            # Inference mode leaves it whole; a capture takes its parts.
            with self:
                return func.decompose(*args, **kwargs)
        if func is _LITERAL and args[0].device.type == self._device_type:
            made = run(func, args, kwargs)
            self.literal(args[0], made)
            return made
        if not facts.touches_memory:
            return run(func, args, kwargs)
        # Inlined, as this runs for each operator.
        codes, is_paused = self.codes, self.codes.is_paused
        codes.is_paused = True
        try:
            if facts.may_be_refused and self._is_refused(func, args, kwargs):
                return func(*args, **kwargs)
            with self._lock:
                given = self._note(facts, args, kwargs)
            # A recorder's work is not code of the function's.
            codes.is_paused = is_paused or (self.is_capture and self._device_type == "cpu")
            result = run(func, args, kwargs)
            codes.is_paused = True
            with self._lock:
                self._notes.make(result, given, len(self.trace.operators) - 1)
        finally:
            codes.is_paused = is_paused
        return result

    def literal(self, value: torch.Tensor, result: torch.Tensor) -> None:
        """Note a tensor that Python spells out, as in ``torch.tensor(2.0)``."""
        if self.is_over or self._is_paused:
            return
        with self._lock, self.codes.aside(), _torch.without_modes():
            numbers = value.dtype, value.shape, value.numpy(force=True).tobytes()
            line = user_line() if self._lines else None
            self.trace.operators.append(Operator("literal", numbers, (), line))
            self._notes.make(result, (), len(self.trace.operators) - 1)

    def has_written(self, tensor: torch.Tensor) -> bool:
        """Return whether an input was written, also by compiled code, which runs no operator."""
        version, origin = self._versions.get(id(tensor)), self._inputs.get(id(tensor))
        if origin is not None and self.suspects.has_written(origin[1]):
            return True
        return self.writes(tensor) or (version is not None and version_of(tensor) != version)

    def shares(self, tensor: torch.Tensor) -> bool:
        """Return whether something in the storage of a tensor was written."""
        return bool(self.written_spans(tensor))

    def written_spans(self, tensor: torch.Tensor) -> list[tuple[int, int]]:
        """Return the ends of the spans that operators wrote in the memory of a tensor."""
        memory = _torch.memory_of(tensor)
        return [] if memory is None else self._written.get(_torch.storage_id(memory), [])

    def writes(self, tensor: torch.Tensor) -> bool:
        """Return whether an operator wrote between the ends of a tensor."""
        spans = self.written_spans(tensor)
        if not spans:
            return False
        begin, end = _torch.span_of(tensor)
        return any(one < end and begin < other for one, other in spans)

    def writes_outside(self) -> list[tuple[int, int]]:
        """Return the ends of the spans written in outside memory, in order, without overlaps."""
        outside = self.trace.outside
        return _joined(span for number in outside for span in self._written.get(number, ()))

    def taken_outside(self) -> list[tuple[int, int]]:
        """Return the ends of outside memory that operators took, in order, without overlaps."""
        memories = (one.storage for one in self.trace.outside.values())
        return _joined(
            (one.data_ptr(), one.data_ptr() + one.nbytes()) for one in memories if one is not None
        )

    def made(self, tensor: torch.Tensor) -> bool:
        """Return whether an operator of this call made the memory of a tensor."""
        memory = _torch.memory_of(tensor)
        return memory is not None and _torch.storage_id(memory) in self._made

    def is_new(
        self, tensor: torch.Tensor, name_of_place: Callable[[torch.Tensor], str | None]
    ) -> bool:
        """Return whether a tensor lies in memory that did not exist before the call.

        Code that torch has compiled makes tensors without an operator: memory existed before if an
        operator took it from outside, or if it lies at a place that has a name.
        """
        memory = _torch.memory_of(tensor)
        if memory is None:
            return False
        origin = self._origins.get(_torch.storage_id(memory))
        if origin is None or (origin[0] == "outside" and self.codes.has_compiled):
            return name_of_place(tensor) is None
        return bool(origin[0] == "operator")

    def left(self, but: Sequence[int]) -> list[tuple[int, int]]:
        """Return the storages that operators made and that are still alive.

        Args:
            but: The numbers of storages to leave out, as those of results.

        Returns:
            The number of each storage, and the place of the operator that made it.
        """
        alive = (one for one, weak in self._made.items() if weak.get() is not None)
        return [(one, self._origins[one][1]) for one in alive if one not in but]

    def suspect(self, given: Any) -> None:
        """Note inputs that are given to code that may write them without saying so."""
        if self.is_over or self._is_paused:
            return
        for memory in _torch.memories_of(tensors_in(given)):
            origin = self._origins.get(_torch.storage_id(memory))
            if origin is not None and origin[0] == "input":
                self.suspects.add(origin[1])

    def _launched(self, launch: Launch) -> None:
        """Note a kernel that is launched by hand.

        A kernel does not tell its writes: inputs are compared, and tensors from outside that are
        not parameters count as written.
        """
        if self.is_over or self._is_paused:
            return
        with self._lock:
            name, args, kwargs = launch
            self._note(Facts(None, name, True, False, False, False, False, True), args, kwargs)
            self.suspect((args, kwargs))
            for one in tensors_of((args, kwargs)):
                memory = _torch.memory_of(one)
                number = 0 if memory is None else _torch.storage_id(memory)
                if number in self.trace.outside and not isinstance(one, torch.nn.Parameter):
                    self._written.setdefault(number, []).append(_torch.span_of(one))
                    self.trace.outside[number].is_written = True

    def _called(self, cause: Cause, name: str) -> None:
        """Note a call of something that a capture refuses and that is no operator."""
        if not self.is_over and not self._is_paused:
            self._refuse(cause, name)

    def _is_refused(self, func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        """Note an operator that a capture refuses; return whether it ends this capture."""
        cause = cause_against(func, args, kwargs, self._device_type)
        return cause is not None and self._refuse(cause, name_of(func))

    def _refuse(self, cause: Cause, operator: str) -> bool:
        frame = user_frame()
        is_asked = frame is not None and is_branch(frame.f_code, frame.f_lasti)
        if cause is Cause.HOST_READ and is_asked:
            cause = Cause.BRANCH
        self.refusals.append(refused(cause, operator, user_line()))
        if self.stop is None:
            return False
        self.is_over = True
        self.stop(self.refusals[-1])
        return True

    def _note(self, facts: Facts, args: Any, kwargs: dict[str, Any]) -> list[int]:
        """Note an operator; return the numbers of the storages that it gets."""
        operators, outside = self.trace.operators, self.trace.outside
        numbers, origins, given, new = self._notes.take(args, kwargs, len(outside))
        for number, origin, one in new:
            self._note_outside(number, origin, one)
        line = user_line() if self._lines else None
        # A call of its class takes longer, and would be reported as code that begins.
        operators.append(tuple.__new__(Operator, (facts.name, numbers, origins, line)))
        if not self.is_backward:
            self.is_backward = _torch.backward_pass() != -1
        self.draws |= facts.draws
        if facts.takes_generator:
            generator = _torch.generator_among(args, kwargs)
            if generator is not None and not _is_known(generator, self.generators):
                self.generators.append(generator)
        if not facts.writes_nothing:
            for one in written_by(facts.func, args, kwargs):
                if (memory := _torch.memory_of(one)) is not None:
                    number = _torch.storage_id(memory)
                    self._written.setdefault(number, []).append(_torch.span_of(one))
                    if number in outside:
                        outside[number].is_written = True
        return given

    def _note_outside(self, number: int, origin: tuple[Any, ...], tensor: torch.Tensor) -> None:
        """Note memory from outside that the next operator is the first to get."""
        weak, place = _torch.WeakStorage(tensor), len(self.trace.operators)
        kept = None if self.codes.has_compiled else tensor.untyped_storage()
        noted = OutsideMemory(weak, kept, tensor.dtype, tuple(tensor.shape), place)
        self._origins[number], self.trace.outside[number] = origin, noted


def _joined(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    pieces: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if pieces and begin <= pieces[-1][1]:
            begin, end = pieces[-1][0], max(end, pieces.pop()[1])
        if begin < end:
            pieces.append((begin, end))
    return pieces


def version_of(tensor: torch.Tensor) -> int:
    """Return the number of writes to a tensor; always 0 for a tensor of inference mode."""
    return 0 if tensor.is_inference() else tensor._version


def _begin_of(tensor: torch.Tensor) -> int:
    """Return where a tensor begins in its storage, in elements; 0 without a storage."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_meta
    return int(tensor.storage_offset()) if is_plain else 0


def _is_known(generator: torch.Generator, others: Sequence[torch.Generator]) -> bool:
    known = (torch.default_generator, *torch.cuda.default_generators, *others)
    return any(_torch.is_same(generator, one) for one in known)
