"""Dataclasses and named tuples with tensors, in arguments and in results."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils import _pytree as pytree

import cgraph
from graphed_calls import misses, numbers, quiet, states
from lab import Lab, fresh


@dataclass
class Lengths:
    """What an engine says of the sequences of a batch."""

    each: Tensor
    most: int = 4

    @property
    def doubled(self) -> Tensor:
        return self.each * 2


class Longer(Lengths):
    """Another class of the same attributes."""


@dataclass(frozen=True)
class Batch:
    """With another one inside, and what is made of it later."""

    tokens: Tensor
    lengths: Lengths
    extra: list[Any] = field(default_factory=list)

    @cached_property
    def total(self) -> Tensor:
        return self.lengths.each.sum()


class Pair(NamedTuple):
    first: Tensor
    second: float


@dataclass
class Loop:
    """One that may lead back to itself."""

    tensor: Tensor
    other: Any = None


@dataclass(slots=True)
class Slotted:
    tensor: Tensor


def batch(lab: Lab, most: int = 4) -> Batch:
    return Batch(fresh(lab, 3), Lengths(fresh(lab, 3), most), [fresh(lab, 3), 2.0])


def computed(one: Batch) -> Tensor:
    return one.tokens * one.lengths.doubled + one.extra[0] * one.extra[1] + one.lengths.most


def test_dataclasses_with_tensors_are_matched_by_native_code(lab: Lab) -> None:
    function = cgraph.graphed(computed)
    given = batch(lab)
    assert_close(function(given), computed(given))
    with misses() as missed:
        for _ in range(3):
            given = batch(lab)
            assert_close(function(given), computed(given))
    assert not missed
    assert numbers(function) == (1, 4, 0)


def test_named_tuples_are_matched_by_native_code(lab: Lab) -> None:
    def scaled(pair: Pair) -> Pair:
        return Pair(pair.first * pair.second, pair.second)

    function = cgraph.graphed(scaled)
    function(Pair(fresh(lab, 3), 2.0))
    with misses() as missed:
        for _ in range(3):
            given = Pair(fresh(lab, 3), 2.0)
            result = function(given)
            assert type(result) is Pair
            assert_close(result.first, given.first * 2)
    assert not missed
    assert states(function) == ["captured"]


def test_numbers_in_a_dataclass_are_part_of_the_key(lab: Lab) -> None:
    function = cgraph.graphed(computed)
    for most in (4, 5, 4, 5):
        given = batch(lab, most)
        assert_close(function(given), computed(given))
    assert numbers(function)[:2] == (2, 4)


def test_a_derived_class_and_further_attributes_are_keys_of_their_own(lab: Lab) -> None:
    def asks(one: Lengths) -> Tensor:
        scale = getattr(one, "scale", 1.0) * (2 if isinstance(one, Longer) else 1)
        return one.each * scale

    function = cgraph.graphed(asks)
    for _ in range(2):
        for kind, scale in (
            (Lengths, None),
            (Longer, None),
            (Lengths, 3.0),
            (Lengths, fresh(lab, 3)),
        ):
            given = kind(fresh(lab, 3))
            if scale is not None:
                given.scale = scale  # type: ignore[attr-defined]
            assert_close(function(given), asks(given))
    assert numbers(function)[:2] == (4, 8)


def test_writes_to_tensors_of_a_dataclass_reach_those_of_the_call(lab: Lab) -> None:
    def counted(one: Batch) -> Tensor:
        one.lengths.each.add_(1)
        return one.tokens * one.lengths.each

    function = cgraph.graphed(counted)
    for _ in range(3):
        given = batch(lab)
        expected = given.lengths.each + 1
        assert_close(function(given), given.tokens * expected)
        assert_close(given.lengths.each, expected)
    assert numbers(function)[:2] == (1, 3)


CHANGES: dict[str, Callable[[Batch], Tensor]] = {
    "an attribute that is set": lambda one: setattr(one.lengths, "most", 9) or one.tokens * 2,
    "an attribute that is new": lambda one: setattr(one.lengths, "new", 9) or one.tokens * 2,
    "a tensor that is exchanged": lambda one: (
        setattr(one.lengths, "each", one.tokens) or one.tokens
    ),
    "what a property keeps": lambda one: one.total * one.tokens,
    "a list that grows": lambda one: one.extra.append(one.tokens) or one.tokens * 2,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_function_that_changes_a_dataclass_runs_eagerly(lab: Lab, change: str) -> None:
    changes = CHANGES[change]
    function = cgraph.graphed(changes)
    with quiet() as caught:
        for _ in range(3):
            given = batch(lab)
            tokens, each, extra = given.tokens, given.lengths.each, given.extra
            same = Batch(tokens, Lengths(each), [*extra])
            assert_close(function(given), changes(same))
            # What the caller has is as after an eager call, in the same containers.
            assert given.tokens is tokens and given.extra is extra
            assert vars(given.lengths).keys() == vars(same.lengths).keys()
            assert given.lengths.most == same.lengths.most
            assert given.lengths.each is same.lengths.each
            assert vars(given).keys() == vars(same).keys()
            assert len(given.extra) == len(same.extra)
    assert numbers(function)[0] == 0
    assert "changes a list, a dictionary or another container" in str(caught[0].message)


def test_results_in_dataclasses_are_new_in_each_call(lab: Lab) -> None:
    def both(x: Tensor) -> list[Lengths]:
        return [Lengths(x * 2, 7), Longer(x + 1)]

    function = cgraph.graphed(both, outputs="clone")
    found = []
    for _ in range(3):
        x = fresh(lab, 3)
        found.append((function(x), both(x)))
    for got, expected in found:
        assert [type(one) for one in got] == [Lengths, Longer]
        assert [one.most for one in got] == [7, 4]
        assert_close([one.each for one in got], [one.each for one in expected])
    assert numbers(function)[:2] == (1, 3)


def scored(one: Lengths) -> Lengths:
    return Lengths(one.each.sin() * one.most, one.most)


def agree_on_gradients(lab: Lab, function: Callable[[Lengths], Lengths]) -> None:
    """Compare gradients through a function with those through the one above."""
    for _ in range(3):
        each = fresh(lab, 3).requires_grad_()
        other = each.detach().clone().requires_grad_()
        function(Lengths(each)).each.square().sum().backward()
        scored(Lengths(other)).each.square().sum().backward()
        assert_close(each.grad, other.grad)


def test_gradients_get_through_dataclasses(lab: Lab) -> None:
    function = cgraph.graphed(scored)
    agree_on_gradients(lab, function)
    assert numbers(function)[:2] == (1, 3)


def test_rows_of_dataclasses_are_padded(lab: Lab) -> None:
    def rows(one: Lengths) -> Lengths:
        return Lengths(one.each.relu() + one.most)

    function = cgraph.graphed(rows, sizes=[4, 8], outputs="clone")
    for count in (3, 4, 5, 3):
        given = Lengths(fresh(lab, count, 2))
        assert_close(function(given).each, rows(given).each)
    assert numbers(function) == (2, 4, 0)


def test_breaks_get_dataclasses_with_the_tensors_of_the_call(lab: Lab) -> None:
    @cgraph.eager_break
    def summed(one: Lengths) -> Lengths:
        return Lengths(one.each * float(one.each.sum()), one.most)

    def function(x: Tensor) -> Tensor:
        return summed(Lengths(x * 2, 3)).each + 1

    graphed = cgraph.graphed(function)
    for _ in range(3):
        x = fresh(lab, 3)
        assert_close(graphed(x), function(x))
    assert numbers(graphed)[:2] == (1, 3)


def test_tensors_of_a_static_dataclass_are_read_where_they_lie(lab: Lab) -> None:
    function = cgraph.graphed(lambda x, one: x * one.each, static_argnames="one")
    one = Lengths(fresh(lab, 3))
    for _ in range(3):
        one.each.copy_(fresh(lab, 3))
        x = fresh(lab, 3)
        assert_close(function(x, one), x * one.each)
    assert numbers(function)[:2] == (1, 3)


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
def test_dataclasses_that_lead_back_to_themselves_run_eagerly(lab: Lab) -> None:
    function = cgraph.graphed(lambda one: one.tensor * one.other.tensor)
    for _ in range(2):
        one = Loop(fresh(lab, 3))
        one.other = Loop(fresh(lab, 3), one)
        assert_close(function(one), one.tensor * one.other.tensor)
    assert numbers(function)[0] == 0


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
def test_dataclasses_with_much_data_run_eagerly(lab: Lab) -> None:
    function = cgraph.graphed(lambda one: one.tensor * one.other[5])
    one = Loop(fresh(lab, 3), [*range(10_000)])
    for _ in range(2):
        assert_close(function(one), one.tensor * 5)
    assert numbers(function)[0] == 0


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
def test_dataclasses_with_slots_run_eagerly(lab: Lab) -> None:
    function = cgraph.graphed(lambda one: one.tensor * 2)
    for _ in range(2):
        one = Slotted(fresh(lab, 3))
        assert_close(function(one), one.tensor * 2)
    assert numbers(function)[0] == 0


def test_a_class_that_pytree_knows_is_taken_apart_by_it(lab: Lab) -> None:
    @dataclass
    class Known:
        tensor: Tensor
        note: Any

    pytree.register_pytree_node(
        Known, lambda one: ([one.tensor], None), lambda parts, _: Known(*parts, "made anew")
    )
    notes = []

    def function(one: Known) -> Tensor:
        notes.append(one.note)
        return one.tensor * 2

    graphed = cgraph.graphed(function)
    for _ in range(3):
        one = Known(fresh(lab, 3), object())
        assert_close(graphed(one), one.tensor * 2)
    assert {*notes} == {"made anew"}
    assert numbers(graphed)[:2] == (1, 3)


def test_dataclasses_without_tensors_are_one_value(lab: Lab) -> None:
    @dataclass
    class Config:
        scale: float

    function = cgraph.graphed(lambda x, one: x * one.scale)
    for scale in (2.0, 3.0, 2.0):
        x = fresh(lab, 3)
        assert_close(function(x, Config(scale)), x * scale)
    assert "one=" in function.report().keys[0].key
    assert numbers(function)[:2] == (2, 3)


def test_callables_of_make_graphed_callables_take_and_return_dataclasses(lab: Lab) -> None:
    sample = Lengths(fresh(lab, 3).requires_grad_())
    function = cgraph.make_graphed_callables(scored, (sample,))
    agree_on_gradients(lab, function)


@dataclass
class Context:
    """What modules find the batch in."""

    batch: Any = None


KEPT: dict[str, Callable[[Tensor], Any]] = {
    "dataclass": Lengths,
    "dictionary": lambda x: {"x": x, "more": [1]},
    "list": lambda x: [x],
    "named tuple": lambda x: Pair(x, 2.0),
}


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kind", KEPT)
def test_a_function_that_keeps_a_container_of_arguments_runs_eagerly(
    lab: Lab, kind: str, grad: bool
) -> None:
    context = Context()

    def function(x: Tensor, one: Any) -> Tensor:
        context.batch = one
        return x * 2

    graphed = cgraph.graphed(function)
    for _ in range(6):
        x, one = fresh(lab, 3).requires_grad_(grad), KEPT[kind](fresh(lab, 3))
        assert_close(graphed(x, one), x * 2)
        assert context.batch is one
    assert "keeps an argument" in str(graphed.report().keys[0].reason)


def test_a_module_in_a_list_that_keeps_the_tensor_of_the_call_replays(lab: Lab) -> None:
    class Last(nn.Module):
        last: Any = None

        def forward(self, x: Tensor) -> Tensor:
            self.last = x
            return x * 2

    parts = [Last()]
    graphed = cgraph.graphed(lambda x: parts[0](x))
    with torch.no_grad():
        for _ in range(3):
            x = fresh(lab, 3)
            assert_close(graphed(x), x * 2)
            assert_close(parts[0].last, x)


def test_a_function_that_keeps_its_arguments_only_while_it_runs_replays(lab: Lab) -> None:
    context = Context()

    def inner(x: Tensor) -> Tensor:
        return x * context.batch.each + context.batch.most

    def function(x: Tensor, one: Lengths) -> Tensor:
        context.batch = one
        try:
            return inner(x)
        finally:
            context.batch = None

    graphed = cgraph.graphed(function)
    for _ in range(3):
        x, one = fresh(lab, 3), Lengths(fresh(lab, 3))
        assert_close(graphed(x, one), x * one.each + one.most)
    assert numbers(graphed)[:2] == (1, 3)


@pytest.mark.parametrize("grad", [False, True])
def test_a_function_that_keeps_a_tensor_of_the_call_in_a_list_of_its_own_is_as_ever(
    lab: Lab, grad: bool
) -> None:
    kept: list[Tensor] = []

    def function(x: Tensor) -> Tensor:
        kept.clear()
        kept.append(x)
        return x * 2

    graphed = cgraph.graphed(function)
    for _ in range(3):
        x = fresh(lab, 3).requires_grad_(grad)
        assert_close(graphed(x), x * 2)
        assert_close(kept[0].detach(), x.detach())


class Counted(NamedTuple("Counted", [("first", Tensor)])):  # type: ignore[misc]
    """A named tuple that is made in a way of its own."""

    number: int

    def __new__(cls, first: Tensor) -> Counted:
        made = super().__new__(cls, first)
        made.number = 3
        return made


def test_named_tuples_with_ways_of_their_own_are_made_by_these(lab: Lab) -> None:
    function = cgraph.graphed(lambda one: one.first * one.number)
    for _ in range(3):
        one = Counted(fresh(lab, 3))
        assert_close(function(one), one.first * 3)
    assert numbers(function)[:2] == (1, 3)


@dataclass(eq=False)
class Itself:
    """One that is looked for by what it is."""

    tensor: Tensor


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
def test_dataclasses_that_are_told_apart_run_eagerly(lab: Lab) -> None:
    known = weakref.WeakKeyDictionary[Itself, float]()
    looked_up = cgraph.graphed(lambda one: one.tensor * known[one])
    compared = cgraph.graphed(lambda one, other: one.each * (2 if one is other else 3))
    inside = cgraph.graphed(
        lambda one: one.other[0].each * (2 if one.other[0] is one.other[1] else 3)
    )
    for _ in range(2):
        one, two = Itself(fresh(lab, 3)), Lengths(fresh(lab, 3))
        known[one] = 4.0
        assert_close(looked_up(one), one.tensor * 4)
        assert_close(compared(two, two), two.each * 2)
        assert_close(inside(Loop(two.each, [two, two])), two.each * 2)


def test_large_trees_of_dataclasses_are_looked_through_once(lab: Lab) -> None:
    root = Loop(None)  # type: ignore[arg-type]
    root.other = [Loop(None, [root, place]) for place in range(300)]  # type: ignore[arg-type]
    function = cgraph.graphed(lambda x, one: x * len(one.other))
    for _ in range(2):
        x = fresh(lab, 3)
        assert_close(function(x, root), x * 300)
