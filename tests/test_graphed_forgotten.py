"""What a graphed function remembers of calls that it has no graph for, and what it forgets."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import cgraph
from cgraph.errors import StateError
from graphed_calls import agree, states
from lab import Lab, fresh

# More than a function remembers.
MANY = 300


class Batch:
    """What pytree does not know."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


def test_arguments_that_cannot_be_captured_do_not_stay_alive(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda batch: batch.x * 2)
    alive = []
    with pytest.warns(UserWarning, match="tensors inside a Batch"):
        for _ in range(3):
            batch = Batch(fresh(lab, 4))
            assert torch.equal(graphed(batch), batch.x * 2)
            alive.append(weakref.ref(batch))
            del batch
    gc.collect()
    assert [one() for one in alive] == [None] * 3
    assert len(graphed.report().keys) == 1


def test_iterators_do_not_stay_alive(lab: Lab) -> None:
    def total(values: Iterator[Tensor]) -> Tensor:
        return torch.stack(list(values)).sum(0)

    graphed, x = cgraph.graphed(total), fresh(lab, 2, 3)
    alive = []
    with pytest.warns(UserWarning, match="an iterator"):
        for _ in range(3):
            values = (one for one in x)
            assert torch.equal(graphed(values), x.sum(0))
            alive.append(weakref.ref(values))
            del values
    gc.collect()
    assert [one() for one in alive] == [None] * 3


def test_modules_among_the_arguments_of_evicted_keys_do_not_stay_alive(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda module, x: module(x), max_graphs=1, warmup=1)
    alive = []
    for _ in range(24):
        module = nn.Linear(2, 2)
        alive.append(weakref.ref(module.weight))
        module.to(lab.device)
        # The second call keeps it from being one of too many.
        with torch.no_grad():
            for _ in range(2):
                graphed(module, fresh(lab, 2))
        del module
    gc.collect()
    # A function remembers what sixteen modules have.
    assert sum(one() is not None for one in alive) <= 17


def test_keys_without_a_graph_are_forgotten_when_there_are_many(lab: Lab) -> None:
    def scaled(x: Tensor, factor: int) -> Tensor:
        return x * factor * x.sum().item()

    graphed, x = cgraph.graphed(scaled, warmup=0, on_held="ignore"), fresh(lab, 2)
    with pytest.warns(UserWarning, match="runs eagerly"):
        for factor in range(MANY):
            graphed(x, factor)
        assert len(graphed.report().keys) < MANY
        assert len(graphed.entries_by_use) < MANY
        for factor in (0, MANY - 1):
            assert torch.equal(graphed(x, factor), scaled(x, factor))


def test_evicted_keys_are_forgotten_when_there_are_many(sim: Lab) -> None:
    graphed = cgraph.graphed(lambda x: x * 2, max_graphs=2, warmup=0, measure=False)
    for columns in range(1, MANY):
        x = fresh(sim, 2, columns)
        # The second call keeps it from being one of too many.
        for _ in range(2):
            assert torch.equal(graphed(x), x * 2)
    assert len(graphed.report().keys) <= 260
    assert states(graphed)[-2:] == ["captured"] * 2


def test_a_frozen_function_remembers_no_call_that_it_refused(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda x: x * 2).capture(fresh(lab, 2)).freeze()
    for rows in (3, 4, 5):
        with pytest.raises(StateError, match="frozen"):
            graphed(fresh(lab, rows))
    assert states(graphed) == ["captured"]


def test_a_capture_ahead_of_time_that_raises_leaves_no_key(lab: Lab) -> None:
    def wrong(x: Tensor) -> Tensor:
        raise ValueError("mine")

    graphed = cgraph.graphed(wrong)
    with pytest.raises(ValueError, match="mine"):
        graphed.capture(fresh(lab, 2))
    assert states(graphed) == []


def test_a_key_whose_eager_call_ends_after_a_reset_is_captured_again(lab: Lab) -> None:
    begun, may_end, refuses = threading.Event(), threading.Event(), True

    def function(x: Tensor) -> Tensor:
        if refuses and lab_is_capturing():
            raise RuntimeError("not in a capture")
        if threading.current_thread().name == "slow" and begun_eagerly():
            begun.set()
            assert may_end.wait(30)
        return x * 2

    def lab_is_capturing() -> bool:
        return cgraph.is_current_stream_capturing()

    def begun_eagerly() -> bool:
        # The last call of the thread is the eager one: warm-up and capture came before.
        calls.append(0)
        return len(calls) > 3

    calls: list[int] = []
    graphed = cgraph.graphed(function, warmup=3, measure=False)
    x = fresh(lab, 4)
    done: list[Tensor] = []
    thread = threading.Thread(target=lambda: done.append(graphed(x).clone()), name="slow")
    thread.start()
    assert begun.wait(30)
    graphed.reset()
    may_end.set()
    thread.join()
    refuses = False
    assert torch.equal(done[0], x * 2)
    agree(graphed, lambda x: x * 2, fresh(lab, 4))
    assert states(graphed) == ["captured"]
