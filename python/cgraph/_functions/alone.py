"""Ladders of which nothing but the captures runs: what can be done for all sizes at once is."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from cgraph import _core, _driver, _torch
from cgraph._captures.busy import busy
from cgraph._functions.capturing import Capturing
from cgraph._functions.claims import claimed
from cgraph._functions.failures import failure_of
from cgraph._functions.keys import Key
from cgraph._functions.together import Together
from cgraph._recording.alone import Ended, recorded_alone
from cgraph._recording.calls import Call
from cgraph._recording.conditions import NotReadyError
from cgraph._source import user_line
from cgraph.errors import add_note

__all__ = ["capture_alone"]


def capture_alone(
    capturing: Capturing,
    calls: Sequence[Call],
    is_frozen: bool,
    together: Together,
    advance: Callable[[], object],
) -> int:
    """Capture the keys of calls that differ in their rows, of a function that wants captures alone.

    Between two captures as little happens as can be: what they need is looked for before the first
    one, and what is made of them is made after the last one, while threads instantiate. Right after
    a capture none of what that takes is in the processor's cache.

    Args:
        capturing: What captures.
        calls: The calls, which record no gradients.
        is_frozen: Whether captures are forbidden.
        together: What instantiates the graphs, which its keys hold only then.
        advance: Called after each one.

    Returns:
        How many are done, the first ones: not those behind one that has a break, or whose hooks
        have changed something.
    """
    known, keys = set(capturing.keys.values()), list[Key]()
    begun = done = 0
    try:
        for call in calls:
            key = capturing.key(call, capturing.reached if keys else None)
            keys.append(key)
            if not capturing.ready.has_graph(key, call, is_frozen):
                capturing.ready.require_thawed(key, is_frozen)
                capturing.require_no_reason_against(call, key)
                key.is_awaited = True
        wanted = {key: call for key, call in zip(keys, calls, strict=True) if key.is_awaited}
        with _captures(capturing, together, wanted) as capture:
            for key in keys:
                begun += 1
                # Unless a hook has captured it meanwhile.
                is_last = key in wanted and key.state != "captured" and capture(key)
                advance()
                done += 1
                if is_last:
                    break
    finally:
        # Not before: callbacks of users run outside of all that captures need.
        together.drop_failed()
        waiting = together.keys
        for key in keys:
            key.is_awaited = key in waiting
        for key in keys[begun:]:
            if key not in known and key.failure is None:
                capturing.limits.forget_unused(key)
    return done


@contextmanager
def _captures(
    capturing: Capturing, together: Together, wanted: dict[Key, Call]
) -> Iterator[Callable[[Key], bool]]:
    """A block in which keys are captured, each by a function that says if it must be the last one.

    Args:
        capturing: What captures.
        together: What instantiates the graphs.
        wanted: The keys, which were just asked for, and a call of each.
    """
    if not wanted:
        yield lambda key: False
        return
    driver, surroundings = _driver.current(), capturing.reached
    assert surroundings is not None
    # The calls differ in their tensors only.
    first = next(iter(wanted.values()))
    plan = capturing.plan(first, surroundings, driver, waits=True)
    with _torch.without_gradients():
        statics = {
            key: capturing.places.statics(driver, call.tensors, True, False)
            for key, call in wanted.items()
        }
    flags, lane = surroundings.flags, capturing.places.lane(driver)

    def keep(key: Key, ended: Ended, flags: _core.Flags, was_evicted: bool) -> None:
        try:
            recorded = ended.finished()
            followed = capturing.followed(ended.call, recorded, surroundings, has_called=False)
            capturing.keep(key, ended.call, recorded, followed, flags, lane, together)
            capturing.rows.learn(ended.call)
        except Exception as error:
            key.has_failed(failure_of(error))
            add_note(error, f"cgraph: the graph was that of the key ({key.text})")
            raise
        if was_evicted:
            key.again("evicted", None, user_line())

    def capture(key: Key) -> bool:
        was_evicted = key.state == "evicted"
        # Its calls may have run eagerly until now.
        capturing.limits.drop(key, key.state)
        try:
            ended = record(wanted[key], statics[key])
        except NotReadyError as error:
            raise capturing.failed_ahead(key, error.ahead) from None
        except Exception as error:
            capturing.failed_ahead(key, error)
            raise
        # The function itself may change them, or forget all.
        now = surroundings.flags
        is_same = now is flags and capturing.reached is surroundings
        finish = functools.partial(keep, key, ended, now, was_evicted)
        if ended.waits:
            together.make_later(finish)
            return not is_same
        # Hooks or a break have seen it, and may have changed anything.
        finish()
        return not (ended.is_whole and is_same and surroundings.moved is None)

    with busy(), claimed(plan.pool), recorded_alone(plan, driver, first.modules) as record:
        try:
            yield capture
        except BaseException:
            # Those before the one that fails; what comes out is its error.
            with suppress(Exception):
                together.instantiate()
            raise
        together.instantiate()
