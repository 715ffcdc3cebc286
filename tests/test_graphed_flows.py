"""Breaks in functions whose results require gradients: these get back through the break."""

from __future__ import annotations

import copy

import torch

from broken import scaled
from flow_calls import Around, check, twins
from lab import Lab
from networks import leaf


def test_sizes_with_breaks_are_captured_ahead_and_frozen(lab: Lab) -> None:
    graphed, mine, eager = twins(lab, Around(scaled), sizes=[2, 4])
    before = copy.deepcopy(mine.state_dict())
    graphed.capture(leaf(lab, 4, 6), progress=False).freeze()
    assert all(torch.equal(one, before[name]) for name, one in mine.state_dict().items())
    assert all(one.grad is None for one in mine.parameters())
    for rows in (4, 2, 4):
        check(graphed, mine, eager, leaf(lab, rows, 6))
    assert graphed.report().replays == 3
