"""Calls and graphs without a capture, and why: noted, told once, an error in strict mode."""

from __future__ import annotations

import warnings
from typing import NamedTuple

from cgraph import _torch
from cgraph._source import levels_to_user
from cgraph._trees.options import TreeOptions
from cgraph.errors import CaptureError, EagerWarning

__all__ = ["EAGER", "OTHERWISE", "Why", "forget_skips", "note_skip", "skip", "skips"]

skips: list[tuple[str, str]] = []
"""Compiled graphs, or parts of them, that are not captured: the name and the reason."""


class Why(NamedTuple):
    """A reason for a call without a graph.

    Attributes:
        reason: The reason.
        remedy: What to do about it; None where there is nothing to do.
    """

    reason: str
    remedy: str | None = None


OTHERWISE = "keep such operators out of the compiled function"
"""The remedy for operators that no capture can have."""
EAGER = {
    "first run": Why("first run"),
    "watched": Why("inside of a capture, a dispatch mode or a transform, or with a host tensor"),
    "put off": Why("put off, as another function ran for the first time in the same step"),
    "mutation": Why(
        "mutated inputs that are neither static nor outputs of the same step",
        "make what is written a parameter or buffer of the module, mark it"
        " (torch._dynamo.mark_static_address), or return the new value",
    ),
    "repeats": Why(
        "a path as long as it may be, in one step",
        "mark where steps begin: torch.compiler.cudagraph_mark_step_begin()",
    ),
    "rerecords": Why(
        "static inputs that are elsewhere in each call",
        "write new weights in place, as parameter.data.copy_(new)",
    ),
    "variants": Why(
        "256 captures in one place, as other outputs were in use in each",
        "hold, or drop, the same outputs in each step",
    ),
    "keeps": Why(
        "a tensor that it makes, keeps and does not return, which replays would overwrite",
        "return it, or keep a clone that is made outside of the compiled function",
    ),
    "capture elsewhere": Why("another thread that was capturing"),
}
"""The reasons of single calls, by the names that trees have for them.

Those without a remedy pass by themselves: nobody is told.
"""


def note_skip(name: str, reason: str) -> None:
    """Note that a graph, or a part of one, is not captured."""
    if (name, reason) not in skips:
        skips.append((name, reason))


def skip(name: str, why: Why, options: TreeOptions, *, is_counted: bool = False) -> None:
    """Tell, once, that calls of a function run without a graph, though one was wanted.

    Args:
        name: The name of the function.
        why: The reason and the remedy.
        options: The options of the function.
        is_counted: torch has counted it.

    Raises:
        CaptureError: The options say ``strict``.
    """
    is_told = (name, why.reason) in _told
    if not (is_told or is_counted):
        _torch.count_skip()
    text = f"skipping cudagraphs due to {why.reason}"
    fix = f". Fix: {why.remedy}" if why.remedy else ""
    if options.strict:
        raise CaptureError(f"{text}: {name} is not captured, and the options say strict{fix}")
    if not is_told:
        _told.add((name, why.reason))
        text = f"{text}: {name} runs without a graph{fix}"
        warnings.warn(text, EagerWarning, stacklevel=levels_to_user())


_told: set[tuple[str, str]] = set()


def forget_skips() -> None:
    """Forget everything, as after a reset."""
    skips.clear()
    _told.clear()
