"""What a model in pieces cannot have: each error names the line or the input, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cgraph.piecewise import PiecewiseBackend, mark_size
from lab import Lab, fresh

pytestmark = pytest.mark.usefixtures("own_compiler")


def in_pieces(model: Callable[..., Any], **fields: Any) -> tuple[PiecewiseBackend, Any]:
    backend = PiecewiseBackend(capture_sizes=[4, 8], compiler="eager", **fields)
    return backend, torch.compile(model, backend=backend)


def test_a_part_of_the_open_size_that_is_broadcast_is_named_with_its_line(lab: Lab) -> None:
    _, fast = in_pieces(lambda x: x - x[:1])
    with pytest.raises(
        RuntimeError, match=r"test_piece_refusals.py:\d+.*narrow\(0, 0, 1\)"
    ) as error:
        fast(mark_size(fresh(lab, 8, 4)))
    assert "Runtime assertion failed" in str(error.value)
    torch.compiler.reset()
    _, fast = in_pieces(lambda x: x - x.narrow(0, 0, 1))
    x = fresh(lab, 8, 4)
    torch.testing.assert_close(fast(mark_size(x)), x - x[:1])


def test_a_model_that_fixes_the_marked_size_is_refused(lab: Lab) -> None:
    rows = fresh(lab, 4, 8)
    _, fast = in_pieces(lambda x: torch.tanh(x) + rows)
    with pytest.raises(RuntimeError, match=r"fixes the size that is marked.*shape \(4, 8\)"):
        fast(mark_size(fresh(lab, 4, 8)))


def test_a_branch_on_the_open_size_is_named_with_its_line(lab: Lab) -> None:
    def model(x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] > 2 else x * 3

    _, fast = in_pieces(model)
    with pytest.raises(RuntimeError, match=r"in line \d+ of .*test_piece_refusals.py.*fullgraph"):
        fast(mark_size(fresh(lab, 8, 4)))


def test_a_call_in_another_mode_than_the_compilation_is_refused_by_the_mode(lab: Lab) -> None:
    _, fast = in_pieces(lambda x: torch.tanh(x) + 1)
    fast(mark_size(fresh(lab, 4, 8)))
    with torch.inference_mode():
        x = fresh(lab, 4, 8)
        with pytest.raises(RuntimeError, match=r"in the mode in which it was compiled"):
            fast(x)


def test_the_real_cache_may_come_after_a_dry_run_with_a_small_one(lab: Lab) -> None:
    backend, fast = in_pieces(
        lambda x, cache: torch.cumsum(x, 0) + cache[0], splitting_ops=["torch.cumsum"]
    )
    small, real = fresh(lab, 2, 16), fresh(lab, 64, 16)
    report = backend.dry_run(lambda n: fast(mark_size(fresh(lab, n, 16)), small), progress=False)
    assert sum(one.is_captured for one in report.sizes) == 2
    backend.warm_up(lambda n: fast(mark_size(fresh(lab, n, 16)), real), progress=False)
    for rows in (8, 4, 3, 8):
        x = fresh(lab, rows, 16)
        for cache in (real, small):
            torch.testing.assert_close(fast(mark_size(x), cache), torch.cumsum(x, 0) + cache[0])
    assert backend.counters.replays == 3
