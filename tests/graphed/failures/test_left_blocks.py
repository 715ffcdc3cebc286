"""What a capture without a graph leaves in the pool is safe from replays of other graphs there."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

import cgraph
from graphed_calls import states
from lab import Lab, fresh

pytestmark = pytest.mark.filterwarnings("ignore:.*runs eagerly")


class Store:
    """State that the code names in no way that is seen."""


def made_late(store: Store) -> Any:
    """Return a function that makes a table for each size in the second call of the size."""

    def function(x: Tensor) -> Tensor:
        known, rows = vars(store), x.shape[0]
        count = known[f"count {rows}"] = known.get(f"count {rows}", 0) + 1
        x = (x + 1) * 2
        if count == 1:
            return x
        if f"table {rows}" not in known:
            known[f"table {rows}"] = torch.arange(float(rows), device=x.device).sqrt()
        parts = [x * n for n in range(1, 6)]
        return sum(parts) * known[f"table {rows}"][:, None]

    return function


def test_a_tensor_that_a_function_makes_in_a_capture_keeps_its_contents(lab: Lab) -> None:
    graphed, twin = cgraph.graphed(made_late(Store())), made_late(Store())
    for rows in (8, 8, 8, 8, 4, 4, 8, 4, 8, 2, 2, 8, 4, 2, 8, 4, 2, 8, 4, 2):
        x = fresh(lab, rows, 3)
        assert torch.equal(graphed(x), twin(x))
    assert states(graphed) == ["captured"] * 3


def test_it_keeps_them_also_beside_another_function_of_the_pool(lab: Lab) -> None:
    pool: Any = cgraph.MemPool()
    other = cgraph.graphed(lambda x: sum(x * n for n in range(1, 9)), pool=pool)
    for _ in range(3):
        other(fresh(lab, 8, 3))
    graphed, twin = cgraph.graphed(made_late(Store()), pool=pool), made_late(Store())
    for _ in range(9):
        x = fresh(lab, 8, 3)
        assert torch.equal(graphed(x), twin(x))
        other(fresh(lab, 8, 3))
    assert states(graphed) == states(other) == ["captured"]


def test_a_result_of_a_refused_capture_is_what_the_function_keeps(lab: Lab) -> None:
    store = Store()

    def function(x: Tensor) -> Tensor:
        y = x * 2
        vars(store)["last"] = y
        y.sum().item()
        return y

    graphed = cgraph.graphed(function)
    for _ in range(3):
        y = graphed(fresh(lab, 4))
        y.add_(1)
        assert vars(store)["last"] is y


def test_an_error_of_the_function_in_a_capture_drops_no_other_graph(lab: Lab) -> None:
    def function(x: Tensor) -> Tensor:
        y = x * 2
        if x.shape[0] == 4 and is_bad:
            raise ValueError("bad")
        return y

    is_bad: list[int] = []
    graphed = cgraph.graphed(function, on_fail="raise", guards={"is_bad": False})
    for rows in (8, 8, 4):
        graphed(fresh(lab, rows))
    is_bad.append(1)
    with pytest.raises(ValueError, match="bad"):
        graphed(fresh(lab, 4))
    assert states(graphed)[0] == "captured"


@pytest.mark.parametrize("outputs", ["fresh", "static"])
def test_a_result_of_a_refused_capture_stays_as_it_is(lab: Lab, outputs: Any) -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = (x + 1) * 2
        if x.shape[0] == 4 and y.sum().item() > 1e9:
            return y, y
        return y, y[1:]

    graphed = cgraph.graphed(function, outputs=outputs)
    for _ in range(3):
        graphed(fresh(lab, 8, 64))
    for _ in range(3):
        x = fresh(lab, 4, 64)
        y, rows = graphed(x)
        graphed(fresh(lab, 8, 64))
        assert torch.equal(y, function(x)[0])
        y[2] = 7
        assert torch.equal(rows, y[1:])


def test_what_refused_captures_do_not_leave_drops_no_other_graph(lab: Lab) -> None:
    def function(x: Tensor) -> Tensor:
        if x.shape[0] == 4:
            return x * x.sum().item()
        return (x + 1) * 2

    graphed = cgraph.graphed(function)
    for rows in (8, 8, 8, 4, 4, 4, 8):
        x = fresh(lab, rows, 3)
        assert torch.allclose(graphed(x), function(x))
    assert sorted(states(graphed)) == ["captured", "eager"]
    (captured,) = (key for key in graphed.report().keys if key.state == "captured")
    assert (captured.eager_calls, captured.replays) == (1, 3)


def test_a_pool_that_has_lost_all_its_graphs_is_captured_into_again(lab: Lab) -> None:
    pool: Any = cgraph.MemPool()
    graphed = cgraph.graphed(lambda x: x * 2, pool=pool)
    for _ in range(3):
        for _ in range(3):
            x = fresh(lab, 4)
            y = graphed(x)
            assert torch.equal(y, x * 2)
        assert states(graphed) == ["captured"]
        graphed.reset()
        assert torch.equal(y, x * 2)
    # Nothing is left that would disturb the end of another pool.
    other, _ = cgraph.MemPool(), gc.collect()
    del other
