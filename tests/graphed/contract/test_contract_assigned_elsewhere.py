"""«Assigned» of the contract where a call is no replay, or where the place belongs to the call."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from cgraph.errors import CaptureError
from contract_calls import Box, equal, states_of
from graphed_calls import numbers, quiet
from lab import Lab, fresh


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@dataclasses.dataclass
class Batch:
    """A batch of tensors."""

    x: Tensor
    pred: Any = None
    rows: int = 0


def _put(given: Any, x: Tensor) -> None:
    if isinstance(given, Batch):
        given.pred = x * 3
        given.rows = 7
    elif isinstance(given, list):
        given.append(x * 3)
    else:
        given["pred"] = x * 3


def _contents(given: Any) -> Any:
    return dict(vars(given)) if isinstance(given, Batch) else given


MAKES: dict[str, Callable[[Tensor], Any]] = {
    "dict": lambda x: {"x": x},
    "dataclass": lambda x: Batch(x),
    "list": lambda x: [x, (x, 1)],
    "nested": lambda x: {"x": x, "inner": [{"y": x}]},
}


def both(
    lab: Lab, function: Callable[[Any, Tensor], Any], make: Any, rows: int = 3, **options: Any
) -> cgraph.GraphedFunction:
    """Call with and without graphs; compare results and the containers given to each call."""
    graphed = cgraph.graphed(function, **options)
    with quiet():
        for _ in range(8):
            x = fresh(lab, rows, 2)
            ours, theirs = make(x), make(x)
            equal(graphed(ours, x), function(theirs, x))
            equal(_contents(ours), _contents(theirs))
    return graphed


@pytest.mark.parametrize("what", ["dict", "dataclass", "nested"])
def test_a_replay_assigns_to_containers_of_arguments(lab: Lab, what: str) -> None:
    """… or of an argument's container, a replay assigns."""

    def step(given: Any, x: Tensor) -> Tensor:
        _put(given, x)
        return x + 1

    graphed = both(lab, step, MAKES[what])
    assert states_of(graphed) == {"captured"} and numbers(graphed)[1] >= 5


@pytest.mark.parametrize("what", ["dict", "dataclass", "nested"])
def test_padded_calls_assign_to_containers_of_arguments_from_the_first_call_on(
    lab: Lab, what: str
) -> None:
    """The first call of a size knows nothing of assignments yet."""

    def step(given: Any, x: Tensor) -> Tensor:
        if isinstance(given, Batch):
            given.pred = x * 3
        else:
            given["pred"] = x * 3
        return x + 1

    graphed = both(lab, step, MAKES[what], sizes=[4])
    assert numbers(graphed)[1] >= 4


@pytest.mark.parametrize("what", MAKES)
def test_a_call_whose_capture_ends_changes_the_callers_own_containers(lab: Lab, what: str) -> None:
    """What was captured so far is launched and the rest of this call runs eagerly."""

    def step(given: Any, x: Tensor) -> Tensor:
        y = x + 1
        if float(x.sum()) > 1e9:
            y = y + 1
        _put(given, x)
        return y

    both(lab, step, MAKES[what])


@pytest.mark.parametrize("what", MAKES)
def test_what_a_capture_alone_puts_into_an_argument_reaches_the_caller(lab: Lab, what: str) -> None:
    """Otherwise this call's result stands and the next call captures again."""
    counts = {True: itertools.count(), False: itertools.count()}

    def step(given: Any, x: Tensor, *, is_ours: bool = False) -> Tensor:
        if next(counts[is_ours]) >= 1:
            _put(given, x)
        return x + 1

    graphed = cgraph.graphed(step)
    with quiet():
        for _ in range(6):
            x = fresh(lab, 3, 2)
            ours, theirs = MAKES[what](x), MAKES[what](x)
            graphed(ours, x, is_ours=True)
            step(theirs, x)
            equal(_contents(ours), _contents(theirs))


def test_a_list_of_tuples_among_arguments_is_no_change(lab: Lab) -> None:
    """Containers that nothing changes do not keep a call from its replays."""

    def step(given: Any, x: Tensor) -> Tensor:
        return x + given[1][0] + len(given)

    graphed = both(lab, step, MAKES["list"])
    assert states_of(graphed) == {"captured"}


def test_a_dictionary_with_tensors_as_keys_among_arguments_is_no_change(lab: Lab) -> None:
    """Keys are compared by identity, as ``==`` of tensors compares elements."""
    key = torch.ones(3, device=lab.device)
    graphed = both(lab, lambda given, x: x + given[key], lambda x: {key: x})
    assert states_of(graphed) == {"captured"}


def test_the_dictionary_of_an_argument_that_is_returned_is_the_callers(lab: Lab) -> None:
    """Aliases of what was there before the call are returned as such."""
    items = [1.0]

    def step(given: Any, x: Tensor) -> Any:
        given["x"], given["items"] = x, items
        return given

    graphed = cgraph.graphed(step)
    with quiet():
        for _ in range(6):
            x, given = fresh(lab, 3), {"y": 1.0}
            found = graphed(given, x)
            assert found is given and given["x"] is x and given["items"] is items


def test_an_item_and_then_the_dictionary_are_assigned_in_order(lab: Lab) -> None:
    """… a replay assigns, in order."""
    box = Box(table={"k": 0.0})

    def step(x: Tensor) -> Tensor:
        box.table["k"] = 1.0
        box.table = {"made": 2.0}
        return x * 2

    graphed = cgraph.graphed(step)
    for _ in range(6):
        given = box.table = {"k": 0.0}
        graphed(fresh(lab, 3))
        assert box.table == {"made": 2.0} and given == {"k": 1.0}
    assert states_of(graphed) == {"captured"}


def test_an_object_that_was_there_and_is_assigned_makes_calls_eager(lab: Lab) -> None:
    """Eager as before: other objects."""
    one, other = Box(scale=1.0), Box(scale=1.0)
    box = Box(cur=other)

    def step(x: Tensor) -> Tensor:
        box.cur = one
        box.cur.value = x * 2
        return x * 2

    graphed = cgraph.graphed(step)
    with quiet():
        for _ in range(6):
            box.cur, other.value = other, None
            x = fresh(lab, 3)
            graphed(x)
            assert box.cur is one and other.value is None
            equal(one.value, x * 2)
    assert states_of(graphed) == {"eager"}


def test_a_plain_value_that_calls_with_gradients_assign_in_turn_is_right(lab: Lab) -> None:
    """Tensors are results … (with history: eager)."""
    model = nn.Linear(2, 2).to(lab.device)
    box = Box(rows=0)

    def step(x: Tensor) -> Tensor:
        box.rows = x.shape[0]
        return model(x).sum()

    graphed = cgraph.graphed(step)
    with torch.enable_grad(), quiet():
        for number in range(12):
            rows = (3, 5)[number % 2]
            graphed(fresh(lab, rows, 2)).backward()
            assert box.rows == rows


@pytest.mark.parametrize("make", [lambda: {"last": None}, lambda: Box(last=None)])
def test_a_break_finds_what_was_assigned_to_an_argument(lab: Lab, make: Any) -> None:
    """So that a break finds what was assigned before it."""
    seen: list[Tensor] = []

    @cgraph.eager_break
    def look(given: Any) -> None:
        seen.append((given["last"] if isinstance(given, dict) else given.last).clone())

    def step(given: Any, x: Tensor) -> Tensor:
        if isinstance(given, dict):
            given["last"] = x * 3
        else:
            given.last = x * 3
        look(given)
        return x + 1

    graphed = cgraph.graphed(step)
    for _ in range(6):
        x = fresh(lab, 3)
        graphed(make(), x)
        equal(seen[-1], x * 3)
    assert numbers(graphed)[1] >= 3


def test_state_under_a_parameter_as_key_becomes_an_input(lab: Lab) -> None:
    """A tensor at a guarded place … becomes an input when the function assigns it."""
    key = nn.Parameter(torch.ones(2, device=lab.device))
    ours, theirs = (Box(state={key: torch.zeros(2, device=lab.device)}) for _ in range(2))

    def step(box: Box, x: Tensor) -> Tensor:
        box.state[key] = box.state[key] * 0.5 + x
        return x * 2 + box.state[key]

    graphed = cgraph.graphed(lambda x: step(ours, x))
    for _ in range(6):
        x = fresh(lab, 2)
        equal(graphed(x), step(theirs, x.clone()))
        equal(ours.state[key], theirs.state[key])
    assert states_of(graphed) == {"captured"}


def test_a_capture_ahead_puts_back_a_list_that_its_sample_pops(lab: Lab) -> None:
    """.capture() put back what they assigned; a sample that changes guarded values raises."""
    box = Box(items=[1, 2, 3])

    def step(x: Tensor) -> Tensor:
        box.items.pop()
        return x * 2

    with pytest.raises(CaptureError, match="Make that state first"):
        cgraph.graphed(step).capture(fresh(lab, 3))
    assert box.items == [1, 2, 3]


def test_a_capture_ahead_puts_back_what_functions_in_a_list_assign(lab: Lab) -> None:
    """Tensors at places that only functions in containers name are put back as well."""
    box = Box(state=torch.zeros(2, device=lab.device))

    def update(x: Tensor) -> Tensor:
        box.state = box.state * 0.5 + x.amax(0)
        return x + box.state

    parts = [update]

    def step(x: Tensor) -> Tensor:
        for part in parts:
            x = part(x)
        return x

    before = box.state
    graphed = cgraph.graphed(step).capture(fresh(lab, 3, 2))
    assert box.state is before
    state = before.clone()
    for _ in range(3):
        x = fresh(lab, 3, 2)
        state = state * 0.5 + x.amax(0)
        equal(graphed(x), x + state)
        equal(box.state, state)


def test_a_capture_of_a_size_that_ends_leaves_nothing_behind(lab: Lab) -> None:
    """The call runs eagerly then, and writes and assigns once."""
    zeros = [torch.zeros(2, device=lab.device) for _ in range(6)]
    boxes = [Box(state=zeros[one], seen=zeros[2 + one]) for one in range(2)]

    def step(box: Box, x: Tensor, into: Tensor) -> Tensor:
        into.mul_(0.5).add_(x.amax(0))
        box.seen.add_(1)
        box.state = box.state * 0.5 + x.amax(0)
        return x + 1 if float(x.sum()) < 1e9 else x

    graphed = cgraph.graphed(lambda x, into: step(boxes[0], x, into), sizes=[4])
    with quiet():
        for _ in range(6):
            x = fresh(lab, 3, 2)
            equal(graphed(x, zeros[4]), step(boxes[1], x, zeros[5]))
            equal((zeros[4], vars(boxes[0])), (zeros[5], vars(boxes[1])))


def test_a_capture_ahead_that_raises_puts_back_what_its_sample_assigned(lab: Lab) -> None:
    """A sample that leaves new tensors or changes guarded values raises."""
    one, other = Box(scale=1.0), Box(scale=1.0)
    box = Box(cur=other, last=None)

    def step(x: Tensor) -> Tensor:
        box.last = x * 2
        box.cur = one
        return x * 2

    with pytest.raises(CaptureError):
        cgraph.graphed(step).capture(fresh(lab, 3))
    assert box.cur is other and box.last is None
