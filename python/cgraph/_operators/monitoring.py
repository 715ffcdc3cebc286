"""Reports of code that begins to run on a thread, by ``sys.monitoring``: each code object once.

A profile function is called for each call and each return, including those of torch and of cgraph,
and takes longer than the function itself.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from cgraph._python.names import names_in

__all__ = ["monitored", "report_again"]

_NAME = "cgraph"
# Debuggers, coverage tools, profilers and optimisers have their own numbers.
_FREE = (3, 4)
_lock = threading.Lock()
_watched: dict[int, list[_Watch]] = {}
# Number of blocks that get reports of a code's calls.
_users: Counter[CodeType] = Counter()
_tool: list[int] = []


@dataclass(eq=False)
class _Watch:
    """The reports that one block gets.

    Attributes:
        begins: Called with each code object that begins. True if once is enough.
        calls: Called with each callable that code with one of the names calls, and its first
            argument.
        names: The names.
        looked_at: The code objects whose calls are reported.
        known: The code objects that have begun, by ``id``: hashing one takes longer than a call.
    """

    begins: Callable[[CodeType], bool]
    calls: Callable[[Any, Any], None]
    names: Collection[str]
    looked_at: list[CodeType] = field(default_factory=list)
    known: dict[int, CodeType] = field(default_factory=dict)


@contextmanager
def monitored(
    begins: Callable[[CodeType], bool],
    calls: Callable[[Any, Any], None],
    names: Collection[str],
    running: Sequence[CodeType] = (),
) -> Iterator[bool]:
    """Report the code that runs in a ``with`` block on this thread; yield whether that works.

    It does not before Python 3.12, or if others use all the numbers that tools may have.

    Args:
        begins: Called with each code object that begins. True if once is enough.
        calls: Called with each callable that code with one of the names calls, and its first
            argument.
        names: The names.
        running: Code that has begun before, and whose calls are reported as well.
    """
    monitoring: Any = getattr(sys, "monitoring", None)
    watch, thread = _Watch(begins, calls, names), threading.get_ident()
    with _lock:
        if not _watched and monitoring is not None:
            _tool[:] = [one for one in _FREE if monitoring.get_tool(one) is None][:1]
        is_told = bool(_tool)
        if is_told and not _watched:
            tool = _tool[0]
            monitoring.use_tool_id(tool, _NAME)
            for event, callback in _callbacks(monitoring.events):
                monitoring.register_callback(tool, event, callback)
            # A generator may have begun before.
            monitoring.set_events(tool, monitoring.events.PY_START | monitoring.events.PY_RESUME)
        if is_told:
            _watched.setdefault(thread, []).append(watch)
            for code in running:
                _look_at(watch, code)
            # Code that was reported once is reported again.
            monitoring.restart_events()
    if not is_told:
        yield False
        return
    try:
        yield True
    finally:
        with _lock:
            _watched[thread].remove(watch)
            if not _watched[thread]:
                del _watched[thread]
            for code in watch.looked_at:
                _users[code] -= 1
                if not _users[code]:
                    del _users[code]
                    monitoring.set_local_events(_tool[0], code, 0)
            if not _watched:
                monitoring.set_events(_tool[0], 0)
                for event, _ in _callbacks(monitoring.events):
                    monitoring.register_callback(_tool[0], event, None)
                monitoring.free_tool_id(_tool.pop())


def report_again() -> None:
    """Let code be reported again that was reported before."""
    monitoring: Any = getattr(sys, "monitoring", None)
    if _tool:
        monitoring.restart_events()


def _callbacks(events: Any) -> list[tuple[int, Callable[..., Any]]]:
    return [(events.PY_START, _begins), (events.PY_RESUME, _begins), (events.CALL, _calls)]


def _begins(code: CodeType, _: int) -> Any:
    watches = _watched.get(threading.get_ident())
    if not watches:
        return None
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
    watch = watches[-1]
    is_done = watch.begins(code)
    if id(code) not in watch.known:
        watch.known[id(code)] = code
        if not names_in((code,)).isdisjoint(watch.names):
            _look_at(watch, code)
    # Other blocks may still need the report.
    return monitoring.DISABLE if is_done and len(_watched) == 1 and len(watches) == 1 else None


def _look_at(watch: _Watch, code: CodeType) -> None:
    """Let the calls of a code object be reported."""
    if code in watch.looked_at:
        return
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
    watch.looked_at.append(code)
    _users[code] += 1
    monitoring.set_local_events(_tool[0], code, monitoring.events.CALL)


def _calls(_: CodeType, __: int, called: Any, first: Any) -> None:
    for watch in _watched.get(threading.get_ident(), ())[-1:]:
        watch.calls(called, first)
