"""Calls whose tensors have the addresses of the previous call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import cgraph
from graphed_calls import agree, misses, quiet, states
from lab import Lab, fresh


def weighed(*tensors: Tensor) -> Tensor:
    """Return a sum that depends on each argument, its contents and its place."""
    total = tensors[0].double().sum()
    for place, one in enumerate(tensors, 2):
        total = total + place * (one.double() ** 2).sum()
    return total


def in_order(x: Tensor) -> Tensor:
    """Return a sum that depends on the place of each element."""
    return x.reshape(-1).double() * torch.arange(x.numel(), device=x.device)


def called(lab: Lab, function: Callable[..., Tensor], *given: Tensor) -> None:
    """Make three calls with these tensors, which have other contents each time."""
    for _ in range(3):
        for one in given:
            one.copy_(fresh(lab, *one.shape))
        agree(function, weighed if len(given) > 1 else in_order, *given)  # type: ignore[arg-type]


def exchange(lab: Lab, one: Tensor) -> None:
    torch.utils.swap_tensors(one, fresh(lab, *one.shape))


# Operations that give a tensor other memory.
MOVES: dict[str, Callable[[Lab, Tensor], object]] = {
    "data": lambda lab, one: setattr(one, "data", fresh(lab, *one.shape)),
    "set_": lambda lab, one: one.set_(fresh(lab, *one.shape)),
    "resize_": lambda lab, one: one.resize_(4096).normal_().resize_(3, 3),
    "swap_tensors": exchange,
}


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("move", MOVES)
def test_a_tensor_that_has_got_other_memory_is_copied_from_there(
    lab: Lab, move: str, place: int
) -> None:
    function, given = cgraph.graphed(weighed), [fresh(lab, 3, 3) for _ in range(3)]
    called(lab, function, *given)
    with misses() as seen:
        for _ in range(2):
            MOVES[move](lab, given[place])
            called(lab, function, *given)
    assert not seen


def test_a_tensor_that_has_moved_inside_of_its_storage_is_copied_from_there(lab: Lab) -> None:
    function, rows, given = (
        cgraph.graphed(weighed),
        fresh(lab, 3, 4),
        [fresh(lab, 4), fresh(lab, 4)],
    )
    for place in (0, 1, 0, 2, 2):
        given[0].data = rows[place]
        called(lab, function, *given)
        rows.normal_()
        agree(function, weighed, *given)
    assert states(function) == ["captured"]


def test_memory_that_holds_other_tensors_now_is_read_as_these(lab: Lab) -> None:
    function = cgraph.graphed(in_order)
    kinds = [torch.float32, torch.int32, torch.float32, torch.float64]
    memory = fresh(lab, 64).view(torch.uint8)
    for kind in kinds * 2:
        for _ in range(2):
            one = memory.data.view(kind).data
            one.copy_(fresh(lab, *one.shape) * 1e3)
            agree(function, in_order, one)
    assert len(states(function)) == len(set(kinds))


def test_sets_of_tensors_that_take_turns_are_each_copied(lab: Lab) -> None:
    function = cgraph.graphed(weighed)
    sets = [[fresh(lab, 4) for _ in range(3)] for _ in range(3)]
    for turn in (0, 0, 1, 1, 0, 2, 2, 2, 1, 0, 0):
        called(lab, function, *sets[turn])
        mixed = [sets[(turn + place) % 3][place] for place in range(3)]
        agree(function, weighed, *mixed)
    assert states(function) == ["captured"]


def test_calls_of_other_shapes_in_between_change_nothing(lab: Lab) -> None:
    function = cgraph.graphed(weighed)
    shapes = [(2,), (3,), (2, 2)]
    sets = {shape: [fresh(lab, *shape) for _ in range(2)] for shape in shapes}
    for shape in shapes * 3:
        called(lab, function, *sets[shape])
    assert states(function) == ["captured"] * 3


def test_the_modes_count_where_nothing_has_moved(lab: Lab) -> None:
    function, one = cgraph.graphed(in_order), fresh(lab, 3)
    for is_enabled in (False, True, False, True):
        with torch.set_grad_enabled(is_enabled):
            called(lab, function, one)
    assert states(function) == ["captured", "captured"]


def test_whether_a_tensor_requires_a_gradient_counts_where_nothing_has_moved(lab: Lab) -> None:
    function, weight = cgraph.graphed(in_order), torch.nn.Parameter(fresh(lab, 3))
    with torch.no_grad():
        for given in (weight, weight.data, weight, weight.data):
            for _ in range(3):
                weight.normal_()
                agree(function, in_order, given)
    assert states(function) == ["captured", "captured"]


def test_an_argument_in_memory_that_the_function_writes_is_right_however_often_it_is_given(
    lab: Lab,
) -> None:
    def adding(total: Tensor) -> Callable[[Tensor], Tensor]:
        def add(x: Tensor) -> Tensor:
            total.add_(x)
            return total * x

        return add

    first = fresh(lab, 4)
    own, expected = first.clone(), first.clone()
    function, eager = cgraph.graphed(adding(own)), adding(expected)
    with torch.no_grad(), quiet():
        for _ in range(3):
            given = fresh(lab, 4)
            for _ in range(2):
                assert torch.equal(function(given), eager(given))
            for _ in range(3):
                assert torch.equal(function(own), eager(expected))
            assert torch.equal(function(own[:]), eager(expected[:]))


def test_an_argument_that_is_returned_is_the_one_of_the_call(lab: Lab) -> None:
    def kept(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x + y, y

    function, x, y = cgraph.graphed(kept), fresh(lab, 4), fresh(lab, 4)
    for _ in range(3):
        assert function(x, y)[1] is y
    # Another tensor that lies there.
    twin = y.detach()
    for given in (twin, y, twin):
        assert function(x, given)[1] is given


@pytest.mark.parametrize("held", [1, 3])
def test_a_result_that_is_given_to_the_next_call_counts_as_held_no_more_than_before(
    lab: Lab, held: int
) -> None:
    def step(*xs: Tensor) -> Tensor:
        return sum(xs[1:], xs[0]) + 1  # type: ignore[arg-type]

    expected, function = fresh(lab, 4), cgraph.graphed(step)
    with torch.no_grad():
        result = expected.clone()
        for _ in range(5):
            result = function(*[result] * held)
            expected = step(*[expected] * held)
            assert torch.equal(result, expected)


def test_that_are_padded_are_copied_from_where_they_lie_again(lab: Lab) -> None:
    function, one = cgraph.graphed(torch.cumsum, sizes=[4, 8]), fresh(lab, 3, 2)
    for given in (one, one, one, fresh(lab, 3, 2), one, fresh(lab, 6, 2), one):
        given.normal_()
        assert torch.equal(function(given, dim=1), torch.cumsum(given, dim=1))


def test_of_one_graph_that_take_turns_are_each_copied(lab: Lab) -> None:
    function = cgraph.graphed(torch.cumsum, sizes=[4])
    sets = [fresh(lab, rows, 2) for rows in (3, 2, 4, 1)]
    for turn in (0, 0, 1, 1, 0, 2, 1, 3, 3, 0, 0, 2, 2):
        sets[turn].normal_()
        assert torch.equal(function(sets[turn], dim=1), torch.cumsum(sets[turn], dim=1))


def test_what_moves_behind_tensors_that_stay_is_copied(lab: Lab) -> None:
    def summed(x: Tensor, others: list[Tensor], *, last: Tensor) -> Tensor:
        return x + 2 * others[0] + 3 * others[1] + 4 * last

    function, given = cgraph.graphed(summed), [fresh(lab, 4) for _ in range(4)]
    with torch.no_grad():
        for place in (0, 1, 1, 2, 3, 3):
            given[place] = fresh(lab, 4)
            for _ in range(2):
                agree(function, summed, given[0], given[1:3], last=given[3])


@pytest.mark.parametrize("container", [list, tuple])
def test_each_tensor_of_a_container_counts(lab: Lab, container: type) -> None:
    def summed(values: Any) -> Tensor:
        first, second, factor, last = values
        return first + 2 * second + factor * last.sum()

    function = cgraph.graphed(summed)
    shapes = ((4,), (4,), 3, (4,)), ((4,), (4,), 3, (2,)), ((4,), (1,), 3, (4,))
    ways = [*shapes, ((4,), (4,), 5, (4,))]
    for way in ways * 3:
        values = [one if isinstance(one, int) else fresh(lab, *one) for one in way]
        agree(function, summed, container(values))
    assert states(function) == ["captured"] * len(ways)


def test_a_function_with_breaks_copies_again_what_lies_where_it_lay(lab: Lab) -> None:
    @cgraph.eager_break
    def between(x: Tensor) -> Tensor:
        return x * 2

    def broken(x: Tensor, y: Tensor) -> Tensor:
        return between(x + y) - y

    function, x, y = cgraph.graphed(broken), fresh(lab, 4), fresh(lab, 4)
    with torch.no_grad():
        for _ in range(4):
            x.normal_()
            y.normal_()
            agree(function, broken, x, y)
