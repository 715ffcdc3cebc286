"""Segments of a captured function."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import cgraph
from broken import check_equal, fork_and_break, scaled, thrice
from cgraph import SegmentedGraph, _core, eager_break
from cgraph.errors import CaptureError
from lab import Lab, SimLab, fresh


def test_replays_of_a_function_with_breaks_equal_eager(lab: Lab) -> None:
    x = fresh(lab, 64)
    graph, y = SegmentedGraph.capture(lambda: thrice(x))
    assert len(graph.segments) == 4
    assert [one.split(" (")[0] for one in graph.breaks] == ["scaled"] * 3
    assert all("broken.py:" in one for one in graph.breaks)
    check_equal(graph.replay, y, thrice, x)


def test_without_a_break_it_is_one_graph_that_was_captured_and_replayed_once(lab: Lab) -> None:
    x, count, seen = fresh(lab, 64), fresh(lab, 1).zero_(), []
    hooks = [
        cgraph.register_graph_capture_start_hook(lambda graph: seen.append("capture")),
        cgraph.register_graph_replay_start_hook(lambda graph: seen.append("replay")),
    ]

    def body() -> Tensor:
        count.add_(1)
        return x * 2 + 1

    try:
        graph, y = SegmentedGraph.capture(body)
    finally:
        for hook in hooks:
            hook.remove()
    assert (seen, count.item(), graph.breaks) == (["capture", "replay"], 1, ())
    (segment,) = graph.segments
    assert type(segment) is cgraph.CUDAGraph
    assert segment.memory().nodes == 3
    check_equal(graph.replay, y, lambda x: x * 2 + 1, x)


def test_a_capture_runs_the_body_exactly_once_and_its_result_is_valid(lab: Lab) -> None:
    x, calls = fresh(lab, 16), []
    counts = [torch.zeros(1, device=lab.device) for _ in range(3)]

    @eager_break
    def seen(y: Tensor) -> None:
        calls.append(y.clone())
        counts[1].add_(1)

    def body() -> Tensor:
        counts[0].add_(1)
        seen(x + 3)
        counts[2].add_(1)
        return x * 5

    graph, y = SegmentedGraph.capture(body)
    assert [count.item() for count in counts] == [1, 1, 1]
    assert torch.equal(y, x * 5)
    assert torch.equal(calls[0], x + 3)
    graph.replay()
    assert [count.item() for count in counts] == [2, 2, 2]


def test_segments_share_one_pool(lab: Lab) -> None:
    x, handle = fresh(lab, 64), cgraph.graph_pool_handle()
    graph, _ = SegmentedGraph.capture(lambda: thrice(x), pool=handle)
    assert tuple(graph.pool()) == tuple(handle)
    assert {tuple(one.pool()) for one in graph.segments} == {tuple(handle)}
    memory = graph.memory()
    assert memory.nodes == sum(one.memory().nodes for one in graph.segments)
    assert memory.shares_with == ()


def test_breaks_may_come_first_last_and_one_after_the_other(lab: Lab) -> None:
    x = fresh(lab, 16)

    def body(x: Tensor) -> Tensor:
        return scaled(scaled(scaled(x)) * 3)

    graph, y = SegmentedGraph.capture(lambda: body(x))
    assert (len(graph.breaks), len(graph.segments)) == (3, 2)
    check_equal(graph.replay, y, body, x)


def test_a_break_may_be_all_that_a_function_does(lab: Lab) -> None:
    x = fresh(lab, 16)
    graph, y = SegmentedGraph.capture(lambda: scaled(x))
    check_equal(graph.replay, y, scaled, x)


def test_forked_streams_are_joined_at_a_break(lab: Lab) -> None:
    x, side = fresh(lab, 64), lab.stream()
    graph, y = SegmentedGraph.capture(lambda: fork_and_break(lab, x, side))
    check_equal(graph.replay, y, lambda x: fork_and_break(lab, x, side), x)


def test_streams_that_forked_from_forked_streams_are_joined(lab: Lab) -> None:
    x, sides = fresh(lab, 64), [lab.stream() for _ in range(3)]

    def body(x: Tensor) -> Tensor:
        before, parts = lab.current(), [x]
        for side in sides:
            side.wait_stream(before)
            with lab.use(side):
                parts.append(parts[-1] * 2)
            before = side
        return scaled(torch.stack([scaled(part) for part in parts]))

    graph, y = SegmentedGraph.capture(lambda: body(x))
    x.normal_()
    graph.replay()
    assert torch.equal(y, body(x))


def test_a_stream_that_forked_before_a_break_goes_on_behind_it(lab: Lab) -> None:
    x, side = fresh(lab, 64), lab.stream()

    def body(x: Tensor) -> Tensor:
        lab.fork(side)
        y = scaled(x * 2)
        z = scaled(y + 1)
        with lab.use(side):
            w = x * 5
        lab.join(side)
        return w + z

    graph, y = SegmentedGraph.capture(lambda: body(x))
    check_equal(graph.replay, y, body, x)


def test_a_side_stream_that_does_not_capture_is_left_alone(lab: Lab) -> None:
    x, side = fresh(lab, 64), lab.stream()
    own = x * 7

    def body() -> Tensor:
        y = scaled(x)
        with lab.use(side):
            own.add_(1)
        return scaled(y)

    before = own.clone()
    graph, y = SegmentedGraph.capture(body)
    lab.sync()
    assert torch.equal(own, before + 1)
    x.normal_()
    graph.replay()
    lab.sync()
    assert torch.equal(own, before + 1)
    assert torch.equal(y, scaled(scaled(x)))


def test_a_break_on_another_thread_just_runs(lab: Lab) -> None:
    x, found = fresh(lab, 8), []

    def body() -> Tensor:
        y = x * 2
        thread = threading.Thread(target=lambda: found.append(mean(host)))
        thread.start()
        thread.join()
        return y

    host = torch.randn(8)
    mean = eager_break(lambda x: x.numpy().mean())
    graph, y = SegmentedGraph.capture(body)
    assert found == [host.numpy().mean()]
    assert graph.breaks == ()
    check_equal(graph.replay, y, lambda x: x * 2, x)


def test_a_side_stream_that_stays_unjoined_at_the_end_is_refused(lab: Lab) -> None:
    x, side = fresh(lab, 64), lab.stream()

    def body() -> None:
        scaled(x)
        lab.fork(side)
        with lab.use(side):
            x + 1

    with pytest.raises(CaptureError, match="joined"):
        SegmentedGraph.capture(body)
    assert not cgraph.is_current_stream_capturing()


def test_a_break_may_be_called_while_a_side_stream_is_current(lab: Lab) -> None:
    x, side = fresh(lab, 64), lab.stream()

    def body(x: Tensor) -> Tensor:
        lab.fork(side)
        with lab.use(side):
            y = scaled(x * 2) + 1
        lab.join(side)
        return y * x

    graph, y = SegmentedGraph.capture(lambda: body(x))
    check_equal(graph.replay, y, body, x)


def test_waits_in_a_break_are_no_part_of_a_capture(lab: Lab) -> None:
    x, side = fresh(lab, 64), lab.stream()
    out = torch.empty_like(x)

    @eager_break
    def elsewhere(x: Tensor) -> None:
        lab.fork(side)
        with lab.use(side):
            out.copy_(x * 2)
        lab.join(side)
        assert not cgraph.is_current_stream_capturing()

    def body() -> Tensor:
        elsewhere(x + 1)
        return out * 3

    graph, y = SegmentedGraph.capture(body)
    check_equal(graph.replay, y, lambda x: (x + 1) * 2 * 3, x)


def test_an_event_of_an_earlier_segment_is_one_that_has_come(lab: Lab) -> None:
    x, sides = fresh(lab, 64), [lab.stream() for _ in range(2)]

    def event() -> Any:
        if isinstance(lab, SimLab):
            return _core.Event(lab.simulator.device)
        return torch.cuda.Event()

    def body(x: Tensor) -> Tensor:
        begun, done = event(), event()
        lab.current().record_event(begun)
        sides[0].wait_event(begun)
        with lab.use(sides[0]):
            y = x * 3
            sides[0].record_event(done)
        z = scaled(x + 1)
        # A capture's stream has nothing to wait for; another one joins it.
        lab.current().wait_event(done)
        sides[1].wait_event(begun)
        with lab.use(sides[1]):
            w = x * 5
        lab.join(sides[1])
        return w + y + z

    graph, y = SegmentedGraph.capture(lambda: body(x))
    assert len(graph.segments) == 2
    check_equal(graph.replay, y, body, x)


def test_the_methods_that_are_watched_come_back(lab: Lab) -> None:
    def methods() -> list[Any]:
        return [
            _core.Stream.wait_stream,
            _core.Stream.wait_event,
            torch.cuda.Event.wait,
            _core.Stream.record_event,
            torch.cuda.Event.record,
        ]

    before, inside = methods(), []
    SegmentedGraph.capture(lambda: inside.extend(methods()) or scaled(fresh(lab, 4)))
    assert not any(now is then for now, then in zip(inside, before, strict=True))
    assert methods() == before
    with pytest.raises(ValueError):
        SegmentedGraph.capture(lambda: int("no number"))
    assert methods() == before
