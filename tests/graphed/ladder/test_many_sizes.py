"""Graphs of many sizes, which are captured one after the other."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

import cgraph
from cgraph.errors import CaptureError
from graphed_calls import states
from lab import Lab, fresh
from ladders import SIZES, doubled, require_right


class Switched(nn.Module):
    """A module whose result depends on its training flag."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.training else x * 3


def test_a_ladder_in_which_a_flag_changes_raises_and_puts_it_back(lab: Lab) -> None:
    net, count = Switched(), 0

    def switch(graph: cgraph.CUDAGraph) -> None:
        nonlocal count
        count += 1
        if count == 3:
            net.eval()

    function = cgraph.graphed(net, sizes=SIZES)
    with (
        cgraph.register_graph_capture_end_hook(switch),
        pytest.raises(CaptureError, match=r"self\.training.*Fix: make that state first"),
    ):
        function.capture(fresh(lab, 8, 5))
    assert net.training
    function.capture(fresh(lab, 8, 5), progress=False)
    for rows in SIZES:
        for training in (True, False):
            net.train(training)
            x = fresh(lab, rows, 5)
            assert torch.equal(function(x), net(x))


class Tabled(nn.Module):
    """A module that keeps a table for each number of rows, some of them out of sight."""

    def __init__(self, hides: bool) -> None:
        super().__init__()
        self.tables: dict[int, Tensor] = {}
        self.hidden = functools.lru_cache(None)(self.made)
        self.hides = hides

    def made(self, rows: int) -> Tensor:
        return torch.arange(rows, dtype=torch.float32, device=self.device)

    def forward(self, x: Tensor) -> Tensor:
        self.device = x.device
        if self.hides:
            return x * self.hidden(len(x))
        if len(x) not in self.tables:
            self.tables[len(x)] = self.made(len(x))
        return x * self.tables[len(x)]


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
@pytest.mark.parametrize("hides", [False, True])
@pytest.mark.parametrize("ahead", [False, True])
def test_what_a_function_keeps_for_each_size_has_contents_wherever_it_is_made(
    lab: Lab, ahead: bool, hides: bool
) -> None:
    net, twin = Tabled(hides), Tabled(hides)
    function = cgraph.graphed(net, sizes=[4, 8], check_padding=False)
    with torch.no_grad():
        net(fresh(lab, 8))
        if ahead:
            with contextlib.suppress(CaptureError):  # where it can detect that state is made
                function.capture(fresh(lab, 8), progress=False)
        for rows in (4, 8, 8, 4, 4, 8):
            x = fresh(lab, rows)
            assert torch.equal(function(x), twin(x))
            assert torch.equal(net(x), twin(x))


def test_a_ladder_of_more_sizes_than_keys_without_a_graph_are_remembered_is_captured_whole(
    lab: Lab,
) -> None:
    sizes = list(range(1, 271))
    function = cgraph.graphed(doubled, sizes=sizes)
    function.capture(fresh(lab, 270, 2), progress=False)
    assert states(function) == ["captured"] * len(sizes)
    x = fresh(lab, 200, 2)
    assert torch.equal(function(x), doubled(x))


def test_graphs_that_do_not_fit_at_once_are_instantiated_one_by_one(lab: Lab) -> None:
    function = cgraph.graphed(doubled, sizes=SIZES, max_graphs=3)
    function.capture(fresh(lab, 3, 5))
    assert states(function).count("captured") == 3
    require_right(function, lab, SIZES)


def test_a_ladder_goes_on_beside_keys_that_were_captured_before(lab: Lab) -> None:
    function = cgraph.graphed(doubled, sizes=SIZES)
    require_right(function, lab, [4])
    function.capture(fresh(lab, 3, 5), sizes=[4, 8])
    function.capture(fresh(lab, 3, 5))
    assert sorted(states(function)) == ["captured"] * len(SIZES)
    require_right(function, lab, SIZES)


def test_a_ladder_with_breaks_or_gradients_is_captured_whole(lab: Lab) -> None:
    broken = cgraph.graphed(lambda x: cgraph.eager_break(torch.relu)(x * 2), sizes=[2, 4])
    broken.capture(fresh(lab, 4, 5))
    require_right(broken, lab, [2, 4])
    net = nn.Linear(5, 5).to(lab.device)
    trained = cgraph.graphed(net, sizes=[2, 4])
    trained.capture(fresh(lab, 4, 5))
    x = fresh(lab, 2, 5)
    found = torch.autograd.grad(trained(x).square().sum(), net.weight)[0]
    expected = torch.autograd.grad(net(x).square().sum(), net.weight)[0]
    torch.testing.assert_close(found, expected)


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
    function = cgraph.graphed(doubled, sizes=[1, 2, 4])
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
