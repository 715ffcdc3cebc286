"""Pools that several users share: functions on several streams, and `use_mem_pool`."""

from __future__ import annotations

import pytest
import torch

import cgraph
from cgraph.errors import ForeignError
from lab import CudaLab, fresh
from pools import MIB, capture

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


def test_a_capture_into_a_pool_that_use_mem_pool_is_using_leaves_that_use_alone() -> None:
    lab, pool = CudaLab(), cgraph.MemPool()
    x = fresh(lab, 8)
    with torch.cuda.use_mem_pool(pool):
        for _ in range(2):
            with pytest.raises(ForeignError, match="use_mem_pool is using it"):
                capture(lambda: x * 2, pool)
        inside = fresh(lab, MIB)
    assert lab.in_pool(inside, pool.id)
    graph, y = capture(lambda: x * 2, pool)
    x.normal_()
    graph.replay()
    assert torch.equal(y, x * 2)
