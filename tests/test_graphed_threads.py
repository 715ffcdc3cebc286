"""Graphed functions that several threads call."""

from __future__ import annotations

import _thread
import gc
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import cgraph
from cgraph.errors import StateError
from graphed_calls import agree, states
from lab import Lab, fresh


def test_two_threads_get_right_results(lab: Lab) -> None:
    def mixed(x: Tensor, factor: int) -> Tensor:
        return (x * factor).cumsum(0)

    function = cgraph.graphed(mixed, outputs="clone")
    wrong: list[object] = []
    barrier = threading.Barrier(2)

    def work(offset: int) -> None:
        try:
            barrier.wait(20)
            for number in range(30):
                # torch lets no other thread draw on the device while a capture is open.
                x = torch.randn(4 + offset).to(lab.device)
                factor = number % 3
                if not torch.equal(function(x, factor), mixed(x, factor)):
                    wrong.append((offset, number))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(offset,)) for offset in (0, 1)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert not wrong
    assert set(states(function)) == {"captured"}


@pytest.fixture
def heard_interrupts() -> Iterator[None]:
    """Interrupts raise, also where a shell has started this in the background and they do not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard_interrupts")
def test_an_interrupt_ends_the_wait_for_the_capture_of_another_thread(lab: Lab) -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def slow(x: Tensor) -> Tensor:
        has_begun.set()
        may_end.wait(20)
        return x * 2

    function = cgraph.graphed(slow, outputs="clone")
    x = torch.ones(4).to(lab.device)
    other = threading.Thread(target=function, args=(x,))
    other.start()
    try:
        assert has_begun.wait(20)
        threading.Timer(0.2, _thread.interrupt_main).start()
        with pytest.raises(KeyboardInterrupt):
            function(x)
    finally:
        may_end.set()
        other.join(60)
    assert_close(function(x), x * 2)
    assert states(function) == ["captured"]


def test_two_threads_that_call_a_new_key_at_once_capture_it_once(lab: Lab) -> None:
    function = cgraph.graphed(lambda x: x * 2, outputs="clone", measure=False)
    wrong: list[object] = []
    barrier = threading.Barrier(2)

    def work() -> None:
        try:
            barrier.wait(20)
            for size in range(1, 7):
                # torch lets no other thread draw on the device while a capture is open.
                x = torch.randn(size).to(lab.device)
                if not torch.equal(function(x), x * 2):
                    wrong.append(size)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert not wrong
    assert len(function.report().keys) == 6
    agree(function, lambda x: x * 2, fresh(lab, 4))


def test_threads_that_end_leave_the_driver_to_others(lab: Lab) -> None:
    wrong: list[object] = []

    def work() -> None:
        x = fresh(lab, 4)
        if not torch.equal(cgraph.graphed(torch.sin)(x), x.sin()):
            wrong.append(x)

    for _ in range(20):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert not wrong


def test_a_pool_that_another_thread_captures_into_is_only_waited_for(lab: Lab) -> None:
    pool = cgraph.graph_pool_handle()
    begun, go_on = threading.Event(), threading.Event()

    def slow(x: Tensor) -> Tensor:
        begun.set()
        go_on.wait(60)
        return x * 2

    first = cgraph.graphed(slow, pool=pool, warmup=1, measure=False)
    second = cgraph.graphed(torch.cos, pool=pool, on_fail="raise")
    x, y = fresh(lab, 3), fresh(lab, 3)
    lab.sync()
    thread = threading.Thread(target=first, args=(x,))
    thread.start()
    begun.wait(60)
    try:
        # The other one has not begun its capture, and would be in its way.
        assert_close(second(y), y.cos())
        with pytest.raises(StateError, match="by another thread"):
            second.capture(y)
    finally:
        go_on.set()
        thread.join()
    assert second.report().captured == 0
    assert_close(second(y), y.cos())
    assert (first.report().captured, second.report().captured) == (1, 1)


def test_a_report_may_be_asked_for_while_keys_come_and_go(lab: Lab) -> None:
    function = cgraph.graphed(torch.sin, max_graphs=2, measure=False, warmup=0)
    errors: list[BaseException] = []
    is_over = threading.Event()

    def ask() -> None:
        try:
            while not is_over.is_set():
                function.report()
                cgraph.memory()
                # Who only asks would have the interpreter almost always.
                time.sleep(0.0005)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        for call in range(60):
            function(fresh(lab, call % 5 + 1))
            if call % 20 == 19:
                function.reset()
    finally:
        is_over.set()
        thread.join()
    assert not errors


def test_functions_can_be_made_while_all_are_reported_on() -> None:
    is_over = threading.Event()

    def make() -> None:
        while not is_over.is_set():
            cgraph.graphed(lambda x: x)

    threads = [threading.Thread(target=make) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(200):
            cgraph.report()
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def test_threads_get_right_results_of_calls_with_gradients(lab: Lab) -> None:
    net = torch.nn.Linear(16, 16).to(lab.device)
    function = cgraph.graphed(lambda x: net(x), outputs="clone", measure=False)
    inputs = [torch.full((4, 16), float(one), device=lab.device) for one in range(4)]
    expected = [net(x).detach() for x in inputs]
    function(inputs[0])
    wrong: list[object] = []

    def work(place: int) -> None:
        try:
            for _ in range(100):
                if not torch.allclose(function(inputs[place]).detach(), expected[place], atol=1e-5):
                    wrong.append(place)
        except BaseException as error:
            wrong.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(place,)) for place in range(4)]
        for one in threads:
            one.start()
        for one in threads:
            one.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert not wrong


def test_an_entry_that_goes_while_another_one_is_put_first_stays_away(lab: Lab) -> None:
    function = cgraph.graphed(lambda x: x * 2)
    for size in range(1, 5):
        agree(function, lambda x: x * 2, fresh(lab, size))
    entries = list(function.entries_by_use)
    target, last = entries[1], entries[-1]

    class Garbage:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            function.remove(target)

    # Before Python 3.12 any allocation may be the one that collects.
    threshold = gc.get_threshold()
    for allocations in range(12):
        function.add(target)
        gc.collect()
        Garbage()
        gc.set_threshold(gc.get_count()[0] + allocations, 1000, 1000)
        try:
            function.add(last)
        finally:
            gc.set_threshold(*threshold)
        gc.collect()
        assert all(one is not target for one in function.entries_by_use)
        assert function.entries_by_use[0] is last


@pytest.mark.parametrize("outputs", ["static", "clone"])
@pytest.mark.parametrize("is_open", [False, True])
def test_calls_with_gradients_of_several_threads_at_a_time_are_told_of(
    lab: Lab, outputs: Any, is_open: bool
) -> None:
    net = torch.nn.Linear(4, 3).to(lab.device)
    function = cgraph.graphed(net, outputs=outputs, measure=False)
    losses = [function(fresh(lab, 2, 4)).sum() for _ in range(2)]
    torch.autograd.backward(losses)
    del losses

    def work() -> None:
        function(fresh(lab, 2, 4)).sum().backward()

    own = function(fresh(lab, 2, 4)).sum()
    if not is_open:
        own.backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
    told = [str(one.message) for one in caught if "several threads" in str(one.message)]
    assert len(told) == (is_open and outputs == "static")
