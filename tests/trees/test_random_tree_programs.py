"""Random programs whose steps take branches and keep some results: all is as eager."""

from __future__ import annotations

import pytest
import torch

from lab import Lab, fresh
from tree_programs import Program, in_tree

BODIES = [
    lambda x: torch.sin(x) * 0.5,
    lambda x: x @ x.t() * 0.1,
    lambda x: (x * 2).cumsum(0) * 0.2,
]


@pytest.mark.parametrize("seeds", range(10))
def test_programs_with_branches_and_held_results_equal_eager(lab: Lab, seeds: int) -> None:
    for seed in range(20):
        functions = [(in_tree(lab, one, fresh(lab, 4, 4)), one) for one in BODIES]
        Program(lab, 100 * seeds + seed, functions).run(8)
