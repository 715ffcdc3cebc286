"""The sizes that are worth a capture."""

from __future__ import annotations

import itertools
import numbers
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from cgraph._text import in_time, in_units, table
from cgraph.errors import ArgumentError

__all__ = ["SizePlan", "plan_sizes"]


@dataclass(frozen=True)
class SizePlan:
    """Sizes to capture; see :func:`plan_sizes`.

    Attributes:
        sizes: The sizes, ascending.
        batches: The number of batches that are padded to each.
        padding: The padding rows of these batches, for each size.
        rows: The rows that all batches have without padding.
        bytes: Bytes of the device that the captures take, besides what the largest needs.
        seconds: The time of the captures.
    """

    sizes: tuple[int, ...]
    batches: tuple[int, ...]
    padding: tuple[int, ...]
    rows: int
    bytes: int
    seconds: float

    @property
    def overhead(self) -> float:
        """The padding rows for each row."""
        return sum(self.padding) / self.rows

    def __str__(self) -> str:
        """Return a table of the sizes, and what they cost."""
        rows = [
            [str(size), f"{count:,}", f"{padding:,}", f"{padding / (size * count):.1%}"]
            for size, count, padding in zip(self.sizes, self.batches, self.padding, strict=True)
        ]
        return (
            table(["size", "batches", "padding rows", "of its rows"], rows)
            + f"\n{len(self.sizes)} sizes, {self.overhead:.1%} padding,"
            f" {in_units(self.bytes)}, {in_time(self.seconds)}"
        )


def plan_sizes(
    histogram: Mapping[int, int] | Iterable[int],
    *,
    bytes: int | None = None,
    seconds: float | None = None,
    cost: tuple[int, float],
    most: int | None = None,
) -> SizePlan:
    """Choose the sizes to capture that save most padding within a budget.

    Captures of one ladder share the memory of the largest, so each further one costs its exec and
    its time: measure one, as ``ladder.bytes(key)`` and ``ladder.graph(key).memory().seconds`` of a
    key that is not the first.

    Args:
        histogram: How many batches there are of each size, or the sizes of batches.
        bytes: The most bytes of the device; None for any.
        seconds: The most seconds of a start; None for any.
        cost: Bytes and seconds of one capture.
        most: The most sizes; None for any.

    Returns:
        The sizes, the largest of the batches among them. None of fewer padding rows exists with as
        many sizes.

    Raises:
        ArgumentError: There is no batch, a size is not at least 1, a cost or a budget is negative,
            or the budget is too small for one capture.

    >>> from cgraph.piecewise import plan_sizes
    >>> plan = plan_sizes({1: 50, 2: 10, 7: 3, 8: 40}, bytes=3000, cost=(1000, 0.01))
    >>> plan.sizes, plan.padding
    ((1, 2, 8), (0, 0, 3))
    """
    counts = _counts(histogram)
    each_bytes, each_seconds = cost
    for name, value in (("bytes", bytes), ("seconds", seconds), ("most", most)):
        if value is not None and value < 0:
            raise ArgumentError(f"{name} is {value!r:.80}, expected a budget, at least 0")
    if each_bytes < 0 or each_seconds < 0:
        raise ArgumentError(f"cost is {cost!r:.80}, expected bytes and seconds, at least 0")
    limits = [len(counts)]
    if bytes is not None and each_bytes:
        limits.append(int(bytes / each_bytes))
    if seconds is not None and each_seconds:
        # 0.3 s are three times 0.1 s.
        limits.append(int(seconds / each_seconds * (1 + 1e-9)))
    if most is not None:
        limits.append(most)
    if (limit := min(limits)) < 1:
        raise ArgumentError(
            f"the budget allows no capture: one takes {in_units(each_bytes)} and"
            f" {in_time(each_seconds)}"
        )
    sizes = np.array(sorted(counts), dtype=np.int64)
    per_size = np.array([counts[int(one)] for one in sizes], dtype=np.int64)
    chosen = _chosen(sizes, per_size, limit)
    ends = [0, *(place + 1 for place in chosen)]
    batches, padding = [], []
    for begin, end in itertools.pairwise(ends):
        size, inside = sizes[end - 1], slice(begin, end)
        batches.append(int(per_size[inside].sum()))
        padding.append(int(((size - sizes[inside]) * per_size[inside]).sum()))
    return SizePlan(
        sizes=tuple(int(sizes[place]) for place in chosen),
        batches=tuple(batches),
        padding=tuple(padding),
        rows=int((sizes * per_size).sum()),
        bytes=each_bytes * len(chosen),
        seconds=each_seconds * len(chosen),
    )


def _chosen(sizes: np.ndarray, per_size: np.ndarray, limit: int) -> list[int]:
    """Return the places of at most so many sizes with the least padding, the last among them."""
    # Batches i … j padded to size j cost: size j times their number, less their rows.
    number = np.concatenate([[0], np.cumsum(per_size)])
    rows = np.concatenate([[0], np.cumsum(per_size * sizes)])
    if limit >= len(sizes):
        return list(range(len(sizes)))
    best = sizes * number[1:] - rows[1:]
    before: list[np.ndarray] = []
    for _ in range(limit - 1):
        # The last but one size is i - 1: what it and those below it cost, and the batches above.
        costs = np.concatenate([[0], best])[None, :-1] + (
            sizes[:, None] * (number[1:, None] - number[None, :-1])
            - (rows[1:, None] - rows[None, :-1])
        )
        costs[np.triu_indices(len(sizes), 1)] = np.iinfo(np.int64).max
        costs[:, 0] = best
        before.append(costs.argmin(axis=1))
        best = costs.min(axis=1)
    chosen, place = [], len(sizes) - 1
    for origins in reversed(before):
        chosen.append(place)
        if origins[place] == 0:
            return chosen[::-1]
        place = int(origins[place]) - 1
    return [place, *chosen[::-1]]


def _counts(histogram: Mapping[int, int] | Iterable[int]) -> dict[int, int]:
    items = histogram.items() if isinstance(histogram, Mapping) else Counter(histogram).items()
    counts = {}
    for size, count in items:
        whole = isinstance(size, numbers.Integral) and isinstance(count, numbers.Integral)
        if not whole or size < 1 or count < 0:
            raise ArgumentError(
                f"histogram has {count!r:.40} batches of size {size!r:.40}, expected numbers, each"
                " at least 1"
            )
        if count:
            counts[int(size)] = int(count)
    if not counts:
        raise ArgumentError("histogram has no batch, expected the sizes of some")
    return counts
