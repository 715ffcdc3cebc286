"""Each driver call failing once in a ladder: what was captured stays right, nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import cgraph
from cgraph import SegmentedGraph, eager_break, weak_ref
from cgraph.errors import CgraphError
from lab import SimLab, fresh

SIZES = [1, 2, 4]


def body(x: Tensor) -> Tensor:
    """Compute something with a break between."""
    y: Tensor = eager_break(torch.relu, name="relu")(x * 2)
    return y + 1


class Graphed:
    """A graphed function, some of whose sizes are captured."""

    def __init__(self, lab: SimLab) -> None:
        self.lab = lab
        self.function = cgraph.graphed(body, sizes=SIZES, on_fail="raise", outputs="static")

    def capture(self) -> None:
        with torch.no_grad():
            self.function.capture(fresh(self.lab, 4, 16), progress=False)

    def check(self) -> None:
        with torch.no_grad():
            for rows in (1, 4, 3, 2, 4):
                x = fresh(self.lab, rows, 16)
                assert torch.equal(self.function(x), body(x))


class Segmented:
    """Segments for each size, with weak outputs, in a scope."""

    def __init__(self, lab: SimLab) -> None:
        self.lab = lab
        self.kept: dict[int, Any] = {}
        # Segments that ran before a failure may still read theirs.
        self.inputs = {rows: fresh(lab, rows, 16) for rows in SIZES}
        self.pool: Any = cgraph.MemPool()

    def capture(self) -> None:
        with cgraph.capture_scope(self.pool):
            for rows in sorted({*SIZES} - {*self.kept}, reverse=True):
                x = self.inputs[rows]
                graph, y = SegmentedGraph.capture(lambda x=x: body(x), pool=self.pool)
                self.kept[rows] = graph, x, weak_ref(y)
                del y

    def check(self) -> None:
        for graph, x, y in self.kept.values():
            x.normal_()
            graph.replay()
            assert torch.equal(y, body(x))


@pytest.mark.parametrize("make", [Graphed, Segmented])
@pytest.mark.parametrize("code", [2, 719])
def test_each_driver_call_failing_once_leaves_a_ladder_that_can_be_completed(
    sim: SimLab, make: Callable[[SimLab], Graphed | Segmented], code: int
) -> None:
    simulator = sim.simulator
    case = make(sim)
    start = len(simulator.calls())
    case.capture()
    calls = len(simulator.calls()) - start
    case.check()
    del case
    baseline = sim.settled()
    failures = 0
    for n in range(calls):
        case = make(sim)
        simulator.fail_call(n, code)
        try:
            case.capture()
        except (CgraphError, RuntimeError) as error:
            assert any(part in str(error) for part in ("cu", f"({code})", "out of memory")), error
            failures += 1
            error.__traceback__ = None
        simulator.clear_faults()
        case.capture()
        case.check()
        del case
        assert sim.settled() == baseline
    assert failures >= 20
