"""Graphs of many sizes, which are captured one after the other and instantiated at once."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from cgraph import _driver
from cgraph.errors import CaptureError
from graphed_calls import misses, states
from lab import Lab, fresh
from ladders import SIZES, doubled, require_right


def with_break(x: Tensor) -> Tensor:
    return as_it_is(x * 2) + 1


@cgraph.eager_break
def as_it_is(x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize("keep_templates", [False, True])
def test_every_size_of_a_ladder_is_instantiated_and_right(
    lab: Lab, ladder: dict[str, Any], keep_templates: bool
) -> None:
    function = cgraph.graphed(doubled, sizes=SIZES, keep_templates=keep_templates, **ladder)
    function.capture(fresh(lab, 3, 5)).freeze()
    with misses() as seen:
        require_right(function, lab, SIZES)
    assert not seen
    kept = [key.recorded.is_kept for key in function._capturing.keys.values()]  # type: ignore[union-attr]
    assert kept == [keep_templates] * len(SIZES)
    assert all(key.capture_seconds > 0 for key in function.report().keys)


@pytest.mark.parametrize("warmup", [0, 1])
def test_a_ladder_of_captures_alone_waits_for_the_device_only_where_it_makes_static_inputs(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, warmup: int
) -> None:
    waits = []
    driver = type(_driver.current())
    synchronize = driver.synchronize
    monkeypatch.setattr(driver, "synchronize", lambda self: (waits.append(1), synchronize(self)))
    function = cgraph.graphed(doubled, sizes=SIZES, warmup=warmup, measure=False)
    function.capture(fresh(lab, 3, 5))
    assert (len(waits) == 1) is (warmup == 0)
    # The next one fits into the memory of these, and the one after it does not.
    for rows, count in ((7, 1), (16, 2)):
        function.capture(fresh(lab, 3, 5), sizes=[rows])
        assert (len(waits) == count) is (warmup == 0)
    require_right(function, lab, [*SIZES, 7, 16])


def test_a_ladder_with_breaks_waits_for_replays_before_it_writes_what_they_read(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = cgraph.graphed(with_break, warmup=0, measure=False)
    function.capture(fresh(lab, 8, 5), sizes=[8])
    order: list[str] = []
    driver, copy = type(_driver.current()), Tensor.copy_
    synchronize = driver.synchronize

    def wait(self: _driver.Driver) -> None:
        order.append("wait")
        synchronize(self)

    def write(self: Tensor, other: Tensor) -> Tensor:
        order.append("write")
        return copy(self, other)

    monkeypatch.setattr(driver, "synchronize", wait)
    monkeypatch.setattr(Tensor, "copy_", write)
    x = fresh(lab, 8, 5)
    function.capture(x, sizes=[4])
    monkeypatch.undo()
    assert order.index("wait") < order.index("write")
    assert torch.equal(function(x[:4]), with_break(x[:4]))


@pytest.mark.parametrize("is_put_back", [False, True])
def test_a_parameter_that_is_replaced_between_the_captures_of_a_ladder_is_not_overlooked(
    lab: Lab, ladder: dict[str, Any], is_put_back: bool
) -> None:
    net = nn.Linear(6, 6, device=lab.device)
    first, second = net.weight, nn.Parameter(torch.randn_like(net.weight))
    captured: list[object] = []

    def replace(graph: object) -> None:
        captured.append(graph)
        if len(captured) == 2:
            net.weight = second
        elif len(captured) == len(SIZES) and is_put_back:
            net.weight = first

    function = cgraph.graphed(lambda x: net(x), sizes=SIZES, **ladder)
    with torch.no_grad():
        net(fresh(lab, 3, 6))  # cuBLAS cannot begin inside a capture
        with cgraph.register_graph_capture_end_hook(replace):
            function.capture(fresh(lab, 3, 6), progress=False)
        assert net.weight is (first if is_put_back else second)
        for rows in SIZES:
            x = fresh(lab, rows, 6)
            assert torch.allclose(function(x), net(x), atol=1e-5)
    rerecorded = [[one.reason for one in key.rerecorded] for key in function.report().keys]
    stale = [rows > 4 for rows in sorted(SIZES, reverse=True)]  # the first two captures
    assert rerecorded == [["moved"] * (old is not is_put_back) for old in stale]


def test_sizes_that_are_to_be_measured_are_instantiated_one_by_one(lab: Lab) -> None:
    function = cgraph.graphed(doubled, sizes=SIZES)
    function.capture(fresh(lab, 3, 5))
    for key in function.report().keys:
        assert key.graph_seconds is not None
        assert key.eager_seconds is not None
    require_right(function, lab, SIZES)


class Switched(nn.Module):
    """What it computes depends on whether it is training."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.training else x * 3


def test_graphs_of_a_ladder_serve_modules_that_train_as_they_did_at_the_capture_of_each(
    lab: Lab, ladder: dict[str, Any]
) -> None:
    net, count = Switched(), 0

    def switch(graph: cgraph.CUDAGraph) -> None:
        nonlocal count
        count += 1
        if count == 3:
            net.eval()

    function = cgraph.graphed(net, sizes=SIZES, **ladder)
    with cgraph.register_graph_capture_end_hook(switch):
        function.capture(fresh(lab, 8, 5))
    for rows, training in [(8, True), (6, True), (3, False), (2, False), (1, False)]:
        net.train(training)
        x = fresh(lab, rows, 5)
        with misses() as seen:
            assert torch.equal(function(x), net(x))
        assert not seen
        net.train(not training)
        assert torch.equal(function(x), net(x))


def test_a_ladder_of_more_sizes_than_keys_without_a_graph_are_remembered_is_captured_whole(
    lab: Lab,
) -> None:
    sizes = list(range(1, 271))
    function = cgraph.graphed(doubled, sizes=sizes, warmup=0, measure=False)
    function.capture(fresh(lab, 270, 2), progress=False)
    assert states(function) == ["captured"] * len(sizes)
    x = fresh(lab, 200, 2)
    assert torch.equal(function(x), doubled(x))


def test_graphs_that_do_not_fit_at_once_are_instantiated_one_by_one(
    lab: Lab, ladder: dict[str, Any]
) -> None:
    function = cgraph.graphed(doubled, sizes=SIZES, max_graphs=3, **ladder)
    function.capture(fresh(lab, 3, 5))
    assert states(function).count("captured") == 3
    require_right(function, lab, SIZES)


def test_a_ladder_goes_on_beside_keys_that_were_captured_before(
    lab: Lab, ladder: dict[str, Any]
) -> None:
    function = cgraph.graphed(doubled, sizes=SIZES, **ladder)
    require_right(function, lab, [4])
    function.capture(fresh(lab, 3, 5), sizes=[4, 8])
    function.capture(fresh(lab, 3, 5))
    assert sorted(states(function)) == ["captured"] * len(SIZES)
    require_right(function, lab, SIZES)


def test_a_ladder_with_breaks_or_gradients_is_captured_whole(lab: Lab) -> None:
    broken = cgraph.graphed(
        lambda x: cgraph.eager_break(torch.relu)(x * 2), sizes=[2, 4], measure=False
    )
    broken.capture(fresh(lab, 4, 5))
    require_right(broken, lab, [2, 4])
    net = nn.Linear(5, 5).to(lab.device)
    trained = cgraph.graphed(net, sizes=[2, 4], measure=False)
    trained.capture(fresh(lab, 4, 5))
    x = fresh(lab, 2, 5)
    found = torch.autograd.grad(trained(x).square().sum(), net.weight)[0]
    expected = torch.autograd.grad(net(x).square().sum(), net.weight)[0]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("warmup", [0, 1])
def test_a_break_sees_the_rows_of_the_call_when_its_size_is_captured(lab: Lab, warmup: int) -> None:
    seen: list[list[float]] = []

    def look(x: Tensor) -> Tensor:
        seen.append(x.tolist())
        return x + 1

    function = cgraph.graphed(
        lambda x: cgraph.eager_break(look)(x * 2) * 3,
        sizes=[1, 2, 4],
        warmup=warmup,
        measure=False,
        preserve_state=False,
    )
    for rows in (4, 2, 1):  # the first ones of the same memory
        seen.clear()
        x = fresh(lab, rows)
        function.capture(x, sizes=[rows])
        assert seen == [(x * 2).tolist()] * (1 + warmup)
    x = fresh(lab, 2)
    given = x.clone()
    assert torch.equal(function(x), (x * 2 + 1) * 3)
    assert torch.equal(x, given)


def test_a_capture_ahead_inside_another_one_is_refused_and_leaves_that_as_it_is(lab: Lab) -> None:
    graphed, graph, x = cgraph.graphed(torch.cos), cgraph.CUDAGraph(), fresh(lab, 3)
    with cgraph.graph(graph):
        y = x + 1
        with pytest.raises(CaptureError, match="inside another capture"):
            graphed.capture(x)
    graph.replay()
    assert torch.equal(y, x + 1)
    assert graphed.capture(x).report().captured == 1


LATE = """
import atexit, threading, torch, cgraph

def doubled(x):
    return torch.relu(x * 2)

def capture(wait):
    if wait:
        threading.main_thread().join()
    function = cgraph.graphed(doubled, sizes=[1, 2, 4], measure=False)
    x = torch.randn(4, 5)
    function.capture(x, progress=False)
    assert torch.equal(function(x), torch.relu(x * 2))
    print("captured", function.report().captured)

threading.Thread(target=capture, args=(True,)).start()
atexit.register(capture, False)
"""


def test_a_ladder_is_captured_after_the_main_thread_has_ended_and_at_exit() -> None:
    """Python starts no threads then: the driver's work takes others, or this one."""
    done = subprocess.run(
        [sys.executable, "-c", LATE],
        env={**os.environ, "CGRAPH_DRIVER": "sim"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "captured 3\n" * 2, done.stderr
