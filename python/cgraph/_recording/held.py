"""What happens to results that a caller still has when they are about to be overwritten."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch

from cgraph import _torch
from cgraph._captures.busy import is_busy
from cgraph._captures.collector import collect_garbage
from cgraph._recording.assigned import arguments_of, assigned_after, unread_after
from cgraph._recording.options import OnHeld
from cgraph._source import is_omitted, levels_to_user, user_frame, user_line
from cgraph._text import short_place
from cgraph._torch import tree_iter
from cgraph.errors import StateError

__all__ = ["MANY", "Holding", "Memory", "references_of_one"]


MANY = 1 << 30
"""As many references as nobody looks for."""


class Memory(Protocol):
    """What results lie in."""

    @property
    def is_held(self) -> bool:
        """Whether somebody has a view of one."""


class Holding:
    """Warns, raises or makes copies for one function.

    Args:
        name: The function's.
        policy: What to do.

    Attributes:
        stride: In one of how many calls views of results are looked for; a power of two.
    """

    def __init__(self, name: str, policy: OnHeld) -> None:
        self._name = name
        self._policy = policy
        self.stride = 64 if policy == "warn" else 1
        self._warned: set[tuple[str | None, str | None]] = set()
        # The thread of the last call with gradients, and what is open as long as its backward pass
        # may run.
        self._last: tuple[int, weakref.WeakMethod[Callable[[], bool]]] | None = None
        self._tells_of_threads = True

    def called(self, is_open: weakref.WeakMethod[Callable[[], bool]]) -> None:
        """Note a call with gradients, and tell once of one while another thread's is open.

        Args:
            is_open: Tells whether the backward pass of this one may still run.
        """
        if not self._tells_of_threads:
            return
        thread, last = threading.get_ident(), self._last
        self._last = thread, is_open
        if last is None or last[0] == thread:
            return
        other = last[1]()
        if other is None or not other():
            return
        self._tells_of_threads = False
        warnings.warn(
            f"calls of {self._name} with gradients come from several threads at a time: until they"
            " are added up, gradients lie in memory that its graphs share, and a replay on another"
            ' thread may overwrite them. Graph the function with outputs="clone"',
            stacklevel=levels_to_user(),
        )

    def __call__(
        self,
        storages: Mapping[int, Memory] | None,
        place: int,
        lent: torch.Tensor | None,
        site: Any,
        count: int,
        is_own: bool = True,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        are_kept: bool = False,
        is_returned: bool = False,
    ) -> None:
        """Act on output ``place`` of the call at ``site``.

        Args:
            storages: What each output lies in; None if views are not looked for, or its graph is
                gone.
            place: The number of the output.
            lent: What was returned; None if only views of it are left.
            site: Code and instruction of the call that returned it.
            count: How many references the caller has, with those of the call that is under way.
            is_own: Whether the graph that returned it is the one that is about to be replayed.
            args: The positional arguments of that call, which are copied first.
            kwargs: Its keyword arguments.
            are_kept: Whether somebody else has the tuple of the positional ones.
            is_returned: Whether the call returns this one of its arguments, as a function does that
                shifts values: without ``storages`` it gets memory of its own, and with them it has.
        """
        if is_busy():
            # In a warm-up, whose values nobody sees.
            return
        if lent is not None and not is_returned:
            given = _Given(args, kwargs or {}, are_kept, sys._getframe(1))
            count -= given.references(lent)
            if count > 0:
                count -= _assigned_next(lent, given, count)
            if count <= 0:
                return
        if lent is not None and is_returned and storages is not None:
            views = _Left(storages[place])
            if not views.is_held:
                return
            lent, storages = None, {place: views}
        if lent is not None and (is_returned or self._policy == "clone"):
            # In the mode of the call that returned it, or it would change its kind.
            with torch.inference_mode(lent.is_inference()):
                # One reference for the other, so that only those of views are left to be counted.
                instead = lent.detach()
                # Not `set_`: autograd may have saved it, and take that for a change of values.
                lent.data = instead.clone()
            if storages is None or not storages[place].is_held:
                return
            lent = None
        does_overwrite = is_own and self._policy != "raise"
        if lent is not None and does_overwrite and not lent.is_inference():
            # Autograd may have saved it, and is to refuse that, as after a write in place.
            torch.autograd.graph.increment_version(lent)
        line, there = user_line(), _line(site)
        if self._policy != "raise" and (line, there) in self._warned:
            return
        if _is_let_go(storages, place, lent, count):
            return
        here = short_place(line)
        what = "output" if lent is not None else "memory of output"
        does = "overwrites" if is_own else "may overwrite"
        memory = "its memory" if is_own else "memory that they share"
        text = (
            f"{what} {place} of {self._name}, returned at {there or 'another line'}"
            f"{' or before' if lent is None else ''}, is still referenced, and the call at"
            f" {here or 'another line'} {does} it: results of a graph lie in {memory}. Clone what"
            ' you keep, or graph the function with outputs="clone"'
        )
        if self._policy == "raise":
            raise StateError(text)
        self._warned.add((line, there))
        warnings.warn(text, stacklevel=levels_to_user())


class _Left(NamedTuple):
    """What a result lay in that has got memory of its own."""

    storage: Any

    @property
    def is_held(self) -> bool:
        """Whether somebody has a view that was made before."""
        return bool(self.storage.is_held_still)


@functools.cache
def references_of_one() -> int:
    """How many references an object has that only a local variable holds, while it is asked."""
    one = object()
    return sys.getrefcount(one)


# How long another thread gets to let a result go, in seconds.
_PATIENCE = 0.2


def _is_let_go(
    storages: Mapping[int, Memory] | None,
    place: int,
    lent: torch.Tensor | None,
    count: int,
) -> bool:
    """Whether nobody has a result any more once other threads have run, or garbage is collected.

    What a backward pass raises on a thread of autograd's stays there for a moment, with the frames
    that it came through, although the caller has caught it. Circles of frames are left by what
    torch imports in a first call.

    Args:
        storages: What each output lies in, if views are looked for.
        place: The number of the output.
        lent: What was returned; None if only views of it are left.
        count: How many references are to go; more than there are if torch alone has it.
    """
    rest = sys.getrefcount(lent) - count

    def is_held() -> bool:
        # Behind it there may be views of it, which older torch does not count as references.
        is_lent_held = lent is not None and (
            sys.getrefcount(lent) > rest if rest >= 0 else _torch.is_used_in_torch(lent)
        )
        return is_lent_held or (storages is not None and storages[place].is_held)

    end = time.monotonic() + _PATIENCE
    while is_held() and time.monotonic() < end:
        time.sleep(0.001)
    if is_held():
        collect_garbage()
    return not is_held()


class _Given:
    """The arguments of a call that is under way.

    Args:
        args: The positional ones.
        kwargs: Those by name.
        are_kept: Whether somebody else has the tuple of the positional ones.
        inner: The frame that has called, maybe one of torch's.
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        are_kept: bool,
        inner: FrameType | None,
    ) -> None:
        self._arguments = (*args, *kwargs.values())
        # Torch's own, as those around the forward of a module, have tuples of their own.
        frames = []
        while inner is not None and is_omitted(inner.f_code.co_filename):
            if not inner.f_globals.get("__name__", "").startswith("cgraph."):
                frames.append(inner)
            inner = inner.f_back
        values = [value for frame in frames for value in frame.f_locals.values()]
        self._values = [*{id(one): one for one in values if isinstance(one, tuple | dict)}.values()]
        # The call's references to each argument: on the stack, where this Python does not lend to
        # it, and in a tuple. Only of a plain call all of that is known.
        if inner is not None and arguments_of(inner.f_code, inner.f_lasti) == len(self._arguments):
            self._each = references_of_one()
        else:
            self._each = int(not frames and not are_kept)

    def references(self, one: object) -> int:
        """How many references to something are the call's, which nobody reads again.

        So are those of containers that are there for the call alone.
        """
        count = self._direct(one)
        for argument in self._arguments:
            if isinstance(argument, list | tuple | dict) and argument is not one:
                # With that of the loop's variable, the one in `_arguments`, and the question's.
                alone = self._direct(argument) + 1 + references_of_one()
                if sys.getrefcount(argument) <= alone:
                    count += sum(leaf is one for leaf in tree_iter(argument))
        return count

    def times(self, one: object) -> int:
        """How often something is among the arguments."""
        return sum(argument is one for argument in self._arguments)

    def _direct(self, one: object) -> int:
        inside = [value.values() if isinstance(value, dict) else value for value in self._values]
        return self._each * self.times(one) + sum(item is one for items in inside for item in items)


def _assigned_next(lent: torch.Tensor, given: _Given, most: int) -> int:
    """How many references to a tensor are in what the result of this call is assigned to.

    As in any loop nobody can read these any more, nor what is in other local variables that are
    assigned before they are read, also of who has called the caller.

    Args:
        lent: The tensor.
        given: The arguments of the call.
        most: How many there may be.
    """
    count = 0
    frame, is_outer = user_frame(), False
    if _torch.is_used_in_torch(lent) and not _torch.references_of_torch(lent):
        # Older torch does not count that autograd has it too, which a variable would hide.
        return 0 if frame is None else _unreadable(frame, lent, given, frozenset(), False)
    while frame is not None and count < most:
        if not is_omitted(frame.f_code.co_filename):
            unread = unread_after(frame.f_code, frame.f_lasti)
            count += _unreadable(frame, lent, given, unread, is_outer)
            is_outer = True
        frame = frame.f_back
    return count


def _unreadable(
    frame: FrameType, lent: torch.Tensor, given: _Given, unread: frozenset[str], is_outer: bool
) -> int:
    """How many references are in variables of a frame, and what it assigns, of which that is so."""
    variables = frame.f_locals
    scopes = {"STORE_GLOBAL": frame.f_globals}

    def named(kind: str, name: str) -> Any:
        known = scopes.get(kind, variables)
        return known[name] if name in known else frame.f_globals.get(name)

    values = [variables[name] for name in unread if name in variables]
    for target in () if is_outer else assigned_after(frame.f_code, frame.f_lasti):
        if target.name in unread and target.kind.startswith("STORE_FAST"):
            continue
        value = named(target.kind, target.name)
        if target.kind == "STORE_ATTR":
            value = _attribute(value, target.item)
        elif target.kind == "STORE_SUBSCR":
            value = _at(value, target.item if target.is_constant else named("", target.item))
        values.append(value)
        del value
    # Before Python 3.13 this was a copy that the frame keeps, and with it all that is in it; the
    # references are the frame's, this function's, and that of the question.
    is_copy = bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED) and isinstance(variables, dict)
    # Behind a trace function, Python assigns the variables from there.
    is_traced = frame.f_trace is not None or sys.gettrace() is not None
    if is_copy and not is_traced and sys.getrefcount(variables) <= 3:
        variables.clear()
        is_copy = False
    # The variable's, that of the list, and those of whoever looks.
    most = 2 + is_copy + references_of_one()
    count = 0
    for value in values:
        if value is lent:
            count += 1
            continue
        # What is in a container that somebody else has as well can still be read.
        if sys.getrefcount(value) <= most + given.references(value) + given.times(value):
            count += sum(leaf is lent for leaf in tree_iter(value))
    return count


def _attribute(one: object, name: str) -> object:
    """What an object or a module has, without asking any code of theirs."""
    found = None
    with suppress(Exception):
        found = object.__getattribute__(one, "__dict__")
    if not isinstance(found, dict):
        return None
    return found[name] if name in found else _at(found.get("_buffers"), name)


def _at(value: object, item: object) -> object:
    """An item of a dictionary or list."""
    if type(value) is dict and type(item) in (str, int):
        return value.get(item)
    if type(value) is list and type(item) is int and -len(value) <= item < len(value):
        return value[item]
    return None


def _line(site: Any) -> str | None:
    if site is None:
        return None
    code, instruction = site
    lines = [line for start, end, line in code.co_lines() if start <= instruction < end]
    return short_place(f"{code.co_filename}:{lines[0]}") if lines and lines[0] else None
