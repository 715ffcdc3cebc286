"""«Assigned» of the contract: what the function assigns at guarded places, a replay assigns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import cgraph
from contract_calls import Box, counted, equal, runs_of, states_of
from graphed_calls import numbers, quiet
from lab import Lab, fresh

Step = Callable[[Box, Tensor], Any]


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def both(lab: Lab, step: Step, calls: int = 8, options: Any = None, **state: Any) -> Any:
    """Call a step with and without graphs; compare results and all state after each call."""

    def made() -> Box:
        copied = pytree.tree_map_only(Tensor, lambda one: one.clone(), state)
        return Box(**copied)

    ours, theirs = made(), made()
    graphed = cgraph.graphed(lambda x: step(ours, x), **(options or {}))
    for _ in range(calls):
        x = fresh(lab, 3)
        equal(graphed(x), step(theirs, x.clone()))
        equal(vars(ours), vars(theirs))
    return graphed


def _last(box: Box, x: Tensor) -> Tensor:
    box.last = x * 3
    return x * 2


def _same(box: Box, x: Tensor) -> Tensor:
    box.last = x * 3
    return box.last  # type: ignore[no-any-return]


def _state(box: Box, x: Tensor) -> Tensor:
    box.h = torch.tanh(box.h + x)
    return box.h + 1  # type: ignore[no-any-return]


def _item(box: Box, x: Tensor) -> Tensor:
    box.cache["k"] = torch.cat([box.cache["k"][1:], x[:1]])
    return box.cache["k"].sum() + x  # type: ignore[no-any-return]


def _argument(box: Box, x: Tensor) -> Tensor:
    box.last = x
    return x * 2


def _swap(box: Box, x: Tensor) -> Tensor:
    box.a, box.b = box.b, box.a + x
    return box.a * box.b  # type: ignore[no-any-return]


def _made(box: Box, x: Tensor) -> Tensor:
    box.outputs = {"h": x * 2, "all": [x + 1, (x, 3.0)]}
    return x * 2


def _flag(box: Box, x: Tensor) -> Tensor:
    box.rows = x.shape[0]
    return x * 2


def _new_attribute(box: Box, x: Tensor) -> Tensor:
    box.made_here = x - 1
    return x * 2


CASES: dict[str, tuple[Step, dict[str, Any]]] = {
    "an attribute": (_last, {"last": None}),
    "the result": (_same, {"last": None}),
    "a state": (_state, {"h": torch.zeros(3)}),
    "an item": (_item, {"cache": {"k": torch.zeros(3)}}),
    "an argument": (_argument, {"last": None}),
    "each other": (_swap, {"a": torch.ones(3), "b": torch.zeros(3)}),
    "containers": (_made, {"outputs": None}),
    "a plain value": (_flag, {"rows": 0}),
    "a new attribute": (_new_attribute, {}),
}


@pytest.mark.parametrize("what", CASES)
def test_a_replay_assigns_what_the_function_assigns(lab: Lab, what: str) -> None:
    """What the function assigns to an attribute or an item … a replay assigns."""
    step, state = CASES[what]
    state = pytree.tree_map_only(Tensor, lambda one: one.to(lab.device), state)
    graphed = both(lab, step, **state)
    assert states_of(graphed) == {"captured"}
    assert numbers(graphed)[1] >= 6


def test_assigned_tensors_are_fresh_also_where_results_are_static(lab: Lab) -> None:
    """Tensors are results, always fresh ones."""
    box = Box(last=None)
    graphed = cgraph.graphed(lambda x: _last(box, x), outputs="static")
    kept, expected = [], []
    for _ in range(6):
        x = fresh(lab, 3)
        graphed(x)
        kept.append(box.last)
        expected.append(x * 3)
    equal(kept, expected)
    assert len({one.data_ptr() for one in kept[2:]}) == 4


def test_an_assigned_tensor_with_history_makes_calls_eager(lab: Lab) -> None:
    """… without history (with history: eager)."""
    box, weight = Box(last=None), nn.Parameter(fresh(lab, 3))
    graphed = cgraph.graphed(lambda x: _last(box, x * weight))
    with quiet(), torch.enable_grad():
        for _ in range(6):
            x = fresh(lab, 3)
            equal(graphed(x), x * weight * 2)
            equal(box.last, x * weight * 3)
            assert box.last.requires_grad
    assert graphed.report().replays == 0


def test_an_assignment_before_a_break_is_there_in_the_break(lab: Lab) -> None:
    """… in order, so that a break finds what was assigned before it."""
    box, twin = Box(last=None, seen=None), Box(last=None, seen=None)

    def reads(one: Box) -> Callable[[], None]:
        def read() -> None:
            one.seen = one.last.clone()

        return read

    def step(one: Box, look: Callable[[], None], x: Tensor) -> Tensor:
        one.last = x * 3
        look()
        one.last = one.last + 1
        return x * 2

    broken = cgraph.eager_break(reads(box))
    graphed = cgraph.graphed(lambda x: step(box, broken, x))
    for _ in range(6):
        x = fresh(lab, 3)
        equal(graphed(x), step(twin, reads(twin), x))
        equal((box.last, box.seen), (twin.last, twin.seen))
    assert states_of(graphed) == {"captured"}


def test_a_plain_value_that_each_call_assigns_otherwise_is_never_replayed(lab: Lab) -> None:
    """… plain values only if call and capture, from equal values, assigned the same."""
    box, draws = Box(number=0.0), iter(range(100))

    def step(x: Tensor) -> Tensor:
        box.number = float(next(draws))
        return x * 2

    graphed = cgraph.graphed(step)
    with quiet():
        for number in range(10):
            x = fresh(lab, 3)
            equal(graphed(x), x * 2)
            assert box.number == number
    assert "captured" not in states_of(graphed)


def test_a_name_that_is_only_stored_is_not_compared(lab: Lab) -> None:
    """A name that is only stored is not compared."""
    box = Box(rows=0, last=None)

    def step(x: Tensor) -> Tensor:
        box.rows, box.last = x.shape[0], x * 3
        return x * 2

    counting, counter = counted(step)
    graphed = cgraph.graphed(counting)
    for number in range(24):
        rows = (3, 5)[number % 2]
        x = fresh(lab, rows)
        box.last = None if number % 3 else "something else"
        equal(graphed(x), x * 2)
        assert box.rows == rows
        equal(box.last, x * 3)
    assert runs_of(counter) <= 8


def test_values_count_as_at_the_begin_of_the_call(lab: Lab) -> None:
    """… values count as at the call's beginning."""

    def step(box: Box, x: Tensor) -> Tensor:
        box.odd = not box.odd
        return x * (2 if box.odd else 3)

    graphed = both(lab, step, calls=14, odd=False)
    assert numbers(graphed)[0] == 2 and numbers(graphed)[1] >= 6


def _appends(box: Box, x: Tensor) -> Tensor:
    box.items.append(x.shape[0])
    return x * 2


def _deletes(box: Box, x: Tensor) -> Tensor:
    box.table = {"a": 1}
    del box.table["a"]
    if "old" in box.cache:
        del box.cache["old"]
    box.cache["old"] = x * 2
    del box.cache["old"]
    return x * 2


def _object(box: Box, x: Tensor) -> Tensor:
    box.made = Box(h=x * 2)
    return x * 2


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
@pytest.mark.parametrize("step", [_appends, _object])
def test_what_cannot_be_assigned_is_eager(lab: Lab, step: Step) -> None:
    """Eager as before: lists that were there and change, other objects made in the call."""
    box, twin = Box(items=[], made=None), Box(items=[], made=None)
    graphed = cgraph.graphed(lambda x: step(box, x))
    for _ in range(12):
        x = fresh(lab, 3)
        equal(graphed(x), step(twin, x))
        assert box.items == twin.items
        if box.made is not None:
            equal(box.made.h, twin.made.h)
    assert "captured" not in states_of(graphed)


def test_items_of_an_arguments_dictionary_are_assigned_to_that_of_the_call(lab: Lab) -> None:
    """… or of an argument's container, a replay assigns."""

    def step(batch: dict[str, Tensor], scale: float = 2.0) -> Tensor:
        batch["pred"] = batch["x"] * scale
        return batch["x"] + 1

    graphed = cgraph.graphed(step)
    for _ in range(6):
        x = fresh(lab, 3)
        batch = {"x": x}
        equal(graphed(batch), x + 1)
        assert [*batch] == ["x", "pred"] and batch["x"] is x
        equal(batch["pred"], x * 2)
    assert states_of(graphed) == {"captured"}


def test_a_dictionary_of_the_call_that_is_returned_is_that_of_the_call(lab: Lab) -> None:
    """… an argument's container, a replay assigns."""

    def step(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        batch["h"] = torch.tanh(batch["h"] + batch["x"])
        return batch

    graphed, h = cgraph.graphed(step), fresh(lab, 3)
    for _ in range(6):
        x = fresh(lab, 3)
        batch, other = {"x": x, "h": h}, {"x": x, "h": h.clone()}
        assert graphed(batch) is batch
        equal(batch["h"], step(other)["h"])
        h = batch["h"]
    assert states_of(graphed) == {"captured"}


def test_attributes_of_an_object_among_the_arguments_are_those_of_the_call(lab: Lab) -> None:
    """… an attribute … at a guarded place."""

    def step(x: Tensor, one: Box) -> Tensor:
        one.last = x * one.scale
        return x + 1

    graphed = cgraph.graphed(step)
    for _ in range(6):
        x, one = fresh(lab, 3), Box(scale=2.0, last=None)
        equal(graphed(x, one), x + 1)
        equal(one.last, x * 2)
    assert states_of(graphed) == {"captured"}


def test_a_capture_ahead_puts_back_what_it_assigned(lab: Lab) -> None:
    """Comparing runs and `.capture()` put back what they assigned."""
    before = fresh(lab, 3)
    box = Box(last=before, h=fresh(lab, 3))
    state = box.h

    def step(x: Tensor) -> Tensor:
        box.last = x * 3
        box.h = box.h * 2
        return x + box.h  # type: ignore[no-any-return]

    graphed = cgraph.graphed(step)
    with quiet():
        graphed.capture(fresh(lab, 3), progress=False)
    assert box.last is before and box.h is state
    x, h = fresh(lab, 3), state.clone()
    equal(graphed(x), x + h * 2)
    equal(box.h, h * 2)
    equal(box.last, x * 3)


@pytest.mark.parametrize("options", [{"debug": "compare"}, {"check_every": 2}], ids=str)
@pytest.mark.parametrize("what", ["an attribute", "a state", "an item", "containers"])
def test_comparing_runs_put_back_what_they_assigned(
    lab: Lab, what: str, options: dict[str, Any]
) -> None:
    """Comparing runs … put back what they assigned."""
    step, state = CASES[what]
    state = pytree.tree_map_only(Tensor, lambda one: one.to(lab.device), state)
    both(lab, step, options=options, **state)
