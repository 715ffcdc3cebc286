"""Reports of graphed functions as tables, and the cells and sentences that the page shares."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from cgraph._text import in_time, in_units, plural, printable, short_place, table

if TYPE_CHECKING:
    from cgraph.reports import FunctionReport, KeyReport, Rerecording

__all__ = ["HEAD", "cells", "heading", "in_order", "notes", "summary", "text", "totals"]

HEAD = (
    "key",
    "state",
    "replays",
    "eager calls",
    "capture ms",
    "nodes",
    "copied",
    "memory",
)
"""The columns of a function's table."""

_NOTHING = (
    "No function is graphed yet: decorate one with @cgraph.graphed. Compiled functions are in"
    " cgraph.trees.report()."
)
_NOT_CALLED = "It was not called yet."


def text(functions: Sequence[FunctionReport]) -> str:
    """Return all functions, each with its table and the notes about its keys."""
    if not functions:
        return _NOTHING
    parts = [totals(functions)] if len(functions) > 1 else []
    return "\n\n".join([*parts, *map(_function, functions)])


def totals(functions: Sequence[FunctionReport]) -> str:
    """Return the sums over all functions in one sentence."""
    if not functions:
        return _NOTHING
    keys = [key for function in functions for key in function.keys]
    return f"{plural(len(functions), 'function')}: {_sums(functions, len(keys))}"


def heading(function: FunctionReport) -> str:
    """Return a function's name, and the line of its definition."""
    return _one_line(function.name + _place(function.where))


def summary(function: FunctionReport) -> str:
    """Return the sums over a function's keys in one sentence."""
    return _sums([function], len(function.keys)) if function.keys else _NOT_CALLED


def in_order(keys: Iterable[KeyReport]) -> list[KeyReport]:
    """Return the keys by number of replays, the most first."""
    return sorted(keys, key=lambda key: -key.replays)


def cells(key: KeyReport) -> list[str]:
    """Return a key's row below :data:`HEAD`."""
    return [
        _one_line(key.key),
        key.state,
        f"{key.replays:,}",
        f"{key.eager_calls:,}",
        f"{key.capture_seconds * 1e3:,.1f}",
        "-" if key.nodes is None else f"{key.nodes:,}",
        "-" if key.copied_bytes is None else in_units(key.copied_bytes),
        "-" if key.memory_bytes is None else in_units(key.memory_bytes),
    ]


def notes(key: KeyReport) -> list[tuple[str, str]]:
    """Return notes about a key: the subject of each, and its text."""
    found = []
    if key.reason is not None or key.where is not None:
        about = "why" if key.state != "captured" else "why some calls ran eagerly"
        found.append((about, (key.reason or key.state) + _place(key.where)))
    elif key.state == "observed":
        found.append(("why", "its calls run eagerly until one is captured"))
    found += [("captured again", _rerecording(one)) for one in key.rerecorded]
    if key.breaks:
        found.append(("eager breaks", ", ".join(key.breaks)))
    if key.frozen:
        found.append(("frozen", ", ".join(key.frozen)))
    if key.advice is not None:
        found.append(("advice", key.advice))
    return [(about, _one_line(words)) for about, words in found]


def _function(function: FunctionReport) -> str:
    keys = in_order(function.keys)
    head = f"{heading(function)}: {summary(function)}"
    if not keys:
        return head
    said = [(key, notes(key)) for key in keys]
    below = [
        "\n".join([f"{_one_line(key.key)}:", *(f"  {about}: {words}" for about, words in found)])
        for key, found in said
        if found
    ]
    return "\n\n".join(["\n".join([head, table(HEAD, [*map(cells, keys)])]), *below])


def _sums(functions: Sequence[FunctionReport], keys: int) -> str:
    captured = sum(function.captured for function in functions)
    replays = sum(function.replays for function in functions)
    seconds = sum(function.capture_seconds for function in functions)
    memory = sum(function.memory_bytes for function in functions)
    return (
        f"{captured:,} of {plural(keys, 'key')} captured, in {in_time(seconds)} and"
        f" {in_units(memory)}; {plural(replays, 'replay')}"
    )


def _rerecording(one: Rerecording) -> str:
    times = "once" if one.count == 1 else f"{one.count:,} times"
    what = one.reason if one.argument is None else f"{one.argument} {one.reason}"
    return f"{times}: {what}{_place(one.where)}"


def _place(where: str | None) -> str:
    return "" if where is None else f" ({short_place(where)})"


def _one_line(words: str) -> str:
    """Remove line ends, which would break a table, and unprintable characters."""
    return printable(" ".join(words.split()))
