"""Ladders that only run captures: made in a row, and finished at the end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from graphed_calls import misses, states
from lab import Lab, fresh
from ladders import SIZES, doubled, require_right, require_whole

ALONE: dict[str, Any] = {}


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    """Disable gradients: calls that record them look for more than captures do."""
    with torch.no_grad():
        yield


def at(rows: int, x: Tensor) -> bool:
    """Return whether a tensor has so many rows."""
    return x.shape[0] == rows


def test_each_size_and_what_is_padded_to_it_equals_eager(lab: Lab) -> None:
    function = cgraph.graphed(doubled, sizes=SIZES, **ALONE)
    function.capture(fresh(lab, 8, 5), progress=False).freeze()
    with misses() as seen:
        require_right(function, lab, SIZES)
    assert not seen
    require_right(function, lab, [5, 7])


def test_what_a_function_writes_to_its_argument_is_written_to_that_of_each_call(lab: Lab) -> None:
    def grown(x: Tensor) -> Tensor:
        # The sizes read the same memory, which has one count of writes.
        return x.mul_(2) + 1 if at(4, x) else x + 1

    function = cgraph.graphed(grown, sizes=SIZES, **ALONE)
    function.capture(fresh(lab, 8, 5), progress=False)
    for rows in SIZES:
        x = fresh(lab, rows, 5)
        mine = x.clone()
        assert torch.equal(function(mine), grown(x))
        assert torch.equal(mine, x)


def test_a_function_with_a_break_in_some_sizes_is_right_in_all(lab: Lab) -> None:
    def broken(x: Tensor) -> Tensor:
        x = x * 2
        return cgraph.eager_break(torch.relu)(x) if x.shape[0] in (3, 6) else torch.relu(x)

    function = cgraph.graphed(broken, sizes=SIZES, **ALONE)
    function.capture(fresh(lab, 8, 5), progress=False)
    assert states(function) == ["captured"] * len(SIZES)
    sizes = sorted(SIZES, reverse=True)
    assert [bool(key.breaks) for key in function.report().keys] == [one in (3, 6) for one in sizes]
    require_right(function, lab, SIZES)


def test_a_hook_for_the_end_of_captures_finds_each_graph_before_the_next_capture(lab: Lab) -> None:
    seen: list[str] = []

    def note(graph: cgraph.CUDAGraph) -> None:
        assert graph.raw_cuda_graph()
        seen.append(f"ended with {graph.memory().nodes}")

    function = cgraph.graphed(doubled, sizes=SIZES, **ALONE)
    with (
        cgraph.register_graph_capture_start_hook(lambda graph: seen.append("begun")),
        cgraph.register_graph_capture_end_hook(note),
    ):
        function.capture(fresh(lab, 8, 5), progress=False)
    assert seen[::2] == ["begun"] * len(SIZES)
    assert len({*seen[1::2]}) == 1 and seen[1].startswith("ended with")


def test_what_was_captured_before_is_not_captured_again(lab: Lab) -> None:
    function = cgraph.graphed(doubled, sizes=SIZES, **ALONE)
    function.capture(fresh(lab, 8, 5), sizes=[3, 6], progress=False)
    begun: list[object] = []
    with cgraph.register_graph_capture_start_hook(begun.append):
        function.capture(fresh(lab, 8, 5), progress=False)
    assert len(begun) == len(SIZES) - 2
    begun.clear()
    require_whole(function, lab)


def test_each_size_draws_the_random_numbers_that_eager_would(lab: Lab) -> None:
    def noisy(x: Tensor) -> Tensor:
        # One size draws nothing.
        return x + 1 if at(4, x) else nn.functional.dropout(x, 0.5) + torch.rand_like(x)

    function = cgraph.graphed(noisy, sizes=SIZES, **ALONE)
    function.capture(fresh(lab, 8, 5), progress=False)
    given = [fresh(lab, rows, 5) for rows in (*SIZES, 6, 3)]
    torch.manual_seed(11)
    mine = [function(x).clone() for x in given]
    torch.manual_seed(11)
    assert all(torch.equal(one, noisy(x)) for one, x in zip(mine, given, strict=True))


def test_a_step_of_an_optimizer_in_each_size_is_made_by_calls_alone(lab: Lab) -> None:
    net = nn.Linear(5, 5, device=lab.device)
    net.weight.grad = torch.randn_like(net.weight)
    optimizer = torch.optim.SGD([net.weight], lr=0.5)

    def stepped(x: Tensor) -> Tensor:
        optimizer.step()
        return x + net.weight.sum()

    begin, step = net.weight.clone(), net.weight.grad.clone()
    function = cgraph.graphed(stepped, sizes=[2, 4], **ALONE)
    function.capture(fresh(lab, 4, 5), progress=False)
    assert torch.equal(net.weight, begin)
    for count, rows in enumerate((4, 2, 4), 1):
        function(fresh(lab, rows, 5))
        torch.testing.assert_close(net.weight, begin - 0.5 * count * step)
    optimizer.param_groups[0]["lr"] = 2.0
    before = net.weight.clone()
    function(fresh(lab, 2, 5))
    torch.testing.assert_close(net.weight, before - 2 * step)
