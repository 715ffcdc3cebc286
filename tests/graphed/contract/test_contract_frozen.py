"""The contract, "Frozen": each test quotes its sentence."""

from __future__ import annotations

import gc
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from cgraph import _torch
from cgraph.errors import EagerWarning
from contract_calls import Box, counted, equal, follow, runs_of, states_of
from graphed_calls import numbers, quiet
from lab import Lab, fresh


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def hidden(box: Box, *parts: str) -> Any:
    """Return an attribute under a name that stands in no code."""
    return getattr(box, "".join(parts))


@pytest.mark.parametrize("value", [2.0, 3, "text"], ids=["float", "int", "str"])
def test_what_nothing_guards_is_as_at_the_capture(lab: Lab, value: Any) -> None:
    """**Frozen**: everything else, as at the capture."""
    box = Box(scale=value)

    def function(x: Tensor) -> Tensor:
        found = hidden(box, "sc", "ale")
        return x * (len(found) if isinstance(found, str) else found)

    graphed = cgraph.graphed(function)
    follow(lab, graphed, function, calls=3)
    by = len(value) if isinstance(value, str) else value
    box.scale = value * 2
    follow(lab, graphed, lambda x: x * by, calls=3)


def _weight(table: Tensor) -> Box:
    return Box(table=table)


def _module(table: Tensor) -> Box:
    module = nn.Module()
    module.register_buffer("inner", table)
    return Box(table=module)


def _items(table: Tensor) -> Box:
    return Box(table=[{"k": table}])


@pytest.mark.parametrize("make", [_weight, _module, _items])
def test_what_is_frozen_is_kept_alive_as_long_as_the_graph(
    lab: Lab, make: Callable[[Tensor], Box]
) -> None:
    """… kept alive as long as the graph."""
    table = fresh(lab, 2, 3)
    box, twin, memory = make(table), table.clone(), _torch.WeakStorage(table)
    del table

    def function(x: Tensor) -> Tensor:
        found = hidden(box, "ta", "ble")
        if isinstance(found, nn.Module):
            found = found.get_buffer("in" + "ner")
        elif isinstance(found, list):
            found = next(iter(found[0].values()))
        return x * found

    graphed = cgraph.graphed(function)
    follow(lab, graphed, lambda x: x * twin, calls=3)
    box.table = None
    gc.collect()
    others = [fresh(lab, 2, 3) for _ in range(50)]
    assert memory.get() is not None
    follow(lab, graphed, lambda x: x * twin, calls=3)
    del others
    graphed.reset()
    gc.collect()
    lab.sync()
    assert memory.get() is None


def test_the_report_lists_what_a_graph_reads_that_nothing_guards(lab: Lab) -> None:
    """… the report lists what a graph reads that nothing guards."""
    box = Box(one=fresh(lab, 2, 3), other=fresh(lab, 3).half(), guarded=fresh(lab, 3))

    def function(x: Tensor) -> Tensor:
        return x * hidden(box, "o", "ne") + hidden(box, "oth", "er") + box.guarded

    graphed = cgraph.graphed(function)
    follow(lab, graphed, function)
    (key,) = graphed.report().keys
    assert len(key.frozen) == 2, key.frozen
    assert any("float32[2, 3]" in one and "mul" in one for one in key.frozen), key.frozen
    assert any("float16[3]" in one and "add" in one for one in key.frozen), key.frozen
    assert "float32[2, 3]" in str(graphed.report())


def test_the_report_lists_nothing_where_all_is_guarded(lab: Lab) -> None:
    """… the report lists what a graph reads that nothing guards."""
    net, box = nn.Linear(3, 3).to(lab.device), Box(table=[fresh(lab, 3)])
    graphed = cgraph.graphed(lambda x: net(x) + box.table[0])
    follow(lab, graphed, lambda x: net(x) + box.table[0])
    (key,) = graphed.report().keys
    assert (key.state, key.frozen) == ("captured", ())


def _by_attribute(box: Box, x: Tensor) -> Tensor:
    box.n += 1
    return x * box.n


def _by_items(box: Box, x: Tensor) -> Tensor:
    box.items.append(1.0)
    return x * sum(box.items)


def _by_dictionary(box: Box, x: Tensor) -> Tensor:
    box.table["k"] = box.table.get("k", 0.0) + 1.0
    return x * box.table["k"]


def _by_tensor(box: Box, x: Tensor) -> Tensor:
    box.last = x * 2 if box.last is None else box.last + x
    return box.last.clone()


def _by_iterator(box: Box, x: Tensor) -> Tensor:
    return x * float(next(box.counter))


def _by_random(box: Box, x: Tensor) -> Tensor:
    return x * box.random.random()


def _by_host(box: Box, x: Tensor) -> Tensor:
    return x * (2.0 if x.sum().item() > 0 else 3.0)


@pytest.mark.parametrize(
    "work",
    [_by_attribute, _by_items, _by_dictionary, _by_tensor, _by_iterator, _by_random, _by_host],
)
def test_what_only_a_break_reads_or_changes_is_its_own_affair(
    lab: Lab, work: Callable[[Box, Tensor], Tensor]
) -> None:
    """… only an `eager_break` reads or changes is its own affair."""

    def new() -> Box:
        return Box(
            n=0, items=[], table={}, last=None, counter=itertools.count(), random=random.Random(3)
        )

    box, twin = new(), new()
    broken = cgraph.eager_break(lambda x: work(box, x))
    counting, counter = counted(lambda x: broken(x + 1) - 1)
    graphed = cgraph.graphed(counting)
    follow(lab, graphed, lambda x: work(twin, x + 1) - 1, calls=7)
    assert runs_of(counter) == 2
    assert (box.n, box.items, box.table) == (twin.n, twin.items, twin.table)
    assert numbers(graphed) == (1, 6, 1)


def _step(box: Box, x: Tensor) -> Tensor:
    box.step += 1
    return x * 2


def _log(box: Box, x: Tensor) -> Tensor:
    box.log.append(len(box.log))
    return x * 2


def _table(box: Box, x: Tensor) -> Tensor:
    box.table["n"] = box.table.get("n", 0) + 1
    return x * 2


def _keep(box: Box, x: Tensor) -> Tensor:
    box.last = x * 3
    return x * 2


CHANGES: dict[str, Callable[[Box, Tensor], Tensor]] = {
    "step": _step,
    "log": _log,
    "table": _table,
    "last": _keep,
}


@pytest.mark.parametrize("by_name", [False, True], ids=["ignore", "names"])
@pytest.mark.parametrize("what", CHANGES)
def test_side_effects_that_are_ignored_need_not_happen_in_replays(
    lab: Lab, what: str, by_name: bool
) -> None:
    """`side_effects="ignore"`, or names: these changes of Python's need not happen in replays."""
    box = Box(step=0, log=[], table={}, last=None)
    counting, counter = counted(lambda x: CHANGES[what](box, x))
    graphed = cgraph.graphed(counting, side_effects=[f"box.{what}"] if by_name else "ignore")
    follow(lab, graphed, lambda x: x * 2, calls=6)
    assert runs_of(counter) == 2
    assert max(box.step, len(box.log), box.table.get("n", 0)) == (0 if what == "last" else 2)
    assert numbers(graphed) == (1, 5, 1)


@pytest.mark.parametrize("what", CHANGES)
def test_side_effects_of_other_names_are_not_ignored(lab: Lab, what: str) -> None:
    """… or names: *these* changes."""
    box, twin = (Box(step=0, log=[], table={}, last=None, another=0) for _ in range(2))
    graphed = cgraph.graphed(lambda x: CHANGES[what](box, x), side_effects=["box.another"])
    with quiet() as caught:
        for _ in range(12):
            x = fresh(lab, 3)
            equal(graphed(x), CHANGES[what](twin, x))
            assert (box.step, box.log, box.table) == (twin.step, twin.log, twin.table)
    if what == "last":
        equal(box.last, twin.last)
        assert not caught and states_of(graphed) == {"captured"}
    else:
        assert [one.category for one in caught] == [EagerWarning]
        assert what in str(caught[0].message)


def test_numbers_spelled_out_are_constants_filled_anew(lab: Lab) -> None:
    """… numbers spelled out are constants, filled anew in each replay."""

    def function(x: Tensor) -> Tensor:
        low = torch.tensor(-1.0, device=x.device)
        y = torch.where(x > 0, x, low) + torch.tensor([1, 2, 3], device=x.device)
        low.fill_(77)
        return y * x.new_tensor(2.0)

    graphed = cgraph.graphed(function)
    for _ in range(6):
        x = fresh(lab, 3)
        equal(graphed(x), function(x))
    assert states_of(graphed) == {"captured"}
