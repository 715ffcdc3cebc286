"""Debug replays of graphed functions: steps, comparisons, poison."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from broken import fork_and_break, scaled, thrice
from cgraph import _driver
from cgraph.errors import ArgumentError, CompareError
from debug_calls import MANY, Unseen, equal, graphed, line_of
from lab import Lab, SimLab, fresh


def mixed(x: Tensor, w: dict[str, Tensor], scale: float = 2.0) -> tuple[Any, ...]:
    y = torch.softmax(x @ w["w"], dim=-1)
    top, places = y.topk(2)
    return x, {"y": y, "t": y.t()}, [top * scale, places], y[:1].expand(3, -1), scale


@pytest.mark.parametrize("debug", MANY)
def test_a_right_function_equals_eager_in_every_mode(lab: Lab, debug: str) -> None:
    run = graphed(mixed, debug)
    for shape in ((4, 8), (2, 8), (4, 8), (2, 8)):
        x, w = fresh(lab, *shape), {"w": fresh(lab, 8, 6)}
        result = run(x, w)
        assert result[0] is x
        assert equal(result, mixed(x, w))
    assert run.report().captured == 2


@pytest.mark.parametrize("debug", MANY)
def test_without_gradients_a_module_equals_eager_in_every_mode(lab: Lab, debug: str) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)).to(lab.device)
    run = graphed(module, debug)
    with torch.no_grad():
        for _ in range(3):
            x = fresh(lab, 4, 8)
            assert equal(run(x), module(x))


@pytest.mark.parametrize("debug", MANY)
def test_random_numbers_are_those_of_eager(lab: Lab, debug: str) -> None:
    def noisy(x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5) + torch.rand_like(x)

    run, x = graphed(noisy, debug), fresh(lab, 64)
    run(x)
    torch.manual_seed(5)
    found = [run(x).clone() for _ in range(3)]
    torch.manual_seed(5)
    assert equal(found, [noisy(x) for _ in range(3)])


@pytest.mark.parametrize("debug", MANY)
def test_breaks_run_and_results_equal_eager(lab: Lab, debug: str) -> None:
    run = graphed(thrice, debug)
    for _ in range(3):
        x = fresh(lab, 64)
        assert equal(run(x), thrice(x))


@pytest.mark.parametrize("debug", MANY)
def test_work_on_side_streams_equals_eager(lab: Lab, debug: str) -> None:
    side = lab.stream()
    run = graphed(lambda x: fork_and_break(lab, x, side), debug)
    for _ in range(3):
        x = fresh(lab, 64)
        found = run(x).clone()
        assert equal(found, fork_and_break(lab, x, side))


@pytest.mark.parametrize("debug", MANY)
def test_state_is_written_once_by_each_call(lab: Lab, debug: str) -> None:
    total, x = fresh(lab, 8), fresh(lab, 8)
    before, first = total.clone(), x.clone()

    def step(x: Tensor) -> Tensor:
        total.add_(x)
        x.mul_(2)
        return total * 1

    run = graphed(step, debug)
    for _ in range(3):
        result = run(x)
    assert equal(x, first * 8)
    assert equal(total, before + first * 7)
    assert equal(result, total)


@pytest.mark.parametrize("debug", MANY)
def test_padded_calls_equal_eager(lab: Lab, debug: str) -> None:
    run = graphed(lambda x: torch.relu(x) * 3, debug, sizes=[2, 4])
    for rows in (4, 3, 1, 2, 3):
        x = fresh(lab, rows, 5)
        assert equal(run(x), torch.relu(x) * 3)


factors = Unseen(2.0)


def stale(x: Tensor) -> dict[str, list[Tensor]]:
    y = torch.relu(x)
    z = y * factors[0]  # the stale line
    return {"out": [y, z + 1]}


@pytest.mark.parametrize("debug", ["compare", "sync,compare"])
def test_a_constant_that_has_changed_is_found_with_its_line(lab: Lab, debug: str) -> None:
    run, x = graphed(stale, debug), fresh(lab, 8).abs() + 1
    run(x)
    run(x)
    factors[0] = 3.0
    try:
        with pytest.raises(CompareError, match=r"stale.*Python ran only at the capture") as caught:
            run(x)
    finally:
        factors[0] = 2.0
    assert caught.value.output == "result['out'][1]"
    assert "aten.mul.Tensor" in str(caught.value.operator)
    assert line_of(__file__, "# the stale line") in str(caught.value.operator)
    run.reset()
    assert equal(run(x), stale(x))


def test_a_difference_leaves_all_state_as_before_the_call(lab: Lab) -> None:
    total, x, by = fresh(lab, 8), fresh(lab, 8).abs() + 1, Unseen(2.0)

    def step(x: Tensor) -> Tensor:
        total.add_(torch.rand_like(x) + x * by[0])
        return total.clone()

    run = graphed(step, "compare")
    run(x)
    run(x)
    before, by[0] = total.clone(), 5.0
    torch.manual_seed(3)
    expected = torch.rand_like(x)
    torch.manual_seed(3)
    with pytest.raises(CompareError):
        run(x)
    assert equal(total, before)
    assert torch.equal(torch.rand_like(x), expected)
    by[0] = 2.0
    assert equal(run(x), total)


def test_another_way_through_python_is_named(lab: Lab) -> None:
    way = Unseen("sin")

    def turn(x: Tensor) -> Tensor:
        y = x + 1
        return y.sin() if way[0] == "sin" else y.cos()

    run, x = graphed(turn, "compare"), fresh(lab, 8)
    run(x)
    run(x)
    way[0] = "cos"
    with pytest.raises(CompareError, match=r"eager runs aten.cos.default.*another way") as caught:
        run(x)
    assert "aten.sin.default" in str(caught.value.operator)


def test_a_loop_that_eager_runs_more_often_is_named(lab: Lab) -> None:
    count = Unseen(2)

    def loop(x: Tensor) -> Tensor:
        y = x + 1
        for _ in range(count[0]):
            y = torch.sin(y)
        return y

    run, x = graphed(loop, "compare"), fresh(lab, 8)
    run(x)
    run(x)
    count[0] = 3
    with pytest.raises(CompareError, match=r"runs aten.sin.default.*behind it.*another way"):
        run(x)


def test_the_segment_of_a_difference_is_named(lab: Lab) -> None:
    add = Unseen(1.0)

    def parts(x: Tensor) -> Tensor:
        y = scaled(x * 2)
        return scaled(y + 3) + add[0]

    run, x = graphed(parts, "compare"), fresh(lab, 8)
    assert equal(run(x), parts(x))
    assert equal(run(x), parts(x))
    add[0] = 2.0
    with pytest.raises(CompareError, match=r"of segment 2, aten.add.Tensor"):
        run(x)


def test_a_module_of_a_differing_operator_is_named(lab: Lab) -> None:
    class Shift(nn.Module):
        by = Unseen(1.0)

        def forward(self, x: Tensor) -> Tensor:
            with cgraph.annotate("shift"):
                return x + self.by[0]

    module = nn.Sequential(nn.ReLU(), Shift())
    run, x = graphed(module, "compare"), fresh(lab, 8)
    run(x)
    run(x)
    module[1].by[0] = 2.0
    with pytest.raises(CompareError, match=r"in Sequential.1, shift"):
        run(x)


def test_a_written_tensor_that_differs_is_named(lab: Lab) -> None:
    by = Unseen(1.0)

    def bump(cache: Tensor) -> None:
        cache.add_(by[0])

    run, cache = graphed(bump, "compare"), fresh(lab, 8)
    run(cache)
    run(cache)
    by[0] = 4.0
    with pytest.raises(CompareError) as caught:
        run(cache)
    assert caught.value.output == "cache"


def test_a_buffer_that_the_graph_leaves_otherwise_is_named(lab: Lab) -> None:
    momentum = Unseen(0.1)

    class Norm(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            assert self.running_mean is not None and self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            self.running_mean.lerp_(x.mean(0), momentum[0])
            return nn.functional.batch_norm(x, None, None, training=True)

    module = Norm(8).to(lab.device)
    run, x = graphed(module, "compare"), fresh(lab, 16, 8) + 3
    with torch.no_grad():
        run(x)
        assert module.num_batches_tracked is not None
        count = module.num_batches_tracked.clone()
        assert equal(run(x), nn.functional.batch_norm(x, None, None, training=True))
        assert torch.equal(module.num_batches_tracked, count + 1)
        run(x)
        momentum[0] = 0.9
        with pytest.raises(CompareError) as caught:
            run(x)
        assert caught.value.output == "self.running_mean"


def test_autocast_is_compared_as_it_is(lab: Lab) -> None:
    module, by = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(lab.device), Unseen(1.0)
    run, x = graphed(lambda x: module(module(x)) * by[0], "compare"), fresh(lab, 4, 8) + 1
    with torch.no_grad(), torch.autocast(lab.device, dtype=torch.bfloat16):
        run(x)
        run(x)
        run(x)
        by[0] = 5.0
        with pytest.raises(CompareError) as caught:
            run(x)
    assert "aten.mul" in str(caught.value.operator)


def test_poison_spares_memory_that_tensors_use(lab: Lab) -> None:
    x = fresh(lab, 1 << 10)
    graph = cgraph.CUDAGraph()
    with cgraph.graph(graph):
        kept = torch.relu(x * 3)
        other = kept + 1
    graph.replay()
    lab.sync()
    _driver.current().poison(graph.pool())
    assert torch.equal(kept, torch.relu(x * 3))
    assert torch.equal(other, kept + 1)


def test_poison_fills_memory_that_no_tensor_uses(sim: SimLab) -> None:
    x, graph = fresh(sim, 1 << 10), cgraph.CUDAGraph()
    with cgraph.graph(graph):
        between = x * 3
        kept = between + 1
    seen = sim.simulator.pools.known[tuple(graph.pool())].find(between)
    del between
    gc.collect()
    graph.replay()
    assert seen is not None and torch.equal(seen, x * 3)
    sim.simulator.poison(graph.pool())
    assert seen.isnan().all()
    assert torch.equal(kept, x * 3 + 1)


def test_nan_that_eager_has_too_is_no_difference(lab: Lab) -> None:
    run = graphed(torch.log, "compare,poison")
    x = fresh(lab, 8)
    x[0] = -1
    assert run(x).isnan()[0]


def picked(x: Tensor, index: Tensor) -> Tensor:
    y = torch.relu(x)
    z = y.index_select(0, index)  # the failing line
    return z + 1


@pytest.mark.parametrize("debug", ["sync", "sync,compare", "poison,sync", "sync,compare,poison"])
@pytest.mark.parametrize("grad", [False, True])
def test_an_operator_that_fails_in_a_replay_is_named_with_its_line(
    sim: SimLab, grad: bool, debug: str
) -> None:
    run, index = graphed(picked, debug), torch.tensor([1, 2])
    x = fresh(sim, 4).requires_grad_(grad)
    run(x, index)
    run(x, index)
    with pytest.raises((IndexError, RuntimeError), match="index") as caught:
        run(x, torch.tensor([1, 99]))
    note = "\n".join(caught.value.__notes__)
    assert "operator 1 of picked, aten.index_select.default" in note
    assert line_of(__file__, "# the failing line") in note
    assert "1 of its operators ran well before it" in note
    assert equal(run(x, index), picked(x, index))
    if grad:
        found = torch.autograd.grad(run(x, index).sum(), x)
        assert equal(found, torch.autograd.grad(picked(x, index).sum(), x))


def test_errors_of_eager_runs_come_out_and_leave_state_as_before(lab: Lab) -> None:
    total, fails = fresh(lab, 4), Unseen(False)

    def body(x: Tensor) -> Tensor:
        total.add_(x)
        if fails[0]:
            raise ValueError("the function's own")
        return total * 2

    run, x = graphed(body, "compare"), fresh(lab, 4)
    run(x)
    run(x)
    before = total.clone()
    fails[0] = True
    with pytest.raises(ValueError, match="the function's own"):
        run(x)
    assert torch.equal(total, before)
    fails[0] = False
    assert equal(run(x), total * 2)


@pytest.mark.parametrize("bad", ["syn", "sync,", "compare poison", 3, ["sync"], "sync,NaN"])
def test_a_wrong_word_is_refused_when_the_function_is_graphed(bad: Any) -> None:
    with pytest.raises(ArgumentError, match="sync, compare, poison"):
        cgraph.graphed(torch.relu, debug=bad)


def test_the_environment_is_read_when_the_function_is_graphed(
    sim: SimLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    by = Unseen(1.0)
    monkeypatch.setenv("CGRAPH_DEBUG", "compare")
    run = cgraph.graphed(lambda x: x + by[0])
    without = cgraph.graphed(lambda x: x + by[0], debug="")
    monkeypatch.setenv("CGRAPH_DEBUG", "never")
    with pytest.raises(ArgumentError, match="CGRAPH_DEBUG is 'never'"):
        cgraph.graphed(torch.relu)
    x = fresh(sim, 4)
    run(x), run(x)
    assert all(torch.equal(without(x), x + 1) for _ in range(2))
    by[0] = 2.0
    assert torch.equal(without(x), x + 1)
    with pytest.raises(CompareError):
        run(x)


@pytest.mark.parametrize("debug", MANY)
def test_random_chains_of_operators_equal_eager(lab: Lab, debug: str) -> None:
    steps: list[Callable[[Tensor], Tensor]] = [
        torch.sin,
        lambda x: x.t().contiguous(),
        lambda x: x @ x,
        lambda x: torch.where(x > 0, x, -x),
        lambda x: x.add_(0.5),
        lambda x: torch.cat([x[4:], x[:4]]),
        lambda x: x / (x.abs().amax() + 1),
        scaled,
        lambda x: x.cumsum(0).clamp(-2, 2),
    ]
    order = torch.randint(len(steps), (12,)).tolist()

    def chain(x: Tensor) -> Tensor:
        y = x * 1
        for place in order:
            y = steps[place](y)
        return torch.tanh(y)

    run = graphed(chain, debug)
    for _ in range(2):
        x = fresh(lab, 8, 8)
        assert torch.allclose(run(x), chain(x), rtol=1e-4, atol=1e-4), order


def test_sync_blames_no_operator_for_what_a_break_raises(lab: Lab) -> None:
    raises = []

    @cgraph.eager_break
    def pause(x: Tensor) -> Tensor:
        if raises:
            raise ValueError("mine")
        return x * 2

    function = cgraph.graphed(lambda x: pause(x + 1) + 1, debug="sync")
    x = fresh(lab, 3)
    assert torch.equal(function(x), (x + 1) * 2 + 1)
    assert torch.equal(function(x), (x + 1) * 2 + 1)
    raises.append(1)
    with pytest.raises(ValueError, match="mine") as caught:
        function(x)
    assert "aten" not in "".join(getattr(caught.value, "__notes__", []))
    raises.clear()
    assert torch.equal(function(x), (x + 1) * 2 + 1)


def test_a_result_of_more_values_is_named(lab: Lab) -> None:
    count = Unseen(2)
    run = cgraph.graphed(lambda x: (x * 2,) * count[0], debug="compare")
    run(fresh(lab, 3))
    run(fresh(lab, 3)), run(fresh(lab, 3))
    count[0] = 3
    with pytest.raises(CompareError, match="returns 3 values, and the capture returned 2"):
        run(fresh(lab, 3))


def test_a_result_that_is_put_together_another_way_is_named(lab: Lab) -> None:
    names = Unseen("a")
    function = cgraph.graphed(lambda x: {names[0]: x * 2}, debug="compare")
    x = fresh(lab, 3)
    assert list(function(x)) == ["a"]
    assert list(function(x)) == ["a"]
    names[0] = "b"
    with pytest.raises(CompareError, match=r"returns result\['b'\].* returned result\['a'\]"):
        function(x)
