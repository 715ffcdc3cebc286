"""Ladders of which nothing but the captures runs: what can be done for all sizes at once is."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from cgraph import _driver, _torch
from cgraph._captures.busy import busy
from cgraph._functions.capturing import Capturing
from cgraph._functions.claims import claimed
from cgraph._functions.keys import Key
from cgraph._functions.together import Together
from cgraph._recording.alone import Ended, recorded_alone
from cgraph._recording.calls import Call
from cgraph._recording.conditions import NotReadyError
from cgraph._source import user_line
from cgraph.errors import CaptureError

__all__ = ["capture_alone"]


def capture_alone(
    capturing: Capturing,
    calls: Sequence[Call],
    is_frozen: bool,
    together: Together,
    captured: Callable[[], object],
) -> int:
    """Capture the keys of calls that differ in their rows, if nothing but the captures runs.

    Between two captures as little happens as can be: what they need is looked for before the first
    one, and what is made of them is made after the last one. Right after a capture none of what
    that takes is in the processor's cache.

    Args:
        capturing: What captures.
        calls: The calls.
        is_frozen: Whether captures are forbidden.
        together: What instantiates the graphs, which its keys hold only then.
        captured: Called after each one.

    Returns:
        How many are done, the first ones: none if the function's options want more than captures,
        and not those behind one that has a break, or whose hooks have changed something.
    """
    driver = _driver.current()
    first = capturing.key(calls[0])
    surroundings = capturing.reached
    assert surroundings is not None
    plan = capturing.plan(calls[0], surroundings, driver, waits=True)
    if not plan.is_alone or calls[0].mode.grad:
        capturing.limits.forget_unused(first)
        return 0
    keys: list[Key] = []
    done = begun = 0
    try:
        for call in calls:
            keys.append(_wanted(capturing, call, is_frozen))
        with _torch.without_gradients():
            statics = [
                capturing.places.statics(driver, call.tensors, True, False) for call in calls
            ]
        flags, lane = surroundings.flags, capturing.places.lane(driver)

        def keep(key: Key, ended: Ended, was_evicted: bool) -> None:
            key.is_awaited = False
            recorded = ended.finished()
            followed = capturing.followed(ended.call, recorded, surroundings, has_called=False)
            capturing.keep(key, ended.call, recorded, followed, lane, together)
            capturing.rows.learn(ended.call)
            if was_evicted:
                key.again("evicted", None, user_line())

        with (
            busy(),
            claimed(plan.pool),
            recorded_alone(plan, driver) as record,
            ExitStack() as last,
        ):
            # Whatever comes: also those before one that fails.
            last.callback(together.instantiate)
            for key, call, of_call in zip(keys, calls, statics, strict=True):
                begun += 1
                is_whole = True
                if key.state != "captured":
                    was_evicted = key.state == "evicted"
                    # Its calls may have run eagerly until now.
                    capturing.limits.drop(key, key.state)
                    try:
                        ended = record(call, of_call)
                    except NotReadyError as error:
                        raise CaptureError(f"{error}: call the function once before") from None
                    finish = functools.partial(keep, key, ended, was_evicted)
                    if ended.is_made:
                        finish()
                    else:
                        together.make_later(finish)
                    is_whole = not ended.has_breaks
                captured()
                done += 1
                is_same = capturing.reached is surroundings and surroundings.flags is flags
                if not (is_whole and is_same):
                    break
    finally:
        for key in keys[done:]:
            key.is_awaited = False
        for key in keys[begun:]:
            capturing.limits.forget_unused(key)
    return done


def _wanted(capturing: Capturing, call: Call, is_frozen: bool) -> Key:
    """The key of a call, which is not forgotten until it is captured."""
    key = capturing.key(call)
    if not capturing.ready.has_graph(key, call, is_frozen):
        capturing.ready.require_thawed(key, is_frozen)
        capturing.require_no_reason_against(call)
        key.is_awaited = True
    return key
