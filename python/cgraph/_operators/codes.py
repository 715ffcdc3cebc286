"""``Codes``: the code that begins to run on a thread; guards look at the names in it."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import torch

from cgraph import _torch
from cgraph._operators.launches import Launch, is_launcher, launch_of
from cgraph._operators.monitoring import monitored, report_again
from cgraph._operators.operator_mode import run_operator
from cgraph._python.names import names_in
from cgraph._reason import Reason
from cgraph._source import is_omitted, user_frame, user_line
from cgraph.causes import Cause
from cgraph.errors import CaptureError

__all__ = ["Codes", "HostCalls"]

_OWN = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
# Methods of generators that move their state.
_SETS = frozenset({"manual_seed", "seed", "set_state", "set_offset", "graphsafe_set_state"})
_OF_MODES = tuple(os.path.join(_OWN, one, "") for one in ("_captures", "_operators"))
_BESIDE = frozenset({"<frozen importlib._bootstrap>", warnings.__file__})
# Code that runs around the function and wherever objects die; it reads nothing that can change.
_AROUND = frozenset({contextlib.__file__, weakref.__file__, torch.autograd.grad_mode.__file__})
_TEXT = torch.Tensor.__repr__.__code__
_READS = frozenset({"tolist", "numpy", "__array__"})
_NAMES = _SETS | _READS


class Codes:
    """The code objects that began to run on a thread, and the globals of each.

    Attributes:
        globals: The globals of each code object, except those that torch's compiler wrote.
        is_paused: True while nothing is noted.
        is_off: True while nothing is even reported.
        is_blind: True if nothing could be noted, as a C profiler is active.
        has_compiled: True if code ran that torch has compiled.
        seeds: The line that seeds a generator or sets its state; None if there is none.
        launches: Called with each kernel that Triton is about to launch.
        steps: Called with the name of each optimizer that torch lets no capture have.
        reads: Called with each method that reads a tensor of the host without an operator; on the
            simulator such a tensor stands for one of the device.
    """

    def __init__(self) -> None:
        self.globals: dict[CodeType, dict[str, Any]] = {}
        # By ``id``: hashing a code object takes longer than a call.
        self._seen: dict[int, CodeType] = {}
        self.is_paused = False
        self.is_off = False
        self.is_blind = False
        self.has_compiled = False
        self.seeds: str | None = None
        self.reads: Callable[[str], None] | None = None
        self.launches: Callable[[Launch], None] | None = None
        self.steps: Callable[[str], None] | None = None

    def note(self, frame: FrameType, event: str, called: object) -> None:
        """Note the code of a frame that begins; this is the function for ``sys.setprofile``."""
        if self.is_paused:
            return
        if event == "c_call":
            self._note_call(called, getattr(called, "__self__", None))
        elif event == "call":
            self._note_text(frame.f_code)
            self._note_step(frame.f_code, frame)
            if id(frame.f_code) not in self._seen:
                self._note_code(frame.f_code, frame)
            self._note_launch(frame.f_code, frame)

    def _begins(self, code: CodeType) -> bool:
        """Note code that begins; return whether once is enough."""
        if self.is_off or code.co_filename.startswith(_OWN):
            return True
        if self.is_paused:
            return False
        frame = sys._getframe(2)
        is_launcher = self._note_launch(code, frame)
        is_other = self._note_text(code) or self._note_step(code, frame)
        is_seen = id(code) in self._seen or self._note_code(code, frame)
        return is_seen and not is_launcher and not is_other

    def _note_code(self, code: CodeType, frame: FrameType) -> bool:
        if _is_beside(frame):
            return False
        self._seen[id(code)] = code
        if code.co_filename not in _AROUND and not code.co_filename.startswith(_OWN):
            if _torch.is_compiled_code(code.co_filename, frame.f_globals):
                self.has_compiled = True
            else:
                self.globals[code] = frame.f_globals
        return True

    def _note_text(self, code: CodeType) -> bool:
        """Note that a tensor is about to be shown as text, which reads it; return whether it is."""
        if code is not _TEXT:
            return False
        if self.reads is not None:
            with self.aside():
                self.reads("Tensor.__repr__")
        return True

    def _note_step(self, code: CodeType, frame: FrameType) -> bool:
        """Note an optimizer that is about to refuse captures; return whether it may do so."""
        if self.steps is None or code is not _torch.code_of_capture_check():
            return False
        optimizer = frame.f_locals["self"]
        if not all(group.get("capturable", False) for group in optimizer.param_groups):
            with self.aside():
                self.steps(type(optimizer).__qualname__)
        return True

    def _note_launch(self, code: CodeType, frame: FrameType) -> bool:
        """Note a kernel that is about to be launched; return whether the code may launch some."""
        if self.launches is None or not is_launcher(code):
            return False
        if (launch := launch_of(frame)) is not None:
            with self.aside():
                self.launches(launch)
        return True

    def _note_call(self, called: Any, of: object) -> None:
        """Note a call of an object's method that is written in C."""
        if self.is_paused:
            return
        name = getattr(called, "__name__", None)
        if name in _SETS and type(of) is torch.Generator:
            self.seeds = self.seeds or user_line() or "a seed"
        elif name in _READS and isinstance(of, torch.Tensor) and self.reads is not None:
            self.reads(f"Tensor.{name}")

    def _calls(self, called: Any, first: Any) -> None:
        of = getattr(called, "__self__", None)
        self._note_call(called, first if of is None else of)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Note nothing in a ``with`` block, for cgraph's own work."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    @contextmanager
    def off(self) -> Iterator[None]:
        """Get no reports in a ``with`` block, which runs much code that does not count."""
        profile, self.is_off = sys.getprofile(), True
        if profile == self.note:
            sys.setprofile(None)
        try:
            with self.aside():
                yield
        finally:
            self.is_off = False
            if profile == self.note:
                sys.setprofile(profile)
            report_again()

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note the calls in a ``with`` block, beside a profiler of the user's."""
        # Where reads count, the block is the user's own, whose code has begun before.
        names, running = (_SETS, []) if self.reads is None else (_NAMES, _running_codes())
        with monitored(self._begins, self._calls, names, running) as is_told:
            if is_told:
                yield
                return
        before: Any = sys.getprofile()
        if before is not None and not callable(before):
            # A C profiler, which Python cannot restore.
            self.is_blind = True
            yield
            return
        note = self.note if before is None else functools.partial(_both, self.note, before)
        sys.setprofile(note)
        try:
            yield
        finally:
            sys.setprofile(before)


def _running_codes() -> list[CodeType]:
    """Return the code of the user's frame that opens a block, and of those around it."""
    frame, found = user_frame(), []
    while frame is not None:
        if not is_omitted(frame.f_code.co_filename) and frame.f_code.co_filename not in _AROUND:
            found.append(frame.f_code)
        frame = frame.f_back
    # The first may call such a method by any name, those around it by its own, if at all.
    return found[:1] + [code for code in found[1:] if not _NAMES.isdisjoint(names_in((code,)))]


def _is_beside(frame: FrameType | None) -> bool:
    """Return whether a frame is part of an import, a warning or a mode, not of the function."""
    while frame is not None:
        if frame.f_code is run_operator.__code__:
            return False
        file = frame.f_code.co_filename
        if file in _BESIDE or file.startswith(_OF_MODES):
            return True
        frame = frame.f_back
    return False


def _both(one: Callable[..., Any], other: Callable[..., Any], *event: Any) -> None:
    one(*event)
    other(*event)


class HostCalls(Codes):
    """The calls of one capture that set random states; one that reads a tensor raises."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = _refuse

    @property
    def refusal(self) -> CaptureError | None:
        """The error of a capture that has set a random state; None if it has set none."""
        if self.seeds is None:
            return None
        return Reason(Cause.SEED, f"the function {Cause.SEED.what}", self.seeds).error()


def _refuse(method: str) -> None:
    raise CaptureError(
        f"{method} at {user_line()} reads a value from the device while the stream captures: keep"
        " it on the device, or read it after the replay"
    )
