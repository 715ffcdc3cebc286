"""Calls and graphs without a capture, and why: noted, told once, an error in strict mode."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from cgraph import _driver, _torch
from cgraph._reason import Reason
from cgraph._trees.options import TreeOptions
from cgraph.causes import Cause

__all__ = ["EAGER", "forget_skips", "note_skip", "skip", "skip_without_gpu", "skips"]

_log = logging.getLogger("cgraph.trees")

skips: list[tuple[str, str]] = []
"""Compiled graphs, or parts of them, that are not captured: the name and the reason."""


EAGER = {
    "first run": Reason(Cause.FIRST_RUN, "first run"),
    "watched": Reason(
        Cause.WATCHED, "inside of a capture, a dispatch mode or a transform, or with a host tensor"
    ),
    "put off": Reason(
        Cause.FIRST_RUN, "put off, as another function ran for the first time in the same step"
    ),
    "mutation": Reason(
        Cause.MUTATED_INPUT, "mutated inputs that are neither static nor outputs of the same step"
    ),
    "repeats": Reason(Cause.LONG_STEP, "a path as long as it may be, in one step"),
    "rerecords": Reason(Cause.MOVING_WEIGHTS, "static inputs that are elsewhere in each call"),
    "variants": Reason(
        Cause.MANY_VARIANTS, "256 captures in one place, as other outputs were in use in each"
    ),
    "keeps": Reason(
        Cause.NEW_STATE,
        "a tensor that it makes, keeps and does not return, which replays would overwrite",
        special_fix="return it, or keep a clone that is made outside of the compiled function",
    ),
    "capture elsewhere": Reason(Cause.CAPTURE_ELSEWHERE, "another thread that was capturing"),
}
"""The reasons of single calls, by the names that trees have for them.

Those without a fix pass by themselves: nobody is told.
"""


def note_skip(name: str, reason: str) -> None:
    """Note that a graph, or a part of one, is not captured."""
    if (name, reason) not in skips:
        skips.append((name, reason))


def skip(name: str, reason: Reason, options: TreeOptions, *, is_counted: bool = False) -> None:
    """Tell, once, that calls of a function run without a graph, though one was wanted.

    Args:
        name: The name of the function.
        reason: The reason.
        options: The options of the function.
        is_counted: torch has counted it.

    Raises:
        CaptureError: The options say ``strict``.
    """
    is_told = (name, reason.text) in _told
    if not (is_told or is_counted):
        _torch.count_skip()
    said = replace(reason, text=f"skipping cudagraphs due to {reason.text}")
    if options.strict:
        raise said.error(f"{name} is not captured, and the options say strict")
    if not is_told:
        _told.add((name, reason.text))
        _log.info("%s runs without a graph: %s", name, reason)
        said.warn(f"{name} runs without a graph")


def skip_without_gpu(name: str, options: TreeOptions) -> bool:
    """Tell that a function gets no graphs as there is no GPU; return whether that is so."""
    if _driver.current().device_type == "cpu" or torch.cuda.is_available():
        return False
    reason = Reason(Cause.NO_GPU, "no GPU: tensors are on the host")
    note_skip(name, reason.text)
    skip(name, reason, options)
    return True


_told: set[tuple[str, str]] = set()


def forget_skips() -> None:
    """Forget everything, as after a reset."""
    skips.clear()
    _told.clear()
