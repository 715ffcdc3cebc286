"""Advice about a key of a graphed function, as text."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from cgraph._text import in_time, plural

if TYPE_CHECKING:
    from cgraph.reports import KeyReport, Rerecording

__all__ = ["advice"]

# Each costs a capture; the first few may be part of the start.
_MANY = 3
_ELSE = "see what a capture refuses, and the fix of each: cgraph.explain(fn, *args)"
# Advice for a key that is seldom replayed, without and with sizes=.
_SELDOM = (
    "leave it eager, or give sizes= so that more calls share a graph",
    "nothing if its calls are still to come; else leave its size out of sizes=, so that its calls"
    " are padded to a larger one",
)


def advice(key: KeyReport) -> str | None:
    """Return advice for a key; None if it is fine."""
    if key.state == "eager":
        return key.fix or _ELSE
    if key.state == "observed":
        return key.fix if key.reason is not None else None
    found = _about_rerecordings(key.rerecorded)
    captures = 1 + sum(one.count for one in key.rerecorded)
    if key.replays <= captures and not key.is_simulated:
        found.append(f"{_about_seldom(key, captures)}: {_SELDOM[key.has_sizes]}")
    return "; ".join(found) or None


def _about_seldom(key: KeyReport, captures: int) -> str:
    """Return a text about captures that were used by at most one replay each."""
    took = in_time(key.capture_seconds)
    if captures == 1:
        return f"captured in {took} and never replayed again"
    return f"captured {captures:,} times in {took} for {plural(key.replays, 'replay')}"


def _about_rerecordings(rerecorded: tuple[Rerecording, ...]) -> list[str]:
    """Return advice about places, or evictions, that made a key be captured many times."""
    places, evicted = Counter[str](), 0
    for one in rerecorded:
        if one.argument is not None:
            places[one.argument] += one.count
        elif one.reason == "evicted":
            evicted += one.count
    found = [
        f"{place} made it be captured again {count:,} times: keep it at one address and change it"
        " in place, with copy_()"
        for place, count in places.most_common()
        if count >= _MANY
    ]
    if evicted >= _MANY:
        found.append(
            f"evicted and captured again {evicted:,} times: raise max_graphs, or give sizes= so"
            " that more calls share a graph"
        )
    return found
