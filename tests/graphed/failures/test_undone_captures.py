"""Python objects after a refused capture are as after the calls alone."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import cgraph
from cgraph import eager_break
from graphed_calls import states
from lab import Lab, fresh

# Each of these functions runs eagerly, and warns.
pytestmark = pytest.mark.filterwarnings("ignore:.*runs eagerly")


def test_random_numbers_of_python_in_a_break_are_drawn_in_each_call(lab: Lab) -> None:
    drawn: list[float] = []

    @eager_break
    def noted(x: Tensor) -> None:
        drawn.append(random.random())

    def function(x: Tensor) -> Tensor:
        y = x * 2
        noted(y)
        return y + 1

    graphed = cgraph.graphed(function)
    random.seed(3)
    for number in range(1, 4):
        graphed(fresh(lab, 3))
        last = drawn[-1]
        state = random.getstate()
        random.seed(3)
        assert last == [random.random() for _ in range(number)][-1]
        random.setstate(state)
    assert states(graphed) == ["captured"]


def test_tensors_that_a_break_assigns_are_those_of_its_own_calls(lab: Lab) -> None:
    class Cache:
        def __init__(self) -> None:
            self.sum, self.rows = torch.zeros(3, device=lab.device), {"k": fresh(lab, 1, 3)}

        @eager_break
        def added(self, x: Tensor) -> Tensor:
            self.sum = self.sum + x
            self.rows["k"] = torch.cat([self.rows["k"], x[None]])
            return self.sum

    mine, eager = Cache(), Cache()
    eager.rows["k"] = mine.rows["k"].clone()
    graphed = cgraph.graphed(lambda x: mine.added(x * 2) * 1)
    for _ in range(4):
        x = fresh(lab, 3)
        assert torch.equal(graphed(x), eager.added(x * 2))
        assert torch.equal(mine.sum, eager.sum)
        assert torch.equal(mine.rows["k"], eager.rows["k"])
    assert states(graphed) == ["captured"]


def test_items_of_other_threads_stay_where_a_count_is_put_back(lab: Lab) -> None:
    kept: dict[Any, Any] = {}
    added: list[int] = []

    def add() -> None:
        while not is_over.is_set():
            added.append(len(added))
            kept[added[-1]] = object()
            is_over.wait(0.001)

    def function(x: Tensor) -> Tensor:
        kept["hits"] = kept.get("hits", 0) + 1
        return x * 2

    is_over = threading.Event()
    thread = threading.Thread(target=add)
    thread.start()
    graphed = cgraph.graphed(function)
    for _ in range(8):
        graphed(fresh(lab, 3))
    is_over.set()
    thread.join()
    assert kept["hits"] == 8
    assert all(one in kept for one in added)


def test_a_capture_ahead_whose_last_wait_is_refused_puts_everything_back(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = torch.zeros(3, device=lab.device)

    def function(x: Tensor) -> Tensor:
        total.add_(1)
        return x * torch.rand_like(x) + total

    driver = type(cgraph._driver.current())
    real = driver.synchronize

    def refuse(self: Any) -> None:
        real(self)
        if refuses:
            raise RuntimeError("a wait while a stream is capturing")

    refuses: list[bool] = []
    monkeypatch.setattr(driver, "synchronize", refuse)
    graphed = cgraph.graphed(function)
    torch.manual_seed(5)
    hook = cgraph.register_graph_instantiate_hook(lambda _: refuses.append(True))
    with hook, pytest.raises(RuntimeError, match="capturing"):
        graphed.capture(fresh(lab, 3))
    refuses.clear()
    drawn = torch.rand(3, device=lab.device)
    torch.manual_seed(5)
    fresh(lab, 3)
    assert torch.equal(drawn, torch.rand(3, device=lab.device))
    assert torch.equal(total, torch.zeros_like(total))
