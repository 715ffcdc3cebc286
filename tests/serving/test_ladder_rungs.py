"""The native half of `GraphLadder`: which calls a rung serves, and which it hands on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import cgraph
from cgraph import _core
from cgraph.errors import ArgumentError, StateError
from lab import Lab, fresh


class Ladder(_core.Ladder):
    """A ladder that notes the keys that it does not have."""

    def _rung(self, key: object) -> Any:
        raise KeyError(key)


class Rung(_core.Rung):
    """A rung that returns the arguments that are handed on."""

    def __call__(self, args: tuple[Any, ...]) -> Any:
        return "handed on", args


class Named(Tensor):
    """A tensor of a class of its own."""


def capture(lab: Lab) -> tuple[cgraph.CUDAGraph, Tensor, Tensor]:
    """Return a graph, what it reads and what it writes."""
    x, graph = fresh(lab, 4), cgraph.CUDAGraph()
    with cgraph.graph(graph):
        y = x * 2
    return graph, x, y


def returned(value: object) -> tuple[list[Any], str, None]:
    """Describe that a rung returns a value as it is."""
    return [("constant", value)], "single", None


def test_a_rung_replays_and_returns_its_result(lab: Lab) -> None:
    graph, x, y = capture(lab)
    ladder, result = Ladder(), (y, "its own")
    ladder._rungs["k"] = Rung(graph, returned(result), None)
    for _ in range(3):
        x.normal_()
        assert ladder("k") is result
        torch.testing.assert_close(y, x * 2)
    with pytest.raises(KeyError, match="other"):
        ladder("other")
    with pytest.raises(TypeError, match="key"):
        ladder()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unhashable"):
        ladder([])


def test_arguments_are_handed_on_unless_they_are_as_many_tensors_as_it_takes(lab: Lab) -> None:
    graph, x, y = capture(lab)
    ladder = Ladder()
    ladder._rungs.update(none=Rung(graph, returned(y), None), one=Rung(graph, returned(y), 1))
    for key, args in (("none", (x,)), ("one", (x, x)), ("one", (3,)), ("one", ([x],))):
        assert ladder(key, *args) == ("handed on", args)
    # This graph was captured without static inputs, which a served call finds out.
    for one in (x, torch.nn.Parameter(x), x.as_subclass(Named)):
        with pytest.raises(StateError, match="without static inputs"):
            ladder("one", one)


def test_a_rung_replays_nothing_but_a_graph_or_segments() -> None:
    with pytest.raises(ArgumentError, match="replayed is 3, expected a graph, padded or not"):
        Rung(3, returned(5), 0)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"replayed is <.*>, expected a graph or segments"):
        Rung(lambda: 5, returned(5), 0)  # type: ignore[arg-type]
