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
    """The benches' module: in a bundle for a GPU machine, they lie one folder further up."""
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
        model(*tokens(max(sizes)))  # makes cuBLAS's handle, which no capture can
        graphed = cgraph.graphed(
            model, sizes=sizes, warmup=0, preserve_state=False, measure=False, on_fail="raise"
        )
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
                # Results are those of these tokens, and not what was there before.
                assert not torch.equal(found[:1], previous)
            previous = found[:1].clone()
        assert graphed.report().captured == 51
        assert all(key.state == "captured" for key in graphed.report().keys)
