"""The contract, "Limits": each test quotes its sentence."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _python_dispatch

import cgraph
from cgraph.errors import EagerWarning
from contract_calls import Box, counted, equal, runs_of, states_of
from graphed_calls import numbers, quiet
from lab import Lab, fresh

VALUE = 0.0
OWN = sys.modules[__name__]


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


class Where:
    """A function of ``x`` that multiplies by a value in one kind of place."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.observed: list[bool] = []
        self.box = Box(by=0.0, items=[0.0], table={"by": 0.0})
        self.name = {
            "argument": "by",
            "attribute": "box.by",
            "item": "box.items",
            "key": "box.table",
            "global": "VALUE",
            "cell": "cell",
        }[kind]
        cell, box, seen = 0.0, self.box, self.observed

        def note() -> None:
            seen.append(_python_dispatch._get_current_dispatch_mode() is not None)

        def set_cell(value: float) -> None:
            nonlocal cell
            cell = value

        functions: dict[str, Callable[..., Tensor]] = {
            "argument": lambda x, by: note() or x * by,
            "attribute": lambda x: note() or x * box.by,
            "item": lambda x: note() or x * box.items[0],
            "key": lambda x: note() or x * box.table["by"],
            "global": lambda x: note() or x * VALUE,
            "cell": lambda x: note() or x * cell,
        }
        self.set_cell, self.function = set_cell, functions[kind]

    def graphed(self, **options: Any) -> cgraph.GraphedFunction:
        """Return the function, graphed."""
        return cgraph.graphed(self.function, guards={"seen": False}, **options)

    def call(self, lab: Lab, graphed: Callable[..., Any], value: float) -> None:
        """Let the place hold a value, and compare a call with an eager one."""
        self.box.by, self.box.items[0], self.box.table["by"] = value, value, value
        OWN.VALUE = value  # type: ignore[attr-defined]
        self.set_cell(value)
        x = fresh(lab, 3)
        equal(graphed(x, value) if self.kind == "argument" else graphed(x), x * value)


KINDS = ["argument", "attribute", "item", "key", "global", "cell"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_that_is_new_in_eight_calls_in_a_row_runs_eagerly_and_unobserved(
    lab: Lab, kind: str
) -> None:
    """A value that was new in eight calls in a row …: its calls run eagerly and unobserved."""
    where = Where(kind)
    graphed = where.graphed()
    with quiet() as caught:
        for number in range(1, 30):
            where.call(lab, graphed, float(number))
    assert [one.category for one in caught] == [EagerWarning]
    assert where.name in str(caught[0].message)
    assert len(where.observed) == 29
    assert where.observed[0] and not any(where.observed[10:])
    assert numbers(graphed)[0] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_that_was_new_in_fewer_calls_in_a_row_still_gets_graphs(
    lab: Lab, kind: str
) -> None:
    """A value that was new in eight calls in a row."""
    where = Where(kind)
    graphed = where.graphed()
    for number in range(6):
        where.call(lab, graphed, float(number))
    for _ in range(3):
        where.call(lab, graphed, 5.0)
    for number in range(6, 12):
        where.call(lab, graphed, float(number))
    for _ in range(3):
        where.call(lab, graphed, 11.0)
    assert numbers(graphed)[:2] == (2, 6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_that_has_more_than_max_graphs_values_runs_eagerly(lab: Lab, kind: str) -> None:
    """… or has more than `max_graphs` values: … one warning names it."""
    where = Where(kind)
    graphed = where.graphed(max_graphs=3)
    with quiet() as caught:
        for number in range(8):
            for _ in range(3):
                where.call(lab, graphed, float(number))
    assert [one.category for one in caught] == [EagerWarning]
    assert where.name in str(caught[0].message)
    assert "max_graphs" in str(caught[0].message)
    assert not any(where.observed[-6:])
    assert 1 <= numbers(graphed)[0] <= 3


def test_the_graph_that_was_not_used_for_longest_goes_first(lab: Lab) -> None:
    """More keys than `max_graphs`: the longest unused goes."""
    counting, counter = counted(lambda x: x * 2)
    graphed = cgraph.graphed(counting, max_graphs=2)

    def runs(rows: int, calls: int) -> int:
        before = runs_of(counter)
        for _ in range(calls):
            x = fresh(lab, rows)
            equal(graphed(x), x * 2)
        return runs_of(counter) - before

    assert [runs(1, 3), runs(2, 3), runs(1, 1), runs(3, 3)] == [2, 2, 0, 2]
    assert graphed.report().captured == 2
    assert [runs(1, 1), runs(3, 1)] == [0, 0]
    assert runs(2, 3) >= 1
    assert [runs(3, 1), runs(2, 1)] == [0, 0]
    assert graphed.report().captured == 2
    again = [one.reason for key in graphed.report().keys for one in key.rerecorded]
    assert "evicted" in again


def _tensor(lab: Lab, box: Box) -> None:
    box.table = fresh(lab, 3)


def _object(_: Lab, box: Box) -> None:
    box.function = lambda x: x * 2


def _items(_: Lab, box: Box) -> None:
    box.items.append(object())


@pytest.mark.parametrize("move", [_tensor, _object, _items])
def test_five_captures_of_little_use_make_calls_eager_for_a_while(
    lab: Lab, move: Callable[[Lab, Box], None]
) -> None:
    """Five captures … fewer than eight replays each: eager for 8 calls, … then 16, 32 … 256."""
    box = Box(table=fresh(lab, 3), function=lambda x: x * 2, items=[])
    counting, counter = counted(lambda x: box.function(x) * box.table + len(box.items))
    graphed = cgraph.graphed(counting)

    def call() -> bool:
        before, x = runs_of(counter), fresh(lab, 3)
        equal(graphed(x), x * 2 * box.table + len(box.items))
        return runs_of(counter) > before

    ran: list[bool] = []
    with quiet() as caught:
        while not caught:
            ran += [call() for _ in range(3)]
            move(lab, box)
            assert len(ran) < 60
    assert len(ran) == 6 * 3, ran
    assert [one.category for one in caught] == [EagerWarning]
    assert states_of(graphed) == {"eager"}
    pauses = []
    for _ in range(7):
        # The last two of these are observed and captured.
        pauses.append(len(list(itertools.takewhile(bool, (call() for _ in range(300))))) - 2)
        assert states_of(graphed) == {"captured"}
        if len(pauses) < 7:
            move(lab, box)
    # Two calls of the first pause came above; later ones begin with the call that drops the graph.
    assert pauses == [8 - 2, 16 + 1, 32 + 1, 64 + 1, 128 + 1, 256 + 1, 256 + 1]
    assert not any(call() for _ in range(10))


def test_captures_that_served_eight_replays_are_of_use(lab: Lab) -> None:
    """… that served fewer than eight replays each."""
    box = Box(table=fresh(lab, 3))
    graphed = cgraph.graphed(lambda x: x * box.table)
    for _ in range(12):
        for _ in range(10):
            x = fresh(lab, 3)
            equal(graphed(x), x * box.table)
        box.table = fresh(lab, 3)
    assert states_of(graphed) == {"captured"}


NUMBERS = itertools.count(1)


def _reads(y: Tensor) -> Tensor:
    return y * y.sum().item()


def _selects(y: Tensor) -> Tensor:
    return y[y > 0].sum()


def _counts(y: Tensor) -> Tensor:
    return y * float(repr(NUMBERS)[6:-1]) if next(NUMBERS) else y


@pytest.mark.parametrize("fails", [_reads, _selects, _counts])
def test_a_failed_capture_makes_calls_eager_for_8_calls(
    lab: Lab, fails: Callable[[Tensor], Tensor]
) -> None:
    """… other pauses grow likewise, eight replays reset them: never for good."""
    box = Box(flag=True)
    name = "".join(["fl", "ag"])
    counting, counter = counted(lambda x: fails(x * 2) if getattr(box, name) else x * 2)
    graphed = cgraph.graphed(counting)
    with pytest.warns(EagerWarning):
        for _ in range(4 if fails is _counts else 2):
            graphed(fresh(lab, 3))
    box.flag = False
    before = runs_of(counter)
    for _ in range(8):
        x = fresh(lab, 3)
        equal(graphed(x), x * 2)
    assert runs_of(counter) == before + 8
    assert states_of(graphed) == {"eager"}
    for _ in range(4):
        x = fresh(lab, 3)
        equal(graphed(x), x * 2)
    assert runs_of(counter) == before + 10
    assert states_of(graphed) == {"captured"}


def _manual_seed(lab: Lab) -> Callable[[], object]:
    return lambda: torch.manual_seed(3)


def _set_state(lab: Lab) -> Callable[[], object]:
    module: Any = torch.cuda if lab.device == "cuda" else torch.random
    state = module.get_rng_state()
    return lambda: module.set_rng_state(state)


def _generator(lab: Lab) -> Callable[[], object]:
    default = torch.cuda.default_generators[0] if lab.device == "cuda" else torch.default_generator
    return lambda: default.manual_seed(3)


def _fork(lab: Lab) -> Callable[[], object]:
    def draws() -> None:
        with torch.random.fork_rng():
            torch.manual_seed(3)

    return draws


@pytest.mark.parametrize("make", [_manual_seed, _set_state, _generator, _fork])
def test_seeding_or_setting_a_random_state_inside_is_eager(
    lab: Lab, make: Callable[[Lab], Callable[[], object]]
) -> None:
    """Seeding or setting a random state inside: eager."""
    seed = make(lab)

    def function(x: Tensor) -> Tensor:
        seed()
        return x + torch.rand_like(x)

    counting, counter = counted(function)
    graphed = cgraph.graphed(counting)
    torch.manual_seed(5)
    with quiet() as caught:
        found = [graphed(torch.ones(3, device=lab.device)) for _ in range(6)]
    torch.manual_seed(5)
    equal(found, [function(torch.ones(3, device=lab.device)) for _ in range(6)])
    # torch warns of a fork on hosts with several devices.
    assert [one.category for one in caught if one.category is not UserWarning] == [EagerWarning]
    assert numbers(graphed)[0] == 0 and runs_of(counter) == 6
