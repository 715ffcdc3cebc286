"""``cgraph.metrics``: counts that only grow, and that agree with reports."""

from __future__ import annotations

import pytest

import cgraph
from lab import Lab, fresh

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*runs eagerly:cgraph.errors.EagerWarning"),
    pytest.mark.filterwarnings("ignore:.*had a new shape:cgraph.errors.EagerWarning"),
]


def counted(name: str, function: str) -> float:
    """Return one sample of a graphed function."""
    return cgraph.metrics()[f'cgraph_{name}{{door="graphed",function="{function}"}}']


def test_metrics_count_what_reports_count(lab: Lab) -> None:
    def double(x):  # type: ignore[no-untyped-def]
        return x * 2

    graphed = cgraph.graphed(double)
    for _ in range(5):
        graphed(fresh(lab, 3))
    name = graphed.report().name
    counts = {"replays": 4, "eager_calls": 1, "captures": 1, "recaptures": 0}
    assert {one: counted(f"{one}_total", name) for one in counts} == counts


def test_eager_keys_are_counted_by_cause(lab: Lab) -> None:
    def read(x):  # type: ignore[no-untyped-def]
        return x.sum().item()

    graphed = cgraph.graphed(read)
    for _ in range(3):
        graphed(fresh(lab, 3))
    labels = f'door="graphed",function="{graphed.report().name}",state="eager"'
    assert cgraph.metrics()[f'cgraph_keys{{{labels},cause="CG-HOST-READ"}}'] == 1


def test_counts_outlast_forgotten_keys_evictions_and_a_reset(lab: Lab) -> None:
    def scaled(x):  # type: ignore[no-untyped-def]
        return x * 3

    graphed = cgraph.graphed(scaled, max_graphs=2)
    for rows in range(1, 7):
        for _ in range(3):
            graphed(fresh(lab, rows))
    for rows in range(10, 310):
        graphed(fresh(lab, rows))
    name = graphed.report().name
    before = {"replays": 12, "eager_calls": 306, "captures": 6, "recaptures": 0}
    assert {one: counted(f"{one}_total", name) for one in before} == before
    graphed.reset()
    assert {one: counted(f"{one}_total", name) for one in before} == before
    for _ in range(3):
        graphed(fresh(lab, 1))
    assert counted("captures_total", name) == 7
