"""The contract, "Life of a key": each test quotes its sentence."""

from __future__ import annotations

import functools
import itertools
import random
import re
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from cgraph.errors import EagerWarning
from contract_calls import Box, counted, equal, follow, runs_of, states_of
from graphed_calls import eager_calls, numbers, quiet
from lab import Lab, fresh


@pytest.fixture(autouse=True)
def _without_gradients() -> Any:
    with torch.no_grad():
        yield


def test_the_first_call_runs_eagerly_and_writes_what_eager_writes(lab: Lab) -> None:
    """Call 1 runs eagerly, for real, and is *observed*."""
    state, eager_state = torch.zeros(3, device=lab.device), torch.zeros(3, device=lab.device)

    def add(into: Tensor, x: Tensor) -> Tensor:
        into.add_(x)
        return into * 2

    function, counter = counted(lambda x: add(state, x))
    graphed = cgraph.graphed(function)
    x = fresh(lab, 3)
    equal(graphed(x), add(eager_state, x))
    equal(state, eager_state)
    assert runs_of(counter) == 1
    assert states_of(graphed) == {"observed"}
    assert numbers(graphed) == (0, 0, 1)


def test_the_second_call_is_captured_and_replayed_and_later_ones_run_no_python(lab: Lab) -> None:
    """The next call *captures* and is replayed at once; later calls are *replays*."""
    state, eager_state = torch.zeros(3, device=lab.device), torch.zeros(3, device=lab.device)
    function, counter = counted(lambda x: state.add_(x) * 2)
    graphed = cgraph.graphed(function)
    for number in range(6):
        x = fresh(lab, 3)
        result = graphed(x)
        equal(result, eager_state.add_(x) * 2)
        equal(state, eager_state)
        result.fill_(77)
        assert runs_of(counter) == min(number + 1, 2)
        assert states_of(graphed) == {"captured" if number else "observed"}
    assert numbers(graphed) == (1, 5, 1)


def _other_operators() -> Callable[[Tensor], Tensor]:
    turns = itertools.cycle([True, False])
    return lambda x: x * 2 if next(turns) else x + 2


def _other_numbers() -> Callable[[Tensor], Tensor]:
    numbers = itertools.count()
    return lambda x: x * float(next(numbers))


def _other_places() -> Callable[[Tensor], Tensor]:
    numbers = itertools.count()
    return lambda x: (x + 1) * x if next(numbers) % 2 else (x + 1) * (x + 1)


def _other_place_outside(lab: Lab) -> Callable[[Tensor], Tensor]:
    hidden = itertools.cycle([fresh(lab, 2, 3), fresh(lab, 2, 3)])
    return lambda x: x * next(hidden)


def _other_part(lab: Lab) -> Callable[[Tensor], Tensor]:
    table, places = fresh(lab, 4, 3), itertools.cycle(range(4))
    return lambda x: x * table[next(places)]


@pytest.mark.parametrize("differs", ["operators", "numbers", "places", "tensors", "parts"])
def test_a_capture_that_differs_from_the_call_before_is_not_replayed(
    lab: Lab, differs: str
) -> None:
    """The capture must match the call before it: same operators, same numbers, tensors from."""
    make = {
        "operators": _other_operators,
        "numbers": _other_numbers,
        "places": _other_places,
        "tensors": functools.partial(_other_place_outside, lab),
        "parts": functools.partial(_other_part, lab),
    }[differs]
    state = torch.random.get_rng_state()
    function = make()
    torch.random.set_rng_state(state)
    if lab.device == "cpu":
        eager = make()
    else:
        pytest.skip("hidden tensors are made of the host's generator")
    graphed = cgraph.graphed(function)
    for number in range(6):
        x = fresh(lab, 2, 3)
        if number == 3:
            with pytest.warns(EagerWarning):
                found = graphed(x)
        else:
            found = graphed(x)
        equal(found, eager(x))
        found.fill_(77)
    assert states_of(graphed) == {"eager"}


@pytest.mark.parametrize(
    "source",
    ["next", "time", "random", "slot"],
)
def test_python_that_computes_another_number_each_time_is_never_replayed(
    lab: Lab, source: str
) -> None:
    """Comparing the operators of two calls caught counters, ``next(it)``, ``time()``."""
    counter, clock = itertools.count(), Box(now=time.perf_counter)

    class Slotted:
        __slots__ = ("n",)

    slotted = Slotted()
    slotted.n = 0

    def slot() -> float:
        slotted.n += 1
        return float(slotted.n)

    sources: dict[str, Callable[[], float]] = {
        "next": lambda: float(next(counter)),
        "time": lambda: clock.now(),
        "random": random.random,
        "slot": slot,
    }
    draw = sources[source]
    graphed = cgraph.graphed(lambda x: x * draw())
    results = []
    with quiet() as caught:
        for _ in range(14):
            x = torch.ones(2, device=lab.device, dtype=torch.float64)
            results.append(graphed(x)[0].item())
    assert len(set(results)) == 14, results
    assert [one.category for one in caught] == [EagerWarning]
    assert numbers(graphed)[0] == 0


def _attribute(box: Box) -> None:
    box.n += 1


def _items(box: Box) -> None:
    box.items.append(1)


def _dictionary(box: Box) -> None:
    box.table["k"] = box.table.get("k", 0) + 1


@pytest.mark.parametrize("change", [_attribute, _items, _dictionary])
def test_a_function_that_changes_a_guarded_value_is_never_replayed(
    lab: Lab, change: Callable[[Box], None]
) -> None:
    """… no guarded value changed."""
    box = Box(n=0, items=[], table={})

    def function(x: Tensor) -> Tensor:
        change(box)
        return x * 2

    graphed = cgraph.graphed(function)
    with quiet() as caught:
        for _ in range(14):
            x = fresh(lab, 3)
            equal(graphed(x), x * 2)
    assert max(box.n, len(box.items), box.table.get("k", 0)) == 14
    assert [one.category for one in caught] == [EagerWarning]
    assert numbers(graphed)[0] == 0


def test_a_function_that_leaves_a_new_tensor_behind_is_never_replayed(lab: Lab) -> None:
    """… no new tensor left behind except in a result."""
    name = "".join(["odd", "name"])
    box = Box(**{name: None})

    def function(x: Tensor) -> Tensor:
        setattr(box, name, x * 3)
        return x * 2

    graphed = cgraph.graphed(function)
    for number in range(6):
        x = fresh(lab, 3)
        if number == 3:
            with pytest.warns(EagerWarning, match="keeps a new tensor"):
                found = graphed(x)
        else:
            found = graphed(x)
        equal(found, x * 2)
        equal(vars(box)[name], x * 3)
    assert states_of(graphed) == {"eager"}


def test_a_new_tensor_that_only_a_result_has_is_replayed(lab: Lab) -> None:
    """… no new tensor left behind except in a result."""
    graphed = cgraph.graphed(lambda x: {"a": x * 2, "b": [x + 1, (x - 1,)]})
    follow(lab, graphed, lambda x: {"a": x * 2, "b": [x + 1, (x - 1,)]})
    assert numbers(graphed) == (1, 3, 1)


class Lazy(nn.Module):
    """A module that makes a table in its first call, and one more in its second."""

    def __init__(self) -> None:
        super().__init__()
        self.first: Tensor | None = None
        self.second: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.first is None:
            self.first = torch.full_like(x, 2.0)
            return x * self.first
        if self.second is None:
            self.second = torch.full_like(x, 3.0)
        return x * self.first + self.second


def test_state_that_settles_in_the_first_calls_is_captured_afterwards(lab: Lab) -> None:
    """Otherwise this call's result stands and the next call captures again."""
    module, twin = Lazy(), Lazy()
    graphed = cgraph.graphed(module)
    follow(lab, graphed, twin, calls=7)
    assert states_of(graphed) == {"captured"}
    assert eager_calls(graphed) == 1


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_optimizer_state_settles(lab: Lab, name: str) -> None:
    """… so optimizer state, lazy tables, library handles settle."""
    pairs = []
    for _ in range(2):
        torch.manual_seed(5)
        net = nn.Linear(3, 3).to(lab.device)
        if name == "adam":
            optimizer: Any = torch.optim.Adam(net.parameters(), lr=0.1, capturable=True)
        else:
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        pairs.append((net, optimizer))

    def step(net: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
        return loss.detach()

    graphed = cgraph.graphed(lambda x: step(*pairs[0], x))
    for _ in range(7):
        x = fresh(lab, 4, 3)
        equal(graphed(x), step(*pairs[1], x))
        equal([*pairs[0][0].parameters()], [*pairs[1][0].parameters()])
    assert states_of(graphed) == {"captured"}


def test_after_three_misses_in_a_row_a_key_is_eager_and_the_warning_has_line_and_fix(
    lab: Lab,
) -> None:
    """After three misses in a row the key is eager, with line and fix."""
    counter = itertools.count(1)

    def function(x: Tensor) -> Tensor:
        return x * float(next(counter))  # this line

    graphed = cgraph.graphed(function)
    for number in range(1, 4):
        equal(graphed(torch.ones(2, device=lab.device))[0].item(), float(number))
    with pytest.warns(EagerWarning) as caught:
        graphed(torch.ones(2, device=lab.device))
    line = function.__code__.co_firstlineno + 1
    assert len(caught) == 1
    text = str(caught[0].message)
    assert re.search(rf"test_contract_life\.py:{line}\b", text), text
    assert re.match(
        r"\S+ `.*`: .*\. .* runs eagerly for \(.*\. Fix: .* \(cgraph why CG-DIFFERS\)$", text
    ), text
    key = graphed.report().keys[0]
    assert (key.state, key.fix is None) == ("eager", False)
    assert key.where is not None and key.where.endswith(f"test_contract_life.py:{line}")


def test_no_argument_outlives_a_call_that_python_compares(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda x: x * 2, guards=lambda x: x.dim())
    for _ in range(3):
        graphed(fresh(lab, 3))
    x = fresh(lab, 3)
    graphed(x)
    alive = weakref.ref(x)
    del x
    assert alive() is None and numbers(graphed)[0] >= 1
