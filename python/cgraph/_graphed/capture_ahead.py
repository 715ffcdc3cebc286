"""Captures ahead of a call, which leave only the graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from cgraph import _driver
from cgraph._captures.busy import busy
from cgraph._explanation.findings import failed_by
from cgraph._graphed.cache import Family
from cgraph._graphed.call import Call
from cgraph._graphed.key import Key
from cgraph._graphed.leaf_gradients import LeafGradients
from cgraph._graphed.miss import Answers
from cgraph._graphed.observation import Observation
from cgraph._graphed.observe import observe
from cgraph._graphed.record import BrokenError, Capture
from cgraph._graphed.size_capture import UnlikeError
from cgraph._operators.rollback import Rollback
from cgraph._operators.snapshots import RandomSnapshot, StorageSnapshot, storage_snapshot
from cgraph._python.assignments import Assignments
from cgraph._python.changing_lines import line_that_changes
from cgraph._python.guards import Guards
from cgraph._python.named_objects import named_by
from cgraph._reason import Reason
from cgraph.causes import Cause
from cgraph.errors import CaptureError, add_note

__all__ = ["capture_ahead", "put_back"]


def capture_ahead(
    answers: Answers, family: Family, key: Key, call: Call, *, like: Observation | None
) -> None:
    """Capture a key, and restore the tensors and random states that this wrote.

    Args:
        answers: The answers of the function.
        family: The call's family.
        key: Its key, which has no graph.
        call: The call.
        like: The observation of a call that differs only in numbers of rows; None if there is
            none. With one, the work is not done, unless somebody keeps some of it, and the tensors
            that this writes are not restored.

    Raises:
        CaptureError: The function cannot be captured, or makes state in its first call.
        Exception: The function raised it.
    """
    call = call.replaced(call.tensors)
    try:
        if like is None:
            written = _observe(answers, key, call)
        else:
            written = None
            key.shown = like
        assert key.shown is not None
        if (against := key.shown.reason_against) is not None:
            raise against.error(f"{answers.name} cannot be captured")
        known = len(answers.reads.copied)
        captured, placed = _captured(answers, key, call, like, written)
        if len(answers.reads.copied) > known and captured.shown is not None:
            captured.discard()
            key.shown = captured.shown.now(answers.reads, call)
            captured, placed = _captured(answers, key, call, like, written)
        if captured.refusal is not None:
            captured.finish = None
            captured.discard()
            raise captured.refusal.error()
        if captured.difference is not None:
            captured.discard()
            text, line = captured.difference.text, captured.difference.line
            raise _first_call(
                f"{answers.name} differs between its first call and its capture: {text}", line
            )
        answers.hold(key, placed, captured)
        key.observed = answers.options.warmup
    except UnlikeError:
        capture_ahead(answers, family, key, call, like=None)
    except BrokenError as error:
        cause = error.cause
        key.reason = failed_by(cause)
        add_note(cause, f"cgraph: {answers.name} was being captured for the key ({key.text})")
        raise cause from None
    except CaptureError as error:
        key.reason = failed_by(error)
        key.shown = None
        raise


def _captured(
    answers: Answers,
    key: Key,
    call: Call,
    like: Observation | None,
    written: Sequence[StorageSnapshot] | None,
) -> tuple[Capture, Call]:
    """Capture a call, with the tensors at places that replays copy; return that call as well."""
    assert key.shown is not None
    placed = call.with_placed(key.shown.guards)
    with put_back(key.shown, copies=like is None, written=written):
        captured = answers.captures.capture(key, placed, is_sized=like is not None)
    if captured.refusal is not None or captured.difference is not None:
        captured.put_back()
    return captured, placed


def _observe(answers: Answers, key: Key, call: Call) -> list[StorageSnapshot]:
    """Observe a call, and put back what it wrote; return what that was, breaks included."""
    driver = _driver.current()
    rollback = Rollback(is_capturing=driver.is_capturing)
    args, kwargs = call.arguments(call.tensors)
    function = answers.reads.function
    named = named_by(function, call.named_objects, call.named_modules, callees=True)
    state = Assignments(
        Guards(named, compares=False), named.names, call.objects, (args, kwargs), call.places
    )
    # Snapshots are copied on another stream than the one that may still write.
    driver.synchronize()
    try:
        with rollback, busy():
            _, key.shown = observe(answers.reads, call, args, kwargs)
        written = rollback.storages
    finally:
        rollback.undo()
        state.put_back()
    # What is compared must be there before each call as it is after one.
    for change in answers.reads.changes(key.shown.guards, call.objects):
        back = change._replace(before=change.now, now=change.before)
        line = line_that_changes(change.name, key.shown.codes)
        key.shown = None
        raise _first_call(f"{answers.name} changes {change.name}: it {back.verb}", line)
    key.shown = key.shown.now(answers.reads, call)
    return written


@contextmanager
def put_back(
    shown: Observation, *, copies: bool = True, written: Sequence[StorageSnapshot] | None = None
) -> Iterator[None]:
    """Restore random states, and the tensors that captures write, at the end of a block.

    Without ``copies`` nothing is written, or another block restores it. ``written`` is what an
    earlier call wrote and has put back, the work of breaks included.
    """
    if written is None:
        written = [storage_snapshot(*one) for one in (shown.trace.written() if copies else ())]
    gradients = LeafGradients(shown.guards.leaves if shown.uses_gradients else ())
    with ExitStack() as undo:
        # Each of these runs whatever the others raise, the last one first.
        undo.callback(RandomSnapshot(shown.generators).put_back)
        undo.callback(gradients.put_back)
        for one in written:
            undo.callback(one.rewind)
        if copies:
            undo.callback(_driver.current().synchronize)
        yield


def _first_call(text: str, line: str | None) -> CaptureError:
    """Return the error about a function that does something in its first call only."""
    reason = Reason(Cause.CAPTURE_FAILED, text, line, "make that state first: call it once")
    return reason.given_to(CaptureError(f"{text}. Make that state first: call it once"))
