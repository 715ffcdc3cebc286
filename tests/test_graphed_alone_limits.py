"""Ladders of captures alone whose sizes and hooks have something to do with each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from cgraph import _core
from cgraph._functions import ladder
from cgraph._functions.capturing import Capturing
from cgraph._functions.claims import claimed
from cgraph.errors import CaptureError, InstantiateError, StateError
from graphed_calls import misses, quiet, states
from lab import Lab, SimLab, fresh
from ladders import SIZES, doubled, nth, refuse, require_right, require_whole

ALONE: dict[str, Any] = {"warmup": 0, "preserve_state": False}


class Counter(nn.Module):
    """A module with a number."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    """Calls that record gradients look for more than captures do."""
    with torch.no_grad():
        yield


def captured(function: Any, lab: Lab, **options: Any) -> cgraph.functions.GraphedFunction:
    """The function with a ladder of all sizes."""
    graphed = cgraph.graphed(function, sizes=SIZES, **ALONE, **options)
    return graphed.capture(fresh(lab, max(SIZES), 5), progress=False)


def test_a_container_that_all_sizes_are_returned_in_has_each_ones_own_tensors(lab: Lab) -> None:
    box: dict[str, Tensor] = {}

    def boxed(x: Tensor) -> dict[str, Tensor]:
        box["y"] = torch.relu(x * 2)
        return box

    function = captured(boxed, lab)
    for rows in SIZES:
        x = fresh(lab, rows, 5)
        assert torch.equal(function(x)["y"], torch.relu(x * 2))


@pytest.mark.parametrize("broken", [None, 4, 2])
def test_a_held_result_in_memory_that_a_larger_size_computes_with_is_cloned(
    lab: Lab, broken: int | None
) -> None:
    def folded(x: Tensor) -> Tensor:
        rows = x.shape[0]
        if rows == 8:
            twice = x * 2
            return (twice + 1).sum(0)
        # It lies where the largest size has computed something.
        tall = torch.cat([x] * (8 // rows)) * 3
        if rows == broken:
            cgraph.eager_break(torch.relu)(tall[:1].clone())
        return tall

    function = cgraph.graphed(
        folded, sizes=[2, 4, 8], check_padding=False, on_held="clone", **ALONE
    )
    function.capture(fresh(lab, 8, 5), progress=False)
    for rows in (2, 4):
        kept = function(fresh(lab, rows, 5))
        right = kept.clone()
        function(fresh(lab, 8, 5))
        assert torch.equal(kept, right)


def test_graphs_are_numbered_in_the_order_of_their_captures(lab: Lab) -> None:
    graphs: list[cgraph.CUDAGraph] = []
    function = captured(doubled, lab)
    with cgraph.register_graph_replay_start_hook(graphs.append):
        require_right(function, lab, sorted(SIZES, reverse=True))
    numbers = [int(graph._name.removeprefix("graph ")) for graph in graphs]
    assert numbers == sorted(numbers)
    assert len({*numbers}) == len(SIZES)


def test_a_gradient_scaler_that_each_size_uses_is_put_back_behind_each(lab: Lab) -> None:
    net = nn.Linear(5, 5, device=lab.device)
    net.weight.grad = torch.ones_like(net.weight)
    optimizer = torch.optim.SGD([net.weight], lr=0.1)
    scaler = torch.amp.GradScaler(lab.device)
    scaler.scale(torch.ones(1, device=lab.device))

    def unscaled(x: Tensor) -> Tensor:
        scaler.unscale_(optimizer)
        return torch.relu(x * 2)

    function = captured(unscaled, lab)
    assert states(function) == ["captured"] * len(SIZES)


def test_a_setting_of_an_optimizer_counts_only_for_the_sizes_that_it_steps_in(lab: Lab) -> None:
    nets = [nn.Linear(5, 5, device=lab.device) for _ in range(2)]
    for net in nets:
        net.weight.grad = torch.ones_like(net.weight)
    first, second = (torch.optim.SGD([net.weight], lr=0.1) for net in nets)

    def stepped(x: Tensor) -> Tensor:
        (first if x.shape[0] == 8 else second).step()
        return torch.relu(x * 2)

    function = captured(stepped, lab).freeze()
    first.param_groups[0]["lr"] = 5.0
    require_right(function, lab, [size for size in SIZES if size < 8])
    with pytest.raises(StateError, match="setting lr of an optimizer"):
        function(fresh(lab, 8, 5))


def test_a_function_that_switches_its_module_is_captured_once_that_is_switched(lab: Lab) -> None:
    class Switching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2 if self.training else x * 3
            self.train(False)
            return y

    net = Switching()
    with pytest.raises(CaptureError, match="changes training from True to False"):
        captured(net, lab)
    assert net.training
    net(fresh(lab, 1, 5))
    function = captured(net, lab)
    assert not any("training" in key.key for key in function.report().keys)
    for rows in (6, 4, 1):
        x = fresh(lab, rows, 5)
        with misses() as seen:
            assert torch.equal(function(x), x * 3)
        assert not seen
    net.train()
    x = fresh(lab, 8, 5)
    assert torch.equal(function(x), x * 2)
    assert not net.training


def test_a_function_that_forgets_all_in_a_capture_is_captured_for_the_sizes_behind(
    lab: Lab,
) -> None:
    forget = nth(3, lambda: function.reset())

    def forgetful(x: Tensor) -> Tensor:
        forget()
        return doubled(x)

    function = cgraph.graphed(forgetful, sizes=SIZES, **ALONE)
    function.capture(fresh(lab, 8, 5), progress=False)
    assert states(function) == ["captured"] * (len(SIZES) - 3)
    require_whole(function, lab)


def test_garbage_of_one_capture_does_not_keep_memory_from_the_next(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where somebody has frozen the collector, as the tests, a ladder holds it off as a whole.
    monkeypatch.setattr(ladder, "gc_frozen", nullcontext)

    class Node:
        me: Any
        memory: Tensor

    def littered(x: Tensor) -> Tensor:
        node = Node()
        node.me, node.memory = node, x.new_empty(1 << 20) + x.sum()
        for _ in range(3000):
            other = Node()
            other.me = other
        return torch.relu(x * 2)

    function = captured(littered, lab)
    grown = [key.recorded.footprint.reserved for key in function._capturing.keys.values()]  # type: ignore[union-attr]
    assert sum(grown[2:]) < 3 << 22


@pytest.mark.parametrize("number", [1, 3])
def test_a_hook_that_lets_the_graph_of_an_open_capture_go_is_told_so(lab: Lab, number: int) -> None:
    reset = nth(number, lambda graph: graph.reset())
    function = cgraph.graphed(doubled, sizes=SIZES, **ALONE)
    with (
        cgraph.register_graph_capture_start_hook(reset),
        pytest.raises(StateError, match="without a capture"),
    ):
        function.capture(fresh(lab, 8, 5), progress=False)
    assert states(function) == ["captured"] * (number - 1) + ["eager"]
    require_whole(function, lab)


def test_a_hook_at_the_begin_of_a_capture_finds_the_graphs_before_it(lab: Lab) -> None:
    seen: list[cgraph.CUDAGraph] = []

    def look(graph: cgraph.CUDAGraph) -> None:
        assert all(one.memory().nodes for one in seen)
        seen.append(graph)

    with cgraph.register_graph_capture_start_hook(look):
        function = captured(doubled, lab)
    assert len(seen) == len(SIZES)
    seen.clear()
    require_whole(function, lab)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_what_comes_while_graphs_are_made_leaves_no_key_that_waits(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    keep, fail = Capturing.keep, nth(2, lambda: refuse(error, "enough"))

    def fail_once(*args: Any) -> None:
        fail()
        keep(*args)

    function = cgraph.graphed(doubled, sizes=SIZES, **ALONE)
    with monkeypatch.context() as patch, pytest.raises(error, match="enough"):
        patch.setattr(Capturing, "keep", fail_once)
        function.capture(fresh(lab, 8, 5), progress=False)
    assert not any(key.is_awaited for key in function._capturing.keys.values())
    left = len(SIZES) - 1 if error is MemoryError else 0
    assert states(function).count("captured") == left
    require_whole(function, lab)


def test_a_late_error_names_its_key_and_leaves_what_breaks_have_done(lab: Lab) -> None:
    class Counting(Counter):
        def counted(self, x: Tensor) -> Tensor:
            self.count += 1
            return x

        def forward(self, x: Tensor) -> Any:
            if x.shape[0] == 8:
                return {1}
            return cgraph.eager_break(self.counted)(torch.relu(x * 2)) if x.shape[0] == 4 else x

    net = Counting()
    function = cgraph.graphed(net, sizes=[2, 4, 8], **ALONE)
    with pytest.raises(CaptureError, match="the result has a set") as caught:
        function.capture(fresh(lab, 8, 5), progress=False)
    assert "float32[8, 5]" in str(getattr(caught.value, "__notes__", caught.value))
    assert net.count == 1
    assert states(function) == ["eager", "captured", "captured"]


def test_sizes_that_are_all_captured_need_no_pool(lab: Lab) -> None:
    pool = cgraph.graph_pool_handle()
    function = captured(doubled, lab, pool=pool)
    with claimed(pool):
        function.capture(fresh(lab, 8, 5), progress=False)
    require_whole(function, lab)


def test_keys_that_were_known_before_are_not_forgotten_where_a_size_fails(lab: Lab) -> None:
    fails = False

    def picky(x: Tensor) -> Tensor:
        if fails:
            raise LookupError("not now")
        return doubled(x)

    function = cgraph.graphed(picky, **ALONE)
    x = fresh(lab, 8, 5)
    function.capture(x, sizes=[2, 4, 8], progress=False)
    for key in function._capturing.keys.values():
        function._capturing.limits.drop(key, "evicted")
    fails = True
    with pytest.raises(LookupError, match="not now"):
        function.capture(x, sizes=[2, 4, 6, 8], progress=False)
    assert states(function) == ["evicted"] * 3
    fails = False
    with quiet():
        function.capture(x, sizes=[2, 4, 6, 8], progress=False)
    assert states(function) == ["captured"] * 4
    assert [len(key.rerecorded) for key in function.report().keys] == [1, 1, 1, 0]
    require_right(function, lab, [2, 4, 6, 8])


def test_a_callback_that_forgets_all_while_graphs_are_made_leaves_none_that_serves_calls(
    lab: Lab,
) -> None:
    factor = 2.0

    def odd(x: Tensor) -> Any:
        y = torch.relu(x * factor)
        return {1} if x.shape[0] == 2 else y

    function = cgraph.graphed(odd, sizes=[2, 4, 8], **ALONE)
    forget = nth(1, lambda _: function.reset())
    with (
        cgraph.register_graph_destroy_hook(forget),
        pytest.raises(CaptureError, match="the result has a set"),
    ):
        function.capture(fresh(lab, 8, 5), progress=False)
    assert states(function) == []
    factor = 3.0
    for rows in (8, 4):
        x = fresh(lab, rows, 5)
        assert torch.equal(function(x), torch.relu(x * 3))


def test_a_graph_that_the_driver_refuses_is_let_go_outside_of_all_captures(sim: SimLab) -> None:
    other = cgraph.graphed(torch.cos, **ALONE)
    found: list[list[str]] = []

    def call() -> None:
        other(fresh(sim, 3))
        found.append(states(other))

    def capture(function: cgraph.functions.GraphedFunction) -> None:
        with cgraph.register_graph_capture_end_hook(lambda g: g.register_destroy_callback(call)):
            function.capture(fresh(sim, 8, 5), progress=False)

    simulator, function = sim.simulator, cgraph.graphed(doubled, sizes=[2, 4, 8], **ALONE)
    start = len(simulator.calls())
    capture(function)
    names = [str(call) for call in simulator.calls()[start:]]
    function.reset()
    other.reset()
    found.clear()
    simulator.fail_call(next(n for n, name in enumerate(names) if "Instantiate" in name), 2)
    with pytest.raises(InstantiateError):
        capture(function)
    simulator.clear_faults()
    assert found == [["captured"]]
    function.reset()
    other.reset()


def test_what_the_function_raises_comes_out_also_where_the_driver_fails_then(sim: SimLab) -> None:
    def failing(x: Tensor) -> Tensor:
        if x.shape[0] == 2:
            sim.simulator.fail_call(number, 2)
            raise LookupError("the function's")
        return doubled(x)

    for nth_call in range(24):
        number = nth_call
        function = cgraph.graphed(failing, sizes=[2, 4, 8], **ALONE)
        with pytest.raises(LookupError, match="the function's"):
            function.capture(fresh(sim, 8, 5), progress=False)
        sim.simulator.clear_faults()
        require_right(function, sim, [4, 8])


def test_hooks_hear_of_the_end_of_a_capture_that_is_refused(lab: Lab) -> None:
    class Counting(Counter):
        def forward(self, x: Tensor) -> Tensor:
            self.count += x.shape[0] == 4
            return doubled(x)

    ended: list[object] = []
    with (
        cgraph.register_graph_destroy_hook(ended.append),
        pytest.raises(CaptureError, match="changes count"),
    ):
        captured(Counting(), lab)
    assert ended


def test_an_exec_goes_to_no_graph_that_was_captured_again_meanwhile(lab: Lab) -> None:
    def capture(graph: cgraph.CUDAGraph, value: float) -> Tensor:
        graph.enable_debug_mode()
        with cgraph.graph(graph):
            return x + value

    graph, other, x = cgraph.CUDAGraph(), cgraph.CUDAGraph(), fresh(lab, 3)
    capture(graph, 1.0)
    capture(other, 2.0)
    results: list[Tensor] = []

    def graphs() -> Iterator[cgraph.CUDAGraph]:
        yield graph
        graph.reset()
        results.append(capture(graph, 7.0))
        yield other

    first, second = _core.instantiate_all(graphs(), 2)
    assert "was reset while it was instantiated" in str(first)
    assert second is None
    graph.replay()
    assert torch.equal(results[0], x + 7)
