"""Several threads: captures, replays and deaths of graphs at the same time."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Sequence

import pytest
import torch

import cgraph
from cgraph import _driver
from cgraph._captures import cuda
from lab import Lab, captured, fresh


def in_threads(*bodies: Callable[[], object]) -> None:
    """Run each in its own thread; raise what the first one raised."""
    failures: list[BaseException] = []

    def run(body: Callable[[], object]) -> None:
        try:
            body()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(body,), daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive(), "a thread waits for ever"
    if failures:
        raise failures[0]


def test_threads_that_ask_for_the_driver_at_once_get_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Slow:
        def __init__(self) -> None:
            time.sleep(0.05)

    monkeypatch.setenv("CGRAPH_DRIVER", "cuda")
    monkeypatch.setattr(cuda, "Cuda", Slow)
    monkeypatch.setattr(_driver, "_made", {})
    found: list[object] = []
    in_threads(*[lambda: found.append(_driver.current())] * 4)
    assert len(found) == 4 and len(set(map(id, found))) == 1


def test_replays_of_one_graph_from_several_threads_are_serialised(lab: Lab) -> None:
    count = torch.zeros(1024, device=lab.device)
    graph = cgraph.CUDAGraph()
    with cgraph.graph(graph):
        count.add_(1)
    lab.sync()

    def replay() -> None:
        stream = lab.stream()
        with lab.use(stream):
            for _ in range(25):
                graph.replay()

    in_threads(*[replay] * 4)
    lab.sync()
    assert torch.equal(count, torch.full_like(count, 100))


def test_threads_capture_one_after_another_in_thread_local_mode(lab: Lab) -> None:
    turn = threading.Semaphore(1)
    results: list[tuple[torch.Tensor, torch.Tensor]] = []

    def capture() -> None:
        for _ in range(3):
            graph = cgraph.CUDAGraph()
            # torch up to 2.11 draws no random numbers in a thread while another one captures.
            with turn:
                x = fresh(lab, 64)
                with cgraph.graph(graph, capture_error_mode="thread_local"):
                    y = x * 2
            # The other thread may capture now.
            with turn:
                x.normal_()
                graph.replay()
                lab.sync()
                results.append((y.clone(), x * 2))

    in_threads(capture, capture)
    assert len(results) == 6
    assert all(torch.equal(y, expected) for y, expected in results)


def test_a_graph_that_dies_on_another_thread_breaks_no_capture(lab: Lab) -> None:
    x = fresh(lab, 64)
    doomed: list[cgraph.CUDAGraph] = []
    for _ in range(4):
        graph, _ = captured(lab, x, keep_graph=True)
        graph.replay()
        doomed.append(graph)
    del graph
    lab.sync()

    def die() -> None:
        while doomed:
            doomed.pop().reset()
        gc.collect()

    graph = cgraph.CUDAGraph()
    with cgraph.graph(graph, capture_error_mode="thread_local"):
        y = x + 1
        in_threads(die)
        y = y * 3
    x.normal_()
    graph.replay()
    assert torch.equal(y, (x + 1) * 3)


def test_a_graph_captured_on_one_thread_is_replayed_and_freed_on_another(lab: Lab) -> None:
    x = fresh(lab, 64)
    made: list[tuple[cgraph.CUDAGraph, torch.Tensor]] = []

    def capture() -> None:
        made.append(captured(lab, x))

    in_threads(capture)
    graph, y = made.pop()
    x.normal_()
    graph.replay()
    assert torch.equal(y, x * 2 + 1)
    in_threads(graph.reset)
    with pytest.raises(cgraph.errors.StateError):
        graph.replay()


def test_instantiate_and_replay_at_the_same_time_are_each_whole(lab: Lab) -> None:
    x = fresh(lab, 64)
    graph, y = captured(lab, x, keep_graph=True)
    graph.instantiate()
    over = threading.Event()

    def instantiate() -> None:
        try:
            for _ in range(20):
                graph.instantiate()
        finally:
            over.set()

    def replay() -> None:
        with lab.use(lab.stream()):
            while not over.is_set():
                graph.replay()

    in_threads(instantiate, replay)
    lab.sync()
    x.normal_()
    lab.sync()
    graph.replay()
    lab.sync()
    assert torch.equal(y, x * 2 + 1)


def test_hooks_are_registered_and_run_from_several_threads(lab: Lab) -> None:
    x = fresh(lab, 8)
    graph, _ = captured(lab, x)
    seen: list[int] = []

    def register() -> None:
        for _ in range(50):
            graph.register_replay_end_hook(lambda _: seen.append(1)).remove()

    def replay(count: int = 50) -> None:
        with lab.use(lab.stream()):
            for _ in range(count):
                graph.replay()

    in_threads(register, replay, register)
    lab.sync()
    before: Sequence[int] = tuple(seen)
    graph.replay()
    assert tuple(seen) == before
