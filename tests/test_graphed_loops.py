"""Results that a loop hands on: who still has them when the next call overwrites them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor, nn
from torch.testing import assert_close

import cgraph
from cgraph.errors import StateError
from lab import Lab, fresh


def test_a_state_that_a_loop_hands_on_is_no_held_result(lab: Lab) -> None:
    def step() -> Callable[..., Tensor]:
        return cgraph.graphed(lambda h: h + 1, on_held="raise")

    in_list, by_name, of_owner, of_dict, of_list = (step() for _ in range(5))
    two = cgraph.graphed(lambda h, c: (h + c, c * 0.5), on_held="raise")
    tree = cgraph.graphed(lambda state: {"h": state["h"] + 1, "n": state["n"]}, on_held="raise")
    pair = cgraph.graphed(lambda state: (state[0] + 1, state[1] * 2), on_held="raise")
    start = fresh(lab, 3)
    owner, items, places = SimpleNamespace(h=start), {"h": start}, [start]
    listed = named = a = b = start
    both, state = (start, start), {"h": start, "n": 3}
    for call in range(40):
        listed = in_list(*[listed])
        named = by_name(h=named)
        owner.h = of_owner(owner.h)
        key = "h"
        if call % 2:
            items["h"] = of_dict(items["h"])
        else:
            items[key] = of_dict(items[key])
        places[0] = of_list(places[0])
        a, b = two(a, b)
        both = pair(both)
        state = tree(state)
    for found in (listed, named, owner.h, items["h"], places[0], both[0], state["h"]):
        assert_close(found, start + 40)


def test_an_argument_in_a_container_of_its_own_is_no_held_result(lab: Lab) -> None:
    step = cgraph.graphed(lambda states: states[0] + 1, on_held="raise")
    h = start = fresh(lab, 3)
    for _ in range(40):
        h = step([h])
    assert_close(h, start + 40)


def test_a_second_holder_of_a_state_that_a_loop_hands_on_is_told_of(lab: Lab) -> None:
    step = cgraph.graphed(lambda h: h + 1, on_held="raise")
    h = step(fresh(lab, 3))
    kept = [h]
    with pytest.raises(StateError, match="is still referenced"):
        h = step(h)
    with pytest.raises(StateError, match="is still referenced"):
        h = step(*[h])
    kept.clear()
    h = step(h)
    states = {"h": h}
    with pytest.raises(StateError, match="is still referenced"):
        states["other"] = step(states["h"])
    del h
    states["h"] = step(states["h"])


def test_arguments_in_a_tuple_that_the_caller_keeps_are_held(lab: Lab) -> None:
    step = cgraph.graphed(lambda h: h + 1, on_held="raise")
    given = (step(fresh(lab, 3)),)
    with pytest.raises(StateError, match="is still referenced"):
        step(*given)

    def residual(*given: Tensor) -> Tensor:
        return step(*given) - given[0]

    h, given = given[0], ()
    with pytest.raises(StateError, match="is still referenced"):
        residual(h)
    waiting = functools.partial(step, h)
    del h
    with pytest.raises(StateError, match="is still referenced"):
        waiting()


def test_a_loop_through_a_module_whose_forward_is_graphed_holds_nothing(lab: Lab) -> None:
    class Step(nn.Module):
        @cgraph.graphed(on_held="raise")
        def forward(self, h: Tensor) -> Tensor:
            return h + 1

    step = Step()
    h = start = fresh(lab, 3)
    for _ in range(40):
        h = step(h)
    assert_close(h, start + 40)
    kept = [h]
    with pytest.raises(StateError, match=r"returned at tests/test_graphed_loops.py:\d+, is"):
        step(h)
    assert_close(kept[0], start + 40)


def test_a_buffer_that_a_loop_replaces_is_no_held_result(lab: Lab) -> None:
    step, module = cgraph.graphed(lambda h: h + 1, on_held="raise"), nn.Module()
    start = fresh(lab, 3)
    module.register_buffer("state", start)
    for _ in range(40):
        module.state = step(module.state)
    assert_close(module.state, start + 40)


def test_one_result_may_be_assigned_to_several_variables(lab: Lab) -> None:
    step = cgraph.graphed(lambda h: h + 1, on_held="raise")
    a = b = start = fresh(lab, 3)
    for _ in range(40):
        a = b = step(a)
    assert_close(b, start + 40)
    del b
    for _ in range(40):
        if (a := step(a)) is None:
            break
        b = a
        del b
    assert_close(a, start + 80)


def test_objects_of_any_kind_may_get_a_result(lab: Lab) -> None:
    class Odd:
        @property
        def __dict__(self) -> None:  # type: ignore[override]
            raise RuntimeError("nobody is to ask")

        def __setattr__(self, name: str, value: object) -> None:
            found.append(value)

    found: list[object] = []
    step, odd = cgraph.graphed(lambda x: x + 1, on_held="warn"), Odd()
    for _ in range(3):
        x = fresh(lab, 3)
        odd.h = step(x)
        assert_close(found.pop(), x + 1)


def test_who_is_told_that_a_result_died_may_call_the_function(lab: Lab) -> None:
    pool = cgraph.graph_pool_handle()
    first = cgraph.graphed(lambda x: x * 2, pool=pool)
    second = cgraph.graphed(lambda x: x * 3, pool=pool)
    x, seen = fresh(lab, 3), []
    first(x)
    result = second(x)
    weakref.finalize(result, lambda: seen.append(first(x).clone()))
    second.reset()
    assert not seen
    del result
    assert_close(seen[0], x * 2)
    result = second(x)
    weakref.finalize(result, lambda: seen.append(first(x).clone()))
    del result
    second.reset()
    assert_close(seen[1], x * 2)


SHIFTS: dict[str, Callable[[Any], Any]] = {
    "pair": lambda s: (s[1], (s[0] + s[1]) / 2),
    "list": lambda s: [s[1], s[2], (s[0] + s[2]) / 2],
    "dictionary": lambda s: {"a": s["b"], "b": (s["a"] + s["b"]) / 2},
    "twice": lambda s: (s[1], s[1], (s[0] + s[1]) / 2),
}


@pytest.mark.parametrize("policy", ["warn", "clone", "raise"])
@pytest.mark.parametrize("sizes", [None, [4, 8]])
@pytest.mark.parametrize("shift", SHIFTS)
def test_results_that_a_call_returns_again_keep_their_values(
    lab: Lab, shift: str, sizes: list[int] | None, policy: Any
) -> None:
    function = SHIFTS[shift]
    graphed = cgraph.graphed(function, sizes=sizes, on_held=policy)
    count = 3 if shift == "list" else 2
    state: Any = [fresh(lab, 3) for _ in range(count)]
    if shift == "dictionary":
        state = dict(zip("ab", state, strict=True))
    right = state
    # More calls than are looked at closely.
    for call in range(70):
        state, right = graphed(state), function(right)
        assert_close(state, right, msg=f"call {call}")
        if shift == "twice":
            assert state[0] is state[1]
            state, right = state[1:], right[1:]


def test_a_pair_of_variables_that_a_call_shifts_has_the_values_of_eager(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda a, b: (b, (a + b) / 2))
    a, b = fresh(lab, 3), fresh(lab, 3)
    one, other = a, b
    for _ in range(70):
        a, b = graphed(a, b)
        one, other = other, (one + other) / 2
        assert_close((a, b), (one, other))


def test_what_another_graph_of_the_pool_has_returned_is_kept_if_it_is_returned_again(
    lab: Lab,
) -> None:
    pool = cgraph.graph_pool_handle()
    first = cgraph.graphed(lambda x: (x * 2).exp() + 1, pool=pool)
    second = cgraph.graphed(lambda y: (y, (y + 1).exp().sum(0) * 3), pool=pool)
    for _ in range(5):
        x = fresh(lab, 4, 3)
        y, total = second(first(x))
        right = (x * 2).exp() + 1
        assert_close(y, right)
        assert_close(total, (right + 1).exp().sum(0) * 3)
        del y, total


@pytest.mark.parametrize(
    ("alias", "policy"),
    [
        ("detach", "warn"),
        ("detach", "raise"),
        ("detach", "clone"),
        # What autograd knows as a view holds the result itself as well.
        ("view_as", "clone"),
        ("chunk", "clone"),
    ],
)
def test_aliases_of_results_that_a_call_returns_again_keep_their_values(
    lab: Lab, alias: str, policy: Any
) -> None:
    def other(x: Tensor) -> Tensor:
        return {"detach": x.detach(), "view_as": x.view_as(x), "chunk": x.chunk(1)[0]}[alias]

    graphed = cgraph.graphed(lambda a, b: (b, (a + b) / 2), on_held=policy)
    a, b = fresh(lab, 3), fresh(lab, 3)
    one, two = a, b
    for _ in range(70):
        a, b = graphed(other(a), other(b))
        one, two = two, (one + two) / 2
        assert_close((a, b), (one, two))
