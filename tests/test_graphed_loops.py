"""Results that a loop hands on: who still has them when the next call overwrites them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from torch import Tensor
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
