"""The contract, "Tensors of arguments": each test quotes its sentence."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from contract_calls import Box, counted, equal, keys_of, runs_of, states_of
from graphed_calls import numbers
from lab import Lab, fresh


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@dataclasses.dataclass
class Batch:
    """A tensor in a dataclass."""

    into: Tensor


def seeing(function: Callable[..., Any]) -> tuple[cgraph.GraphedFunction, list[int]]:
    """Return a graphed function of ``x`` and one more, and the latter's addresses in each run."""
    addresses: list[int] = []

    def watched(x: Tensor, given: Any) -> Any:
        one = tensor_in(given)
        addresses.append(one.data_ptr())
        return function(x, one)

    return cgraph.graphed(watched, guards={"addresses": False}), addresses


def add(x: Tensor, into: Tensor) -> Tensor:
    """Write the second one in place."""
    into.add_(x)
    return into * 2


def test_parameters_are_static(lab: Lab) -> None:
    """Parameters are static."""
    weight = nn.Parameter(fresh(lab, 2, 3))
    graphed, addresses = seeing(lambda x, w: x * w)
    for move in (False, True):
        if move:
            weight.data = weight.data * 2
        for _ in range(4):
            x = fresh(lab, 2, 3)
            weight.mul_(1.5)
            equal(graphed(x, weight), x * weight)
        assert addresses[-1] == weight.data_ptr()
    assert len(addresses) == 4
    assert addresses[0] == addresses[1] != addresses[2] == addresses[3]


WRAPS: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda one: one,
    "dictionary": lambda one: {"into": one},
    "dataclass": Batch,
}


@pytest.mark.parametrize("wrap", WRAPS)
def test_an_argument_that_is_written_and_stays_where_it_lay_is_static(lab: Lab, wrap: str) -> None:
    """A tensor that lies where it lay in the call before, and is written …, is static."""
    into, twin = torch.zeros(2, 3, device=lab.device), torch.zeros(2, 3, device=lab.device)
    graphed, addresses = seeing(add)
    for _ in range(6):
        x = fresh(lab, 2, 3)
        equal(graphed(x, WRAPS[wrap](into)), add(x, twin))
        equal(into, twin)
    assert addresses == [into.data_ptr()] * 2
    assert numbers(graphed) == (1, 5, 1)


@pytest.mark.parametrize("wrap", WRAPS)
def test_an_argument_that_was_static_and_moves_becomes_an_input(lab: Lab, wrap: str) -> None:
    """… when it moves, the next capture makes it an input."""
    into = torch.zeros(2, 3, device=lab.device)
    graphed, addresses = seeing(add)
    for _ in range(5):
        graphed(fresh(lab, 2, 3), WRAPS[wrap](into))
    before = len(addresses)
    places = [torch.zeros(2, 3, device=lab.device) for _ in range(6)]
    for one in places:
        twin, x = one.clone(), fresh(lab, 2, 3)
        equal(graphed(x, WRAPS[wrap](one)), add(x, twin))
        equal(one, twin)
    assert len(addresses) == before + 1
    assert addresses[-1] not in [one.data_ptr() for one in places]
    assert states_of(graphed) == {"captured"}


def test_a_tensor_inside_an_object_is_static_and_captured_anew_when_it_moves(lab: Lab) -> None:
    """… or is inside an object, is static; when it moves."""
    box = Box(into=fresh(lab, 2, 3))
    graphed, addresses = seeing(lambda x, one: x * one)
    for move in range(3):
        if move:
            box.into = fresh(lab, 2, 3)
        before = len(addresses)
        for _ in range(4):
            box.into.mul_(1.5)
            x = fresh(lab, 2, 3)
            equal(graphed(x, box), x * box.into)
        assert addresses[before:] == [box.into.data_ptr()] * (1 if move else 2)
    assert states_of(graphed) == {"captured"}


@pytest.mark.parametrize("sizes", [None, [4]], ids=["exact", "padded"])
def test_objects_with_gradients_are_compared_by_their_parts(lab: Lab, sizes: Any) -> None:
    """Objects are compared by their parts, … the objects among its arguments."""
    table, net = fresh(lab, 3), nn.Linear(3, 3).to(lab.device)
    counting, counter = counted(lambda x, one: net(x) * one.into * one.by)
    graphed = cgraph.graphed(counting, sizes=sizes)
    with torch.enable_grad():
        for number, by in enumerate([2.0, 2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 2.0]):
            x, before = fresh(lab, 3, 3), runs_of(counter)
            found = graphed(x, Box(into=table, by=by))
            torch.testing.assert_close(found, net(x) * table * by)
            found.sum().backward()
            assert number not in (2, 3, 6, 7) or runs_of(counter) == before


@pytest.mark.parametrize("wrap", WRAPS)
def test_all_others_are_inputs(lab: Lab, wrap: str) -> None:
    """All others are inputs."""
    graphed, addresses = seeing(lambda x, one: x * one)
    stays = fresh(lab, 2, 3)
    for number in range(8):
        x = fresh(lab, 2, 3)
        given = stays if number < 4 else fresh(lab, 2, 3)
        equal(graphed(x, WRAPS[wrap](given)), x * given)
    assert len(addresses) == 2
    assert numbers(graphed) == (1, 7, 1)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda one: one,
    "transposed": lambda one: one.t().contiguous().t(),
    "strided": lambda one: torch.stack([one, one], -1)[..., 0],
    "offset": lambda one: torch.cat([one, one])[1:3],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("wrap", WRAPS)
def test_written_inputs_are_copied_back(lab: Lab, wrap: str, layout: str) -> None:
    """… written inputs are copied back."""
    counting, counter = counted(lambda x, one: add(x, tensor_in(one)))
    graphed = cgraph.graphed(counting)
    kept = []
    for _ in range(6):
        x, into = fresh(lab, 2, 3), LAYOUTS[layout](fresh(lab, 2, 3))
        twin = into.clone()
        found = graphed(x, WRAPS[wrap](into))
        equal(found, add(x, twin))
        kept.append((into, twin))
    for into, twin in kept:
        equal(into, twin)
    assert runs_of(counter) == 2


def tensor_in(one: Any) -> Tensor:
    """Return the tensor in a wrapper."""
    if isinstance(one, Tensor):
        return one
    return one["into"] if isinstance(one, dict) else one.into


def test_addresses_of_static_args_belong_to_the_key(lab: Lab) -> None:
    """Addresses of `static_args` … belong to the key."""
    counting, counter = counted(lambda x, table: x * table)

    def function(x: Tensor, table: Tensor) -> Tensor:
        return counting(x, table)  # type: ignore[no-any-return]

    graphed = cgraph.graphed(function, static_args="table")
    tables = [fresh(lab, 2, 3), fresh(lab, 2, 3)]
    for number in range(6):
        for table in tables:
            x = fresh(lab, 2, 3)
            table.mul_(1.5)
            equal(graphed(x, table), x * table)
        assert runs_of(counter) == min(number + 1, 2) * 2
    assert keys_of(graphed) == 2


def test_the_identity_of_module_arguments_belongs_to_the_key(lab: Lab) -> None:
    """… and the identity of module arguments belong to the key."""
    counting, counter = counted(lambda x, net: net(x))
    graphed = cgraph.graphed(counting)
    nets = [nn.Linear(3, 3).to(lab.device) for _ in range(2)]
    for number in range(6):
        for net in nets:
            x = fresh(lab, 2, 3)
            equal(graphed(x, net), net(x))
        assert runs_of(counter) == min(number + 1, 2) * 2
    assert keys_of(graphed) == 2


@pytest.mark.parametrize("kind", ["parameter", "static_args", "written", "object"])
def test_the_report_does_not_list_static_arguments_as_frozen(lab: Lab, kind: str) -> None:
    """… the report lists what a graph reads that *nothing guards*."""
    table = fresh(lab, 2, 3)
    given: Any = nn.Parameter(table) if kind == "parameter" else table
    given = Box(into=table) if kind == "object" else given

    def function(x: Tensor, one: Any) -> Tensor:
        into = tensor_in(one)
        return add(x, into) if kind == "written" else x * into

    graphed = cgraph.graphed(function, static_args="one" if kind == "static_args" else ())
    for _ in range(5):
        graphed(fresh(lab, 2, 3), given)
    (key,) = graphed.report().keys
    assert (key.state, key.frozen) == ("captured", ())


def _both(_: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, y: x.add_(1) * y


def _outside(base: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    table = base[1:3]
    return lambda x, y: x * y + table.add_(1).sum()


OVERLAPS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "same": lambda base: (base[:2], base[:2]),
    "shifted": lambda base: (base[:2], base[1:3]),
    "transposed": lambda base: (base[:3], base[:3].t()),
    "with what is written": lambda base: (base[2:4], base[4:6]),
}


@pytest.mark.parametrize("when", ["at first", "in a replay"])
@pytest.mark.parametrize("make", [_both, _outside])
@pytest.mark.parametrize("case", OVERLAPS)
def test_inputs_that_overlap_where_something_is_written_are_as_eager(
    lab: Lab, case: str, make: Callable[[Tensor], Any], when: str
) -> None:
    """Inputs that overlap each other or what the graph writes run eagerly."""
    if make is _both and case == "with what is written":
        pytest.skip("nothing else is written")
    base = fresh(lab, 6, 3)
    twin, other = base.clone(), fresh(lab, 6, 3)
    function, eager = make(base), make(twin)
    counting, counter = counted(function)
    graphed = cgraph.graphed(counting)
    if when == "in a replay":
        for _ in range(4):
            one, two = (part.clone() for part in OVERLAPS[case](other))
            equal(graphed(one.clone(), two), eager(one, two))
            equal(base, twin)
    for _ in range(4):
        before = runs_of(counter)
        equal(graphed(*OVERLAPS[case](base)), eager(*OVERLAPS[case](twin)))
        equal(base, twin)
        # A tensor that keeps its address is read there, without a copy.
        assert runs_of(counter) == before + 1 or when == "at first"


def test_inputs_that_overlap_where_nothing_is_written_are_replays(lab: Lab) -> None:
    """Inputs that overlap each other or what the graph writes run eagerly."""
    counting, counter = counted(lambda x, y: x * 2 + y)
    graphed = cgraph.graphed(counting)
    for _ in range(5):
        base = fresh(lab, 3, 3)
        equal(graphed(base[:2], base[1:]), base[:2] * 2 + base[1:])
    assert runs_of(counter) == 2


def test_an_input_in_the_memory_of_an_argument_that_stays_and_is_written_runs_eagerly(
    lab: Lab,
) -> None:
    """Inputs that overlap each other or what the graph writes run eagerly."""

    def function(a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        return b * 2

    graphed, state = cgraph.graphed(function), fresh(lab, 4)
    for number in range(6):
        expected = state.clone() + 1
        other = fresh(lab, 4)
        alone = number in (0, 3)
        found = graphed(state, other if alone else state)
        equal(state, expected)
        equal(found, (other if alone else expected) * 2)
