"""Arguments, results and modes of breaks."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import cgraph
from broken import check_equal, scaled
from cgraph import SegmentedGraph, eager_break
from cgraph.errors import ArgumentError, CaptureError
from lab import Lab, fresh


def test_what_decorators_inside_the_break_do_happens_in_each_replay(lab: Lab) -> None:
    x, seen = fresh(lab, 8), []

    def noting(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Tensor) -> Tensor:
            seen.append(fn.__name__)
            return fn(*args)

        return call

    @eager_break
    @noting
    def work(x: Tensor) -> Tensor:
        """Documented."""
        return x + 1

    graph, _ = SegmentedGraph.capture(lambda: work(x))
    graph.replay()
    assert seen == ["work"] * 2
    assert scaled.__name__ == "scaled" and scaled.__doc__ == "Needs the host."


def test_results_are_copied_to_where_the_segments_read_them(lab: Lab) -> None:
    x, made = fresh(lab, 8), []

    @eager_break
    def several(x: Tensor) -> dict[str, Any]:
        made.append(x.clone() * 2)
        return {"a": made[-1], "b": [None, (x + 1, 3)], "empty": x[:0].clone()}

    def body(x: Tensor) -> Tensor:
        found = several(x * 5)
        a, (nothing, (b, three)) = found["a"], found["b"]
        assert nothing is None
        return a * b + three + found["empty"].sum()

    graph, y = SegmentedGraph.capture(lambda: body(x))
    check_equal(graph.replay, y, body, x)
    kept = [one.clone() for one in made]
    graph.replay()
    assert all(torch.equal(*pair) for pair in zip(made, kept, strict=False))


def test_what_a_break_returns_in_turn_is_not_overwritten(lab: Lab) -> None:
    x, turn = fresh(lab, 8), [0]
    weights = [fresh(lab, 8) for _ in range(3)]
    before = [one.clone() for one in weights]

    @eager_break
    def weight() -> Tensor:
        turn[0] += 1
        return weights[turn[0] % 3]

    graph, y = SegmentedGraph.capture(lambda: x * weight())
    for _ in range(4):
        x.normal_()
        graph.replay()
        assert torch.equal(y, x * before[turn[0] % 3])
    assert all(torch.equal(*pair) for pair in zip(weights, before, strict=True))


def test_writing_to_the_result_of_a_break_that_nobody_else_holds_is_allowed(lab: Lab) -> None:
    x = fresh(lab, 8)
    graph, y = SegmentedGraph.capture(lambda: scaled(x).add_(x))
    check_equal(graph.replay, y, lambda x: scaled(x).add_(x), x)


def test_writing_to_the_result_of_a_break_that_others_hold_is_refused(lab: Lab) -> None:
    buffer = fresh(lab, 8)
    cached = eager_break(lambda: buffer, name="cached")
    with pytest.raises(CaptureError, match=r"cached .*in place"):
        SegmentedGraph.capture(lambda: cached().add_(1))


WRONG: dict[str, tuple[list[Callable[[Tensor], Any]], str]] = {
    "shape": ([lambda x: x * 2, lambda x: x[:3] * 2], r"\(3,\).*\(8,\)"),
    "dtype": ([lambda x: x * 2, lambda x: x.double()], "float64.*float32"),
    "structure": ([lambda x: (x * 2, 1), lambda x: [x * 2, 1]], "list.*tuple"),
    "number": ([lambda x: 0.5, lambda x: 0.25], "0.25.*0.5"),
    "kind": ([lambda x: 1, lambda x: True], "True.*1"),
    "tensor": ([lambda x: x * 2, lambda x: None], r"None.*\(8,\)"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_result_that_does_not_fit_is_refused_and_the_next_replay_works(
    lab: Lab, case: str
) -> None:
    x, ways = fresh(lab, 8), list(WRONG[case][0])
    first = ways[0]
    picked = eager_break(lambda x: ways[0](x), name="picked")

    def body() -> Tensor:
        picked(x)
        return x * 3

    graph, y = SegmentedGraph.capture(body)
    ways.reverse()
    with pytest.raises(CaptureError, match=f"picked.*test_breaks_of_segments.*{WRONG[case][1]}"):
        graph.replay()
    ways[0] = first
    x.normal_()
    graph.replay()
    assert torch.equal(y, x * 3)


def test_arguments_stay_also_empty_ones_and_those_of_the_host(lab: Lab) -> None:
    x, seen = fresh(lab, 8), []

    @eager_break
    def look(*tensors: Tensor, **more: Any) -> None:
        seen.append([one.clone() for one in tensors] + [more["more"]["z"].clone()])

    def body() -> Tensor:
        y = x + 1
        look(y, y[:0], torch.full((3,), 7.5, device="cpu"), more={"z": x * 2})
        return torch.ones(64, device=lab.device).sum() + x

    if lab.device == "cpu":  # literals of the host are work of the simulator
        host = torch.full((3,), 7.5)
        graph, _ = SegmentedGraph.capture(lambda: look(x + 1, x[:0], host, more={"z": x * 2}))
        del host
    else:
        graph, _ = SegmentedGraph.capture(body)
    gc.collect()
    x.normal_()
    graph.replay()
    expected = [x + 1, x[:0], torch.full((3,), 7.5), x * 2]
    assert all(torch.equal(*pair) for pair in zip(seen[-1], expected, strict=True))


def test_what_a_break_leaves_in_python_is_left_anew_by_each_replay(lab: Lab) -> None:
    x, context = fresh(lab, 8), {}

    @eager_break
    def plan(y: Tensor) -> None:
        context["length"] = int(y.sum().item() * 100)

    graph, _ = SegmentedGraph.capture(lambda: plan(x * 2))
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert context["length"] == int((x * 2).sum().item() * 100)


class Block(nn.Module):
    """A module with breaks in the middle of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    @eager_break
    def route(self, x: Tensor) -> Tensor:
        return x * (self.second.weight.sum().item() > 0) + x.amax().item()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.route(torch.tanh(self.first(x))))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_method_breaks_in_the_middle_of_modules_in_any_grad_mode(
    lab: Lab, mode: Callable[[], Any]
) -> None:
    x, net = fresh(lab, 4, 8), nn.Sequential(Block(), nn.ReLU(), Block()).to(lab.device)
    net(x)  # cuBLAS cannot be set up inside a capture
    with mode():
        graph, y = SegmentedGraph.capture(lambda: net(x))
    assert len(graph.breaks) == 2
    assert "Block.route" in graph.breaks[0]
    assert y.requires_grad == (mode is torch.enable_grad)
    for _ in range(2):
        x.normal_()
        graph.replay()
        with mode():
            torch.testing.assert_close(y, net(x), rtol=0, atol=0)


def test_a_break_runs_under_the_modes_of_its_call(lab: Lab) -> None:
    x, seen = fresh(lab, 4, 4), []

    @eager_break
    def look(y: Tensor) -> Tensor:
        kind = lab.device
        seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled(kind)))
        return y @ y

    def body(x: Tensor) -> Tensor:
        look(x)
        with torch.no_grad(), torch.autocast(lab.device, torch.bfloat16):
            return look(x + 1)

    graph, y = SegmentedGraph.capture(lambda: body(x))
    x.normal_()
    with torch.no_grad():
        graph.replay()
    assert seen == [(True, False), (False, True)] * 2
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, body(x))


def test_under_autocast_no_segment_reads_what_a_break_has_cast(lab: Lab) -> None:
    x, weight = fresh(lab, 8, 8), nn.Parameter(fresh(lab, 8, 8))
    product = eager_break(lambda x: x @ weight)

    def body(x: Tensor) -> Tensor:
        with torch.autocast(lab.device, torch.bfloat16):
            return product(x) @ weight + product(x @ weight)

    graph, y = SegmentedGraph.capture(lambda: body(x))
    with torch.no_grad():
        weight.normal_()
    gc.collect()
    x.normal_()
    graph.replay()
    assert torch.equal(y, body(x))


class Noting(TorchDispatchMode):
    """A mode that notes operators."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.operators.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_of_the_function_stays_where_it_is(lab: Lab) -> None:
    x, noting = fresh(lab, 8), Noting()

    def body(x: Tensor) -> Tensor:
        with noting:
            y = scaled(x * 2) + 1
        return y * 3

    body(x)
    eager, noting.operators = noting.operators, []
    graph, y = SegmentedGraph.capture(lambda: body(x))
    assert noting.operators == eager
    check_equal(graph.replay, y, body, x)


def test_a_break_in_a_break_just_runs(lab: Lab) -> None:
    x = fresh(lab, 8)
    outer = eager_break(lambda x: scaled(x) + scaled(x * x), name="outer")
    graph, y = SegmentedGraph.capture(lambda: outer(x + 1) * 2)
    assert len(graph.breaks) == 1
    check_equal(graph.replay, y, lambda x: outer(x + 1) * 2, x)


def test_a_break_may_capture_something_else(lab: Lab) -> None:
    x, inner = fresh(lab, 8), []

    @eager_break
    def capturing(y: Tensor) -> None:
        inner.append(SegmentedGraph.capture(lambda: scaled(y) * 2))

    graph, z = SegmentedGraph.capture(lambda: (capturing(x), scaled(x))[1])
    assert len(graph.breaks) == 2
    x.normal_()
    inner[0][0].replay()
    assert torch.equal(inner[0][1], scaled(x) * 2)
    graph.replay()
    assert len(inner) == 2
    assert torch.equal(z, scaled(x))


def test_outside_of_a_capture_a_break_is_the_function(lab: Lab) -> None:
    x = fresh(lab, 8)
    assert torch.equal(scaled(x), x / x.abs().max().item())
    assert torch.equal(eager_break(torch.add)(x, x, alpha=2), x * 3)


def test_in_another_capture_a_break_says_what_to_use(lab: Lab) -> None:
    x = fresh(lab, 8)
    with pytest.raises(CaptureError, match=r"scaled.*cgraph.graphed or SegmentedGraph.capture"):
        with cgraph.graph(cgraph.CUDAGraph()):
            scaled(x)
    graph, y = SegmentedGraph.capture(lambda: scaled(x))
    check_equal(graph.replay, y, scaled, x)


@pytest.mark.parametrize("fn", [3, None, lambda: (yield)], ids=["number", "none", "generator"])
def test_what_cannot_be_a_break_is_refused(fn: Any) -> None:
    with pytest.raises(ArgumentError, match="fn is"):
        eager_break()(fn) if fn is not None else eager_break(name="x")(4)


def test_a_capture_inside_a_capture_is_refused(lab: Lab) -> None:
    x = fresh(lab, 8)
    with pytest.raises(CaptureError, match="nested"), cgraph.graph(cgraph.CUDAGraph()):
        SegmentedGraph.capture(lambda: x + 1)


def test_a_segment_reads_what_the_one_before_it_left_while_it_is_captured(lab: Lab) -> None:
    @eager_break
    def pause() -> None:
        """End a segment."""

    seen: list[Tensor] = []

    @eager_break
    def look(x: Tensor) -> None:
        seen.append(x.clone())

    def several(x: Tensor) -> Tensor:
        y = (x + 1) * 2
        pause()
        y = y + x
        y = y * 3
        look(y)
        return y

    x = fresh(lab, 64)
    graph, result = SegmentedGraph.capture(lambda: several(x))
    lab.sync()
    expected = ((x + 1) * 2 + x) * 3
    assert torch.equal(result, expected) and torch.equal(seen.pop(), expected)
    result.fill_(torch.nan)
    graph.replay()
    lab.sync()
    assert torch.equal(result, expected) and torch.equal(seen.pop(), expected)


def test_what_a_break_returns_besides_tensors_is_compared_as_it_was(lab: Lab) -> None:
    grows: set[int] = {1}

    @eager_break
    def constants(x: Tensor) -> tuple[Any, ...]:
        return float("nan"), np.arange(3), grows

    x = fresh(lab, 8)

    def function() -> Tensor:
        nan, numbers, several = constants(x)
        return x * len(several) + int(numbers.sum()) + (nan != nan)

    graph, y = SegmentedGraph.capture(function)
    graph.replay()
    assert torch.equal(y, x + 3 + 1)
    grows.add(2)
    with pytest.raises(CaptureError, match=r"has returned \{1, 2\} in a replay, expected \{1\}"):
        graph.replay()


def test_a_break_that_returns_a_gradient_where_there_are_none_is_refused(lab: Lab) -> None:
    @eager_break
    def recorded(x: Tensor) -> Tensor:
        with torch.enable_grad():
            return x.detach().requires_grad_() * 2

    ladder = cgraph.GraphLadder()
    with (
        torch.no_grad(),
        pytest.raises(CaptureError, match="requires a gradient, in a capture"),
    ):
        ladder.capture("k", lambda x: recorded(x) + 1, torch.ones(3, device=lab.device))
