"""Caches that begin empty, and lists: their contents after a refused capture."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import Tensor, nn

import cgraph
from lab import Lab, fresh

# Each of these functions runs eagerly, and warns.
pytestmark = pytest.mark.filterwarnings("ignore:.*runs eagerly")


class Layer:
    """The cache of one layer, which is None at first."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.calls = 0

    def update(self, keys: Tensor) -> Tensor:
        """Keep more keys; return all of them."""
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys])
        return self.keys

    def count(self) -> int:
        """Count this call; return the count."""
        self.calls += 1
        return self.calls


class Cache:
    """A cache as in libraries: code that uses it names a method alone."""

    def __init__(self) -> None:
        self.layers = [Layer(), Layer()]

    def update(self, keys: Tensor) -> Tensor:
        """Keep more keys; return all of them."""
        return self.layers[1].update(keys)

    def __getitem__(self, keys: Tensor) -> Tensor:
        """Update by an operator, which has no name in the code."""
        return self.layers[0].update(keys)

    def count(self) -> int:
        """Count this call; return the count."""
        return self.layers[0].count()


def test_a_number_that_methods_of_an_argument_change_is_changed_by_each_call(lab: Lab) -> None:
    graphed, cache = cgraph.graphed(lambda x, cache: x * cache.count()), Cache()
    for number in range(1, 5):
        x = fresh(lab, 3)
        torch.testing.assert_close(graphed(x, cache), x * number)


def test_what_a_function_notes_in_a_list_stays_there(lab: Lab) -> None:
    notes: list[str] = []

    def function(x: Tensor) -> Tensor:
        notes.append("called")
        return x * float(x.sum().item())

    graphed = cgraph.graphed(function)
    x = fresh(lab, 3)
    torch.testing.assert_close(graphed(x), function(x))
    assert len(notes) >= 2 and set(notes) == {"called"}


def test_a_function_that_raises_has_added_to_its_list_once(lab: Lab) -> None:
    kept: list[Tensor] = []

    def function(x: Tensor) -> Tensor:
        kept.append(x * 1)
        raise ValueError("the user's own")

    graphed = cgraph.graphed(function)
    with pytest.raises(ValueError, match="the user's own"):
        graphed(fresh(lab, 3))
    assert len(kept) == 1


def test_a_list_that_another_thread_fills_keeps_what_that_has_put_there(lab: Lab) -> None:
    shared: list[Tensor] = []
    is_over, count = threading.Event(), [0]

    def fill() -> None:
        while not is_over.is_set():
            shared.append(torch.ones(1))
            count[0] += 1
            time.sleep(0.0005)

    def function(x: Tensor) -> Tensor:
        return x * float(x.sum().item()) * min(len(shared), 1)

    thread = threading.Thread(target=fill)
    thread.start()
    try:
        while not shared:
            time.sleep(0.001)
        graphed, x = cgraph.graphed(function), fresh(lab, 3)
        torch.testing.assert_close(graphed(x), x * float(x.sum()))
    finally:
        is_over.set()
        thread.join()
    assert len(shared) == count[0]


class Connection:
    """An object that is made once."""


class Host:
    """An owner that makes the connection if it is missing."""

    __slots__ = ("connection", "count")

    def __init__(self) -> None:
        self.connection: Connection | None = None
        self.count: int | None = None


def test_what_a_first_call_puts_into_a_slot_stays_if_it_is_no_tensor(lab: Lab) -> None:
    host, made = Host(), []

    def function(x: Tensor) -> Tensor:
        if host.connection is None:
            host.connection, host.count = Connection(), 1
            made.append(host.connection)
        return x * float(x.sum().item())

    graphed = cgraph.graphed(function)
    for _ in range(2):
        graphed(fresh(lab, 3))
    assert len(made) == 1
    assert (host.connection, host.count) == (made[0], 1)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_training_function_that_adds_to_a_list_runs_eagerly(lab: Lab, length: int) -> None:
    net, kept = nn.Linear(3, 2).to(lab.device), []

    def function(x: Tensor) -> Tensor:
        y = net(x)
        kept.append((y.detach() * 2, "text")[:length])
        return y

    graphed = cgraph.graphed(function)
    for number in range(1, 5):
        x = fresh(lab, 4, 3)
        graphed(x).sum().backward()
        assert len(kept) == number
        torch.testing.assert_close(kept[-1][0], net(x).detach() * 2)
