"""What a function reads of Python, and somebody changes between its calls."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import cgraph
from engines import Settings
from lab import Lab, fresh

SCALE = 2.0
SETTINGS: Any = Settings(2.0)


def scaled(x: Tensor) -> Tensor:
    """By globals."""
    return x * SCALE + SETTINGS.scale  # type: ignore[no-any-return]


def test_globals_and_variables_of_a_closure_may_change(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    by = 2.0

    def closed(x: Tensor) -> Tensor:
        return x * by

    module = sys.modules[__name__]
    graphed, other = cgraph.graphed(scaled), cgraph.graphed(closed)
    for scale in (2.0, 0.5, 3.0):
        monkeypatch.setattr(module, "SCALE", scale)
        monkeypatch.setattr(module, "SETTINGS", Settings(-scale))
        by = scale
        x = fresh(lab, 3)
        assert torch.equal(graphed(x), x * scale - scale)
        assert torch.equal(other(x), x * scale)


def test_how_much_a_dropout_drops_may_change(lab: Lab) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)).to(lab.device)
    graphed = cgraph.graphed(net)
    with torch.no_grad():
        graphed(fresh(lab, 4, 3))
        for drop, is_any in ((1.0, False), (0.0, True)):
            net[1].p = drop
            x = fresh(lab, 4, 3)
            expected = net[0](x) if is_any else torch.zeros_like(x)
            assert_close(graphed(x), expected)
