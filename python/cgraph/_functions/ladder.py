"""Captures of many sizes ahead of time."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tqdm import tqdm  # type: ignore[import-untyped]

from cgraph._captures.collector import gc_frozen
from cgraph._functions.alone import capture_alone
from cgraph._functions.capturing import Capturing
from cgraph._functions.padding.contents import resized
from cgraph._functions.padding.rows import Fit
from cgraph._functions.together import instantiated_together
from cgraph._recording.calls import Call
from cgraph._recording.options import Options, Pad, checked_sizes
from cgraph.errors import ArgumentError, add_note

__all__ = ["capture_ladder"]


def capture_ladder(
    capturing: Capturing,
    call: Call,
    options: Options,
    sizes: Sequence[int] | None,
    progress: bool,
    name: str,
    is_frozen: bool,
) -> None:
    """Capture a call's key, or one for each size, the largest first: the others fit its memory.

    Args:
        capturing: What captures.
        call: A call of any number of rows.
        options: Those of the function.
        sizes: The sizes, if not those of the options.
        progress: Show a bar.
        name: What the bar is called.
        is_frozen: Whether captures are forbidden.

    Raises:
        ArgumentError: The call has no rows, of which those of the sizes could be made.
    """
    wanted = checked_sizes(sizes) if sizes is not None else options.sizes
    if wanted is None or not capturing.fits(call):
        # In the latter case Python says what is wrong with the arguments.
        with gc_frozen():
            capturing.ahead(call, is_frozen)
        return
    if call.odd_one is not None:
        capturing.require_no_reason_against(call)
    found = capturing.rows.fit(call, wanted)
    if found is None:
        raise ArgumentError(
            f"no tensor among the arguments of {name} has the dimension dim={options.dim!r}, along"
            " which sizes= counts rows"
        )
    if found.rows == 0:
        raise ArgumentError(
            f"the arguments of {name} have no rows, expected at least one: the other sizes are made"
            " of its rows"
        )
    # Rows that are made up are copies of real ones: numbers that index something stay in range.
    pad: Pad = "repeat" if not callable(options.pad) else options.pad
    largest_first = sorted(wanted, reverse=True)
    calls: Iterator[Call] = (
        call.replaced(resized(call.tensors, found, size, pad)) for size in largest_first
    )
    # Calls that are cut share the memory of the given one; others are made one at a time.
    are_cut = found.rows >= largest_first[0]
    bar = tqdm(
        desc=f"capture {name}",
        total=len(wanted),
        unit="graph",
        leave=False,
        disable=not progress,
        file=sys.stderr,
    )
    with gc_frozen(), instantiated_together(capturing.limits, len(wanted)) as together, bar:
        if together is not None and are_cut:
            together.holds = True
            if options.wants_captures_alone and not call.mode.grad:
                ahead = [*calls]
                done = capture_alone(capturing, ahead, is_frozen, together, bar.update)
                calls = iter(ahead[done:])
        for resized_call in calls:
            with _rows_named(call, found):
                capturing.ahead(resized_call, is_frozen, together)
            bar.update()


@contextmanager
def _rows_named(call: Call, found: Fit) -> Iterator[None]:
    """A block whose errors say which arguments got another number of rows, if these are several."""
    try:
        yield
    except Exception as error:
        pairs = zip(call.names, found.dims, strict=True)
        names = [name for name, dim in pairs if dim is not None]
        if len(names) > 1:
            add_note(
                error,
                f"cgraph: {', '.join(names)} were cut or padded: if not all of these have rows,"
                f" name those that do, as dim={{{names[0]!r}: 0}}",
            )
        raise
