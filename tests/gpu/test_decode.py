"""The decode model of the benches at all sizes that inference servers capture."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import cgraph

pytestmark = pytest.mark.gpu

# Of the largest score. The kernels of matrix products differ from size to size, in bf16.
TOLERANCE = 0.02


@pytest.fixture
def decode(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import the benches' module: in a bundle for a GPU machine, it lies one folder higher."""
    benches = Path(__file__).parents[2] / "benches"
    monkeypatch.setattr(sys, "path", [str(benches / "python"), str(benches), *sys.path])
    import decode

    return decode


def test_all_sizes_of_a_decode_model_equal_eager_padded_or_not(decode: Any) -> None:
    sizes = decode.SIZES
    assert len(sizes) == 51

    def tokens(rows: int) -> tuple[Tensor, Tensor]:
        place = torch.randint(256, (1,), device="cuda")
        return torch.randint(32_000, (rows,), device="cuda"), place

    with torch.no_grad():
        model = decode.Decode().cuda().bfloat16().eval()
        model(*tokens(max(sizes)))  # makes cuBLAS's handle, which no capture can make
        # Nothing reads the padding's writes to rows of the cache after those of the call.
        graphed = cgraph.graphed(model, sizes=sizes, check_padding=False, on_fail="raise")
        graphed.capture(*tokens(max(sizes)), progress=False).freeze()
        assert graphed.report().captured == 51
        previous = None
        for rows in (*sizes, 3, 5, 100, 250, 500):
            given = tokens(rows)
            found = graphed(*given).clone()
            eager = model(*given)
            assert found.shape == eager.shape == (rows, 32_000)
            largest = eager.float().abs().max()
            assert (found.float() - eager.float()).abs().max() <= TOLERANCE * largest, rows
            if previous is not None:
                # Results are those of these tokens, not earlier ones.
                assert not torch.equal(found[:1], previous)
            previous = found[:1].clone()
        assert graphed.report().captured == 51
        assert all(key.state == "captured" for key in graphed.report().keys)


def test_a_comparison_takes_less_than_three_times_a_cache_and_is_made_once() -> None:
    class Cached(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(16, 4 << 20, dtype=torch.bfloat16))

        def forward(self, x: Tensor, place: Tensor) -> Tensor:
            self.cache[:1].index_copy_(1, place, x[:1])
            return x * 2

    model = Cached().cuda()
    graphed = cgraph.graphed(model, sizes=[8], on_fail="raise")
    place = torch.tensor([3, 70_000], device="cuda")
    for _ in range(2):
        graphed(torch.rand(8, 2, device="cuda", dtype=torch.bfloat16), place)
    for rows in (5, 7):
        x = torch.rand(rows, 2, device="cuda", dtype=torch.bfloat16)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found = graphed(x, place).clone()
        taken = torch.cuda.max_memory_allocated() - before
        assert torch.equal(found, x * 2)
        assert taken < (3 * model.cache.nbytes if rows == 5 else 1 << 20)
    assert [key.state for key in graphed.report().keys] == ["captured"]
