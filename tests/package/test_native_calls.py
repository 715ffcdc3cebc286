"""Calls that replay run no Python of the package, on a GPU or on the simulator."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import cgraph
from lab import Lab, fresh


def frames(call: Callable[[], object]) -> list[str]:
    """Call a function of this file; return the functions of Python that run in it.

    Operators that the simulator runs do not count.
    """
    found: list[str] = []
    operators: list[Any] = []

    def note(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        is_operator = code.co_name == "run" and code.co_filename.endswith("_captures/sim.py")
        if event == "return" and operators and operators[-1] is frame:
            operators.pop()
        elif event == "call" and is_operator:
            operators.append(frame)
        elif event == "call" and not operators:
            found.append(f"{code.co_filename}:{code.co_name}")

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return [one for one in found if __file__ not in one]


def _fn(x: Tensor) -> Tensor:
    return (x * 2).relu()


def _graphed(lab: Lab, **options: Any) -> tuple[Callable[[Tensor], Any], int]:
    graphed = cgraph.graphed(_fn, **options)
    rows = 3 if "sizes" in options else 4
    for _ in range(4):
        graphed(fresh(lab, rows, 5))
    return graphed, rows


def _ladder(lab: Lab) -> tuple[Callable[[Tensor], Any], int]:
    ladder = cgraph.GraphLadder()
    ladder.capture("a", _fn, fresh(lab, 4, 5))
    return lambda x: ladder("a", x), 4


_HITS: dict[str, Callable[[Lab], tuple[Callable[[Tensor], Any], int]]] = {
    "fresh": _graphed,
    "static": lambda lab: _graphed(lab, outputs="static"),
    "padded": lambda lab: _graphed(lab, sizes=[4]),
    "ladder": _ladder,
}


@pytest.mark.parametrize("kind", _HITS)
def test_a_call_that_hits_runs_no_python(lab: Lab, kind: str) -> None:
    with torch.no_grad():
        call, rows = _HITS[kind](lab)
        x = fresh(lab, rows, 5)
        results: list[Tensor] = []
        assert frames(lambda: results.append(call(x))) == []
        torch.testing.assert_close(results[0], _fn(x))


def test_a_replay_runs_no_python(lab: Lab) -> None:
    x, graph = fresh(lab, 4, 5), cgraph.CUDAGraph()
    with cgraph.graph(graph):
        y = _fn(x)
    graph.replay()
    x.copy_(fresh(lab, 4, 5))
    assert frames(graph.replay) == []
    torch.testing.assert_close(y, _fn(x))


@pytest.mark.parametrize("kind", _HITS)
def test_calls_on_streams_by_turns_wait_for_each_other(lab: Lab, kind: str) -> None:
    with torch.no_grad():
        call, rows = _HITS[kind](lab)
        for stream in (lab.current(), lab.stream(), lab.stream(), lab.current()):
            with lab.use(stream):
                x = fresh(lab, rows, 5)
                torch.testing.assert_close(call(x), _fn(x))
            lab.sync()
