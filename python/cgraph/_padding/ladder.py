"""Captures of many sizes ahead of time."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from cgraph import _driver
from cgraph._captures.capture_order import largest_first
from cgraph._captures.collector import gc_frozen
from cgraph._graphed.call import Call
from cgraph._graphed.capture_ahead import capture_ahead, put_back
from cgraph._graphed.key import Key
from cgraph._graphed.miss import Answers
from cgraph._graphed.observation import Observation
from cgraph._graphed.options import OnePad, checked_sizes
from cgraph._graphed.reasons import reason_against
from cgraph._graphed.size_capture import can_be_like, for_sizes
from cgraph._padding.resize import resized
from cgraph.errors import ArgumentError, CaptureError, add_note

__all__ = ["capture_ladder"]


def capture_ladder(
    answers: Answers, call: Call, sizes: Sequence[int] | None, progress: bool
) -> None:
    """Capture a call's key, or one for each size, the largest first: the others fit its memory.

    Raises:
        ArgumentError: The call has no rows to make those of the sizes from.
    """
    options = answers.options
    wanted = checked_sizes(sizes) if sizes is not None else options.sizes
    answers.require_fit(call)
    if wanted is None:
        with gc_frozen():
            _capture(answers, call, None)
        return
    found = answers.sizes.rows.fit(call, wanted)
    if found is None:
        raise ArgumentError(
            f"no tensor among the arguments of {answers.name} has the dimension"
            f" dim={options.dim!r}, along which sizes= counts rows"
        )
    if found.rows == 0:
        raise ArgumentError(
            f"the arguments of {answers.name} have no rows, expected at least one: the sizes"
            " are made from these rows"
        )
    # Padding rows are copies of real ones, so that indices stay in range.
    pads: list[OnePad] = [one if callable(one) else "repeat" for one in options.pads(call.names)]
    like: Observation | None = None
    with gc_frozen(), ExitStack() as behind:
        for size in largest_first(wanted, f"capture {answers.name}", shows=progress):
            sized = call.replaced(resized(call.tensors, found, size, pads))
            try:
                shown = _capture(answers, sized, like).shown
            except Exception as error:
                pairs = zip(call.names, found.dims, strict=True)
                names = [name for name, dim in pairs if dim is not None]
                if len(names) > 1:
                    which = (
                        f"cgraph: {', '.join(names)} were cut or padded: if not all of these have"
                    )
                    add_note(error, f"{which} rows, name those that do, as dim={{{names[0]!r}: 0}}")
                raise
            if like is None and shown is not None and can_be_like(shown):
                like = for_sizes(shown, answers.reads, sized)
                behind.enter_context(put_back(like))
    answers.sizes.rows.learn(call)


def _capture(answers: Answers, call: Call, like: Observation | None) -> Key:
    """Capture the key of a call, unless it has a graph whose guards hold."""
    against = reason_against(call, _driver.current().device_type)
    if against is not None:
        raise CaptureError(f"{answers.name} cannot be captured for ({call}): {against}")
    family, key, call = answers.key_of(call)
    answers.drop_stale(key, call)
    if key.recorded is None:
        capture_ahead(answers, family, key, call, like=like)
    return key
