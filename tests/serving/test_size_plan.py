"""`plan_sizes`: the sizes that save most padding within a budget."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from cgraph.errors import ArgumentError
from cgraph.piecewise import plan_sizes


def padding(sizes: tuple[int, ...], histogram: dict[int, int]) -> int:
    return sum(
        (min(one for one in sizes if one >= size) - size) * count
        for size, count in histogram.items()
    )


@pytest.mark.parametrize("seed", range(40))
def test_no_other_sizes_of_the_same_number_have_less_padding(seed: int) -> None:
    chance = random.Random(seed)
    sizes = chance.sample(range(1, 60), chance.randint(1, 8))
    histogram = {one: chance.randint(1, 50) for one in sizes}
    most = chance.randint(1, 5)
    plan = plan_sizes(histogram, cost=(1000, 0.25), most=most)
    largest = max(sizes)
    best = min(
        padding((*others, largest), histogram)
        for count in range(min(most, len(sizes)))
        for others in itertools.combinations([one for one in sizes if one != largest], count)
    )
    assert padding(plan.sizes, histogram) == sum(plan.padding) == best
    assert len(plan.sizes) <= most
    assert plan.sizes[-1] == largest
    assert list(plan.sizes) == sorted(plan.sizes)
    assert sum(plan.batches) == sum(histogram.values())


def test_budgets_of_bytes_and_seconds_limit_the_number_of_sizes() -> None:
    batches = [1, 1, 2, 3, 4, 8, 8, 16]
    assert len(plan_sizes(batches, cost=(1000, 0.5)).sizes) == 6
    plan = plan_sizes(batches, bytes=3500, cost=(1000, 0.5))
    assert (len(plan.sizes), plan.bytes, plan.seconds) == (3, 3000, 1.5)
    assert len(plan_sizes(batches, seconds=1.0, cost=(1000, 0.5)).sizes) == 2
    text = str(plan_sizes([3, 4, 4], cost=(1 << 20, 0.5), most=1))
    assert "1 sizes, 9.1% padding, 1.0 MiB, 500 ms" in text
    assert text.splitlines()[0].split() == [
        "size",
        "batches",
        "padding",
        "rows",
        "of",
        "its",
        "rows",
    ]


def test_a_budget_that_is_a_multiple_of_the_cost_is_used_up() -> None:
    assert len(plan_sizes(range(1, 9), seconds=0.3, cost=(1, 0.1)).sizes) == 3
    assert len(plan_sizes(range(1, 9), bytes=3e6, cost=(1_000_000, 0.1)).sizes) == 3  # type: ignore[arg-type]
    counts = {np.int64(3): np.int64(2), np.int64(5): np.int64(1)}
    assert plan_sizes(counts, cost=(1, 0.1)).sizes == (3, 5)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"histogram": {}}, "has no batch"),
        ({"histogram": [0]}, "of size 0"),
        ({"histogram": {4: -1}}, "-1 batches of size 4"),
        ({"histogram": [1], "bytes": 10}, "budget allows no capture: one takes 1000 B and 500 ms"),
        ({"histogram": [1], "seconds": -1.0}, "seconds is -1.0"),
        ({"histogram": [1], "cost": (-1, 0.0)}, r"cost is \(-1, 0.0\)"),
    ],
)
def test_wrong_values_are_named(given: dict, error: str) -> None:
    with pytest.raises(ArgumentError, match=error):
        plan_sizes(**{"cost": (1000, 0.5), **given})
