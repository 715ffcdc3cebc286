"""Graphed functions that share a pool, on several streams."""

from __future__ import annotations

import pytest
import torch

import cgraph

pytestmark = pytest.mark.gpu


def test_functions_of_one_pool_run_one_after_the_other_whatever_their_streams() -> None:
    weights = [torch.randn(512, 512, device="cuda") / 512**0.5 for _ in range(2)]

    def chain(x: torch.Tensor, place: int) -> torch.Tensor:
        for _ in range(40):
            x = torch.tanh(x @ weights[place])
        return x

    pool = cgraph.graph_pool_handle()
    functions = [
        cgraph.graphed(lambda x, place=place: chain(x, place), pool=pool) for place in range(2)
    ]
    streams = [torch.cuda.Stream() for _ in range(2)]
    inputs = [torch.randn(512, 512, device="cuda") for _ in range(2)]
    expected = [chain(x, place) for place, x in enumerate(inputs)]
    torch.cuda.synchronize()
    for _ in range(20):
        found = []
        for function, stream, x in zip(functions, streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                found.append(function(x))
        torch.cuda.synchronize()
        for one, right in zip(found, expected, strict=True):
            torch.testing.assert_close(one, right)
