"""Graphed functions that several threads call."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import cgraph
from graphed_calls import agree, states
from lab import Lab, fresh


def test_two_threads_get_right_results(lab: Lab) -> None:
    def mixed(x: Tensor, factor: int) -> Tensor:
        return (x * factor).cumsum(0)

    function = cgraph.graphed(mixed)
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
    """Make interrupts raise, also where a background shell has started this and they do not."""
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

    function = cgraph.graphed(slow)
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
    function = cgraph.graphed(lambda x: x * 2)
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


def test_a_report_may_be_asked_for_while_keys_come_and_go(lab: Lab) -> None:
    function = cgraph.graphed(torch.sin, max_graphs=2)
    errors: list[BaseException] = []
    is_over = threading.Event()

    def ask() -> None:
        try:
            while not is_over.is_set():
                function.report()
                cgraph.memory()
                cgraph.metrics()
                # A loop that only asks would hold the interpreter almost all the time.
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


def test_threads_get_right_results_of_calls_with_gradients(lab: Lab) -> None:
    net = torch.nn.Linear(16, 16).to(lab.device)
    function = cgraph.graphed(lambda x: net(x))
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
