"""Caches that begin empty, and lists: what a refused capture leaves there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from lab import Lab, fresh

# Each of these functions runs eagerly, and says so.
pytestmark = pytest.mark.filterwarnings("ignore:.*runs eagerly")


class Layer:
    """What is kept for one layer. It begins as nothing."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.calls = 0

    def update(self, keys: Tensor) -> Tensor:
        """Keep more keys; all of them."""
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys])
        return self.keys

    def count(self) -> int:
        """How often it was asked."""
        self.calls += 1
        return self.calls


class Cache:
    """As those of libraries: code that uses it names a method alone."""

    def __init__(self) -> None:
        self.layers = [Layer(), Layer()]

    def update(self, keys: Tensor) -> Tensor:
        """Keep more keys; all of them."""
        return self.layers[1].update(keys)

    def __getitem__(self, keys: Tensor) -> Tensor:
        """The same by an operator, which has no name in the code."""
        return self.layers[0].update(keys)

    def count(self) -> int:
        """How often it was asked."""
        return self.layers[0].count()


class Attention(nn.Module):
    """A module with a cache of its own, or one that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = Cache()

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        """The sum of all keys."""
        return (cache or self.cache).update(x).sum(0)

    def method(self, x: Tensor) -> Tensor:
        """The same, as a method."""
        return self.cache.update(x).sum(0)


class Slot:
    """A cache without a dictionary."""

    __slots__ = ("keys",)

    def __init__(self) -> None:
        self.keys: Tensor | None = None


def in_argument() -> tuple[Callable[..., Tensor], Any]:
    return (lambda x, cache: cache.update(x).sum(0)), Cache()


def in_keyword() -> tuple[Callable[..., Tensor], Any]:
    return Attention(), Cache()


def by_item() -> tuple[Callable[..., Tensor], Any]:
    return (lambda x, cache: cache[x].sum(0)), Cache()


def in_closure() -> tuple[Callable[..., Tensor], Any]:
    cache = Cache()
    return (lambda x: cache.update(x).sum(0)), None


def in_module() -> tuple[Callable[..., Tensor], Any]:
    return Attention(), None


def in_method() -> tuple[Callable[..., Tensor], Any]:
    return Attention().method, None


def in_slot() -> tuple[Callable[..., Tensor], Any]:
    def function(x: Tensor, cache: Slot) -> Tensor:
        cache.keys = x if cache.keys is None else torch.cat([cache.keys, x])
        return cache.keys.sum(0)

    return function, Slot()


def in_list() -> tuple[Callable[..., Tensor], Any]:
    kept: list[Tensor | None] = [None]

    def function(x: Tensor) -> Tensor:
        kept[0] = x if kept[0] is None else torch.cat([kept[0], x])
        return kept[0].sum(0)

    return function, None


def in_longer_list() -> tuple[Callable[..., Tensor], Any]:
    kept: list[Tensor] = []

    def function(x: Tensor) -> Tensor:
        kept.append(x * 1)
        return torch.cat(kept).sum(0)

    return function, None


def in_a_list_of_pairs() -> tuple[Callable[..., Tensor], Any]:
    kept: list[Any] = ["begin"]

    def function(x: Tensor) -> Tensor:
        kept.append((len(kept), x * 1))
        kept.append("text")
        kept.append({"step": 1, "x": x})
        return torch.cat([one[1] for one in kept if isinstance(one, tuple)]).sum(0)

    return function, None


def in_a_longer_tuple() -> tuple[Callable[..., Tensor], Any]:
    kept: list[tuple[Tensor, ...]] = [()]

    def function(x: Tensor) -> Tensor:
        kept[0] += (x * 1,)
        return torch.cat(kept[0]).sum(0)

    return function, None


def in_longer_list_beside_a_host_read() -> tuple[Callable[..., Tensor], Any]:
    kept: list[Tensor] = []

    def function(x: Tensor) -> Tensor:
        kept.append(x * 1)
        return torch.cat(kept).sum(0) * float(x.sum().item())

    return function, None


CACHES = [
    in_argument,
    in_keyword,
    by_item,
    in_closure,
    in_module,
    in_method,
    in_slot,
    in_list,
    in_longer_list,
    in_a_list_of_pairs,
    in_a_longer_tuple,
    in_longer_list_beside_a_host_read,
]


@pytest.mark.parametrize("warmup", [0, 1, 3])
@pytest.mark.parametrize("make", CACHES)
def test_a_cache_that_begins_empty_has_what_eager_puts_there(
    lab: Lab, make: Callable[[], tuple[Callable[..., Tensor], Any]], warmup: int
) -> None:
    (function, mine), (eager, others) = make(), make()
    graphed = cgraph.graphed(function, warmup=warmup)
    with torch.no_grad():
        for _ in range(4):
            x = fresh(lab, 1, 3)
            given = (x,) if mine is None else (x, mine)
            expected = eager(x) if others is None else eager(x, others)
            torch.testing.assert_close(graphed(*given), expected)


def test_a_refused_capture_leaves_an_empty_cache_empty(lab: Lab) -> None:
    cache = Cache()
    graphed = cgraph.graphed(lambda x: cache.update(x) * float(x.sum().item()), on_fail="raise")
    with torch.no_grad(), pytest.raises(Exception, match="captur"):
        graphed(fresh(lab, 1, 3))
    assert cache.layers[1].keys is None


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
    """What is made once."""


class Host:
    """Makes it where there is none."""

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
