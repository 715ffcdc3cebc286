"""Padding that would show in gradients and in state beside random numbers is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import cgraph
from lab import Lab, fresh


@pytest.mark.parametrize("first", [3, 4])
def test_padding_that_shows_in_state_is_refused_beside_random_numbers(lab: Lab, first: int) -> None:
    # So many columns that no two calls drop the same ones.
    shift, total = torch.full((99,), 50.0, device=lab.device), torch.zeros(99, device=lab.device)
    drop = nn.Dropout(0.02)

    def run(x: Tensor) -> Tensor:
        y = drop(x) + shift
        total.copy_(y.sum(0))
        return y

    function = cgraph.graphed(run, sizes=[4])
    with pytest.warns(UserWarning, match="what the function writes is not as without padding"):
        for rows in (first, 3):
            y = function(fresh(lab, rows, 99))
            torch.testing.assert_close(total, y.sum(0))
