"""Tests of capture safety for CI without a GPU; run it by ``pytest examples/capture_safety.py``."""

import pytest
import torch

import cgraph


def step(x):
    return x / x.max()


def unsafe(x):
    return x / x.max().item()


def test_a_capture_refuses_nothing():
    with cgraph.sim.use():
        found = cgraph.explain(step, torch.rand(8))
        assert found.ok, str(found)


def test_replays_equal_eager():
    with cgraph.sim.use():
        fast = cgraph.graphed(step, on_fail="raise")
        for _ in range(4):
            x = torch.rand(8)
            assert torch.equal(fast(x), step(x))
        assert fast.report().replays == 3


def test_a_host_read_is_found_with_its_line():
    with cgraph.sim.use():
        [found] = cgraph.explain(unsafe, torch.rand(8)).findings
        assert (found.kind, found.source) == ("host read", "return x / x.max().item()")


if __name__ == "__main__":
    raise SystemExit(pytest.main(["-q", "-p", "no:cacheprovider", __file__]))
