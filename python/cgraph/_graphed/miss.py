"""The answers of a graphed function to calls that no native entry fits."""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from cgraph import _core, _driver, _torch
from cgraph._autograd.pinned import Pinned
from cgraph._captures.busy import busy
from cgraph._captures.collector import collections_held_off
from cgraph._explanation.findings import failed_by
from cgraph._graphed.arguments import Arguments
from cgraph._graphed.cache import Family, Keys
from cgraph._graphed.call import Call
from cgraph._graphed.device_turn import DeviceBusyError
from cgraph._graphed.entry import entry_of, entry_of_graph
from cgraph._graphed.key import Key
from cgraph._graphed.key_captures import KeyCaptures
from cgraph._graphed.observation import Reads
from cgraph._graphed.observe import observe
from cgraph._graphed.one_time_warnings import OneTimeWarnings
from cgraph._graphed.options import Options
from cgraph._graphed.reasons import (
    broken_by,
    reason_against,
)
from cgraph._graphed.record import BrokenError, Capture
from cgraph._graphed.recorded import Recorded
from cgraph._graphed.train import Trained
from cgraph._graphed.writeback import leave, reason_beside
from cgraph._python.changing_lines import line_that_changes
from cgraph._python.guards import Change
from cgraph._python.values import is_plain
from cgraph._reason import Reason
from cgraph._source import user_line
from cgraph.causes import Cause
from cgraph.errors import (
    ArgumentError,
    StateError,
    add_note,
)

if TYPE_CHECKING:
    from cgraph._padding.sizes import PaddedSizes

__all__ = ["Answer", "Answers", "Replay"]

_log = logging.getLogger("cgraph.graphed")


class Replay(NamedTuple):
    """A call that is a replay.

    Attributes:
        entry: The native entry that makes it.
        call: The call as the entry takes it.
    """

    entry: _core.Entry
    call: Call


Answer = Replay | Callable[[], Any]
"""The answer to a call: an entry whose work is to be done, or a callable."""


class Answers:
    """The answers to the calls of one function.

    Args:
        function: The function.
        name: Its name.
        arguments: The names of its arguments.
        options: Its options.
        keys: Its keys.
        dispatcher: The dispatcher that finds native entries.
        lock: The lock that lets one thread at a time replay; callers of methods here hold it.
        sizes: Makes the object that answers padded calls.
        debug: Lets a key be replayed for debugging; None if nothing is debugged.

    Attributes:
        reads: What it reads of Python.
        captures: The captures of its keys.
        warnings: The warnings about calls.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        arguments: Arguments,
        options: Options,
        keys: Keys,
        dispatcher: _core.Dispatcher,
        lock: _core.FunctionLock,
        sizes: Callable[[Answers], PaddedSizes],
        debug: Callable[[Answers, Key, Call, Recorded | Trained], None] | None,
    ) -> None:
        self.reads = Reads(function, options)
        self.name = name
        self.options = options
        self.keys = keys
        self.captures = KeyCaptures(self.reads, name, options, keys)
        # True once the names in its options were found.
        self._has_names = False
        self.arguments = arguments
        self.lock = lock
        self.sizes = sizes(weakref.proxy(self))
        self._debug = debug
        self._dispatcher = dispatcher
        self.warnings = OneTimeWarnings(name, options)

    def answer(self, call: Call, frozen: bool) -> Answer:
        """Find the answer to a call."""

        def eager() -> Any:
            return self.reads.function(*call.args, **call.kwargs)

        driver = _driver.current()
        if not self.arguments.fit(call.args, call.kwargs):
            # Python reports what is wrong with them.
            return eager
        against = reason_against(call, driver.device_type)
        if against is not None:
            return self.never(call, eager, against)
        padded = self.sizes.answer(call, eager, frozen)
        if padded is not None:
            return padded
        family, various = self.keys.family(call)
        if various is not None:
            return self._various(call, eager, various)
        self.warnings.of_shapes(self.keys.many_shapes)
        call = family.with_statics(call)
        key, changes, various = self.keys.find(family, call)
        if various is not None:
            return self._various(call, eager, various)
        if key is None:
            key = self.new_key(family, call, changes)
            changes = []
        if key.is_eager():
            self.warnings.of_eager(key, key.reason)
            return eager
        if changes:
            self.reads.note_moves(changes, is_in_a_row=not key.has_served)
        if key.recorded is not None and (changes or self._has_moved(key, call)):
            self.require_thawed(key, frozen, changes)
            if self._let_go(key, changes, call):
                return self.eagerly(key, eager)
        if key.recorded is not None:
            return self.replayed(key, call, eager, frozen)
        copied = () if key.shown is None or key.shown.needs_grad else self.reads.copied
        if key.shown is not None and (changes or not key.shown.guards.copy(copied)):
            key.shown = key.shown.now(self.reads, call)
        self.require_thawed(key, frozen)
        shown = key.shown
        is_known = shown is not None and shown.is_of_size and shown.reason_against is None
        if not is_known or key.observed < self.options.warmup:
            return lambda: self.observed(family, key, call)
        return self._captured(key, call, eager, family)

    def replayed(self, key: Key, call: Call, eager: Callable[[], Any], frozen: bool) -> Answer:
        """Find the answer to a call whose key has a graph, and whose guards hold."""
        free = self.keys.free(key)
        if free is None:
            text = "four earlier calls wait for their backward passes"
            return self.once(key, Reason(Cause.OPEN_CALLS, text), eager)
        if free is not key and free.recorded is not None and not self._holds(free, call):
            changes = [] if free.shown is None else free.shown.guards.changes(call.objects)
            self.require_thawed(free, frozen, changes)
            if self._let_go(free, changes, call):
                return self.eagerly(free, eager)
        if free.recorded is None:
            if free.is_eager():
                self.warnings.of_eager(free, free.reason)
                return eager
            free.shown = key.shown
            return self._captured(free, call, eager)
        recorded = free.recorded
        assert free.shown is not None
        call = call.with_placed(free.shown.guards)
        reason = reason_beside(call, recorded.mutated, recorded.writes, recorded.takes)
        if reason is not None:
            return self.once(key, reason, eager)
        assert free.entry is not None
        return Replay(free.entry, call)

    def key_of(self, call: Call) -> tuple[Family, Key, Call]:
        """Return a call's family, its key, which may be new, and the call as its graph takes it."""
        family, _ = self.keys.family(call)
        call = family.with_statics(call)
        key, changes, _ = self.keys.find(family, call)
        if key is None:
            key = self.new_key(family, call, changes)
        return family, key, call

    def captured_for(self, call: Call) -> tuple[_core.Entry, Recorded] | None:
        """Return the entry that a call would replay now, and its graph; None without one."""
        _, key, call = self.key_of(call)
        if not isinstance(key.recorded, Recorded) or not self._holds(key, call):
            return None
        assert key.entry is not None
        return key.entry, key.recorded

    def drop_stale(self, key: Key, call: Call) -> None:
        """Drop the graph of a key whose guards do not hold for a call."""
        if key.recorded is not None and not self._holds(key, call):
            changes = [] if key.shown is None else key.shown.guards.changes(call.objects)
            self._let_go(key, changes, call)

    def require_fit(self, call: Call) -> None:
        """Raise Python's error for arguments that the function cannot be called with."""
        args, kwargs = call.arguments(call.tensors)
        if not self.arguments.fit(args, kwargs):
            inspect.signature(self.reads.function).bind(*args, **kwargs)

    def never(
        self, call: Call, eager: Callable[[], Any], reason: Reason, *, counts: bool = False
    ) -> Answer:
        """Let a call run eagerly, as all like it do; if it counts that is a failure."""
        reason = reason.at(user_line())
        key = self.keys.eager_key(call, reason)
        self.warnings.of_eager(key, reason, counts=counts)
        key.eager_calls += 1
        return eager

    def _various(self, call: Call, eager: Callable[[], Any], name: str) -> Answer:
        """Let a call run eagerly whose place or argument of this name has too many values."""
        reason = self.keys.various[name]
        if reason.line is None:
            # Once: it reads the source.
            reason = reason.at(line_that_changes(name, self.reads.codes) or user_line())
            self.keys.various[name] = reason
        return self.never(call, eager, reason, counts=True)

    def once(self, key: Key, reason: Reason, eager: Callable[[], Any]) -> Answer:
        """Let one call of a key run eagerly, and say nothing."""
        key.eager_calls += 1
        key.reason = reason.at(user_line())
        return eager

    def eagerly(self, key: Key, eager: Callable[[], Any]) -> Answer:
        """Let a call of a key run eagerly, and warn if the reason is new."""
        key.eager_calls += 1
        self.warnings.of_eager(key, key.reason)
        return eager

    def add(self, call: Call, entry: _core.Entry, recorded: Recorded | Trained) -> None:
        """Let calls like this one find an entry natively, unless only Python can compare them."""
        # Only Python finds tensors that overlap written ones.
        if call.is_native and self.options.guard is None and not recorded.mutated:
            self._dispatcher.add(entry)

    def new_key(self, family: Family, call: Call, changes: Sequence[Change] = ()) -> Key:
        """Add a key for a call; with these changes it differs from the nearest key."""
        values = [one.value_in_words for one in changes if one.makes_key]
        key = Key(", ".join([*call.words(), *values]) or "no arguments")
        self.keys.add(family, key)
        return key

    def hold(self, key: Key, call: Call, captured: Capture) -> None:
        """Let calls of a key be replays of a capture."""
        recorded, shown = captured.recorded, captured.shown
        assert recorded is not None and shown is not None
        use = self.captures.pool_use
        key.shown = shown
        self.warnings.of_places(shown.guards.stopped)
        if isinstance(recorded, Recorded):
            recorded.give_up_results()
        if self._debug is not None:
            self._debug(self, key, call, recorded)
        if isinstance(recorded, Trained):
            signatures = [_torch.signature(one) for one in call.tensors]
            entry = entry_of(recorded, call, signatures, shown.guards, self.lock, use)
        else:
            of_graph = recorded, call, shown.guards, self.lock, use
            is_fresh, warn = self.options.outputs == "fresh", self.warnings.of_held
            entry = entry_of_graph(*of_graph, is_fresh=is_fresh, warn=warn)
        key.hold(recorded, entry)
        done = self.name, key.text, recorded.nodes, recorded.seconds * 1e3
        _log.info("%s (%s) is captured: %s nodes, in %.1f ms", *done)
        self.add(call, entry, recorded)
        self.keys.evict(key)

    def taken(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Take a call apart.

        Raises:
            ArgumentError: The function in ``guards=`` returns a value that is not plain.
        """
        call = Call(self.arguments, args, kwargs)
        if self.options.guard is not None:
            call.also = self.options.guard(*args, **kwargs)
            if not is_plain(call.also):
                raise ArgumentError(
                    f"guards= returned {call.also!r:.80}, expected a plain value: None, a number, a"
                    " text, a dtype, a device, or a tuple of these"
                )
        return call

    def clear(self) -> None:
        """Forget everything."""
        self.keys.clear()
        self.captures.memory.clear()
        self.sizes.clear()
        self.warnings.clear()

    def observed(self, family: Family, key: Key, call: Call) -> Any:
        """Run a call eagerly, for real, and note what it does."""
        # The notes of a large model are many objects, which all stay.
        with self.lock, busy(), collections_held_off():
            key.eager_calls += 1
            result, shown = observe(self.reads, call, call.args, call.kwargs)
            if not self._has_names:
                self.reads.require_names(call)
                self._has_names = True
            key.shown = shown
            key.observed += 1
            family.note(call, shown.written, self.options)
            if shown.guards.refused is not None and shown.reason_against is None:
                text = f"{shown.guards.refused} is an array, whose contents are not compared"
                key.pause(Reason(Cause.ARRAY, text, user_line()))
                self.warnings.of_eager(key, key.reason)
            elif (against := shown.reason_against) is not None and key.miss(against):
                self.warnings.of_eager(key, key.reason)
        return result

    def _captured(
        self,
        key: Key,
        call: Call,
        eager: Callable[[], Any],
        family: Family | None = None,
    ) -> Answer:
        """Capture a call, and answer it with its result, as its work is done."""
        assert key.shown is not None
        before = key.shown
        call = call.with_placed(before.guards)
        written = before.written | before.written_in_place
        beside = [place for place, name in enumerate(call.names) if name in written]
        if before.needs_grad and beside:
            text = f"{call.names[beside[0]]} is written while gradients are recorded"
            key.pause(Reason(Cause.WRITTEN_ARGUMENT, text, user_line()))
            return self.eagerly(key, eager)
        around = before.writes, before.takes, written
        if (reason := reason_beside(call, beside, *around)) is not None:
            return self.once(key, reason, eager)
        try:
            captured = self.captures.capture(key, call)
        except DeviceBusyError:
            text = "another thread captures on the device"
            return self.once(key, Reason(Cause.CAPTURE_ELSEWHERE, text), eager)
        except BrokenError as error:
            return self._broken(key, error.cause, eager)
        except RuntimeError as error:
            # After a break that has run, this call cannot be made again; later ones can.
            key.pause(failed_by(error))
            raise
        if captured.refusal is not None:
            key.pause(captured.refusal)
            key.eager_calls += 1
            self.warnings.of_eager(key, key.reason)
            assert captured.finish is not None
            result = captured.finish()
            captured.finish = None
            captured.discard()
            return lambda: result
        recorded, shown = captured.recorded, captured.shown
        assert recorded is not None and shown is not None
        if family is not None:
            family.note(call, shown.written, self.options)
        if isinstance(recorded, Trained):
            return self._trained(key, call, captured)
        leave(recorded, call.tensors, recorded.statics)
        is_fresh = self.options.outputs == "fresh" or captured.difference is not None
        if is_fresh:
            result = recorded.result.returned(call.tensors, is_fresh=True)
        if captured.difference is not None:
            self._differs(key, captured)
        else:
            self.hold(key, call, captured)
            key.was_replayed()
        if not is_fresh:
            # Now it owns no block.
            recorded.result.lend(self.captures.pool_use.lent)
            result = recorded.result.returned(call.tensors, is_fresh=False)
        result = recorded.assign(result, call.objects, call.args, call.kwargs)
        return lambda: result

    def _trained(self, key: Key, call: Call, captured: Capture) -> Answer:
        """Answer a captured call with gradients: a replay does its work, or returns its result."""
        recorded = captured.recorded
        assert isinstance(recorded, Trained)
        if captured.difference is not None:
            # Autograd keeps the passes as long as it may need them.
            self._differs(key, captured)
            result = recorded.finish(call.args, call.kwargs)
            return lambda: result
        self.hold(key, call, captured)
        if recorded.breaks:
            key.was_replayed()
            result = recorded.finish(call.args, call.kwargs)
            return lambda: result
        assert key.entry is not None
        return Replay(key.entry, call)

    def _differs(self, key: Key, captured: Capture) -> None:
        """Note that a capture differs from the previous call: its result stands, the graph goes."""
        recorded, difference = captured.recorded, captured.difference
        assert recorded is not None and difference is not None
        key.shown = captured.shown
        key.capture_seconds += recorded.seconds
        key.was_replayed()
        captured.discard()
        if key.miss(difference.at(user_line())):
            self.warnings.of_eager(key, key.reason)

    def _broken(self, key: Key, cause: Exception, eager: Callable[[], Any]) -> Answer:
        """Answer a call whose capture broke eagerly, and warn if that succeeds."""
        reason = broken_by(cause)
        is_first_use = reason.cause is Cause.FIRST_USE
        shown, is_pinned = key.shown, reason.cause is Cause.HELD_HISTORY
        pinned = Pinned(shown.guards.leaves) if is_pinned and shown is not None else None

        _log.info("the capture of %s (%s) has failed: %s", self.name, key.text, reason)

        def run() -> Any:
            # An error of the function itself goes to the caller.
            result = eager()
            with self.lock:
                key.eager_calls += 1
                if is_first_use and key.is_first_in_thread():
                    # The eager call has been the first use; later captures may succeed.
                    return result
                key.pause(reason, pinned)
                if self.options.on_fail == "raise":
                    add_note(cause, f"cgraph: {self.name} was being captured for ({key.text})")
                    raise cause
                self.warnings.of_eager(key, key.reason)
            return result

        return run

    def _let_go(self, key: Key, changes: list[Change], call: Call) -> bool:
        """Drop a graph whose guards no longer hold; return whether the key is eager now."""
        name = changes[0].name if changes else "an argument"
        verb = changes[0].verb if changes else "lies elsewhere"
        is_eager = key.let_go(verb, name, user_line())
        _log.info("%s (%s) drops its graph: %s %s", self.name, key.text, name, verb)
        shown = key.shown
        self.keys.drop(key)
        if not is_eager and shown is not None:
            key.shown = shown.now(self.reads, call)
        return is_eager

    def _holds(self, key: Key, call: Call) -> bool:
        """Return whether the guards of a key hold that was not found by them."""
        is_there = key.shown is not None and key.shown.guards.fit(call.objects)
        return is_there and not self._has_moved(key, call)

    def require_thawed(self, key: Key, frozen: bool, changes: Sequence[Change] = ()) -> None:
        """Refuse the capture of a key where captures are forbidden.

        Raises:
            StateError: Captures are forbidden.
        """
        if not frozen:
            return
        what = "a call needs a capture"
        if changes:
            what = f"{changes[0]} since the capture"
        raise StateError(
            f"{self.name} was frozen, and {what}, of the key ({key.text}): capture it before"
            " freeze(), put it back, or call reset()"
        )

    def _has_moved(self, key: Key, call: Call) -> bool:
        """Return whether the call reads tensors in place that the graph copies, or vice versa."""
        recorded = key.recorded
        return (
            isinstance(recorded, Recorded | Trained)
            and key.shown is not None
            and len(recorded.statics) != len(call.with_placed(key.shown.guards).tensors)
        )
