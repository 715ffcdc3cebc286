"""Debugged functions get the same as others: shared memory, generators, autocast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from graphed_calls import states
from lab import Lab, fresh

pytestmark = pytest.mark.filterwarnings("ignore:.*as it was written")

WORDS = ["", "sync", "poison", "compare", "sync,compare,poison"]
debugged = pytest.mark.parametrize("words", WORDS)


@debugged
def test_an_argument_that_is_written_and_given_twice_is_read_as_it_was_written(
    lab: Lab, words: str
) -> None:
    def written(a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        return b * 2

    function = cgraph.graphed(written, debug=words)
    function(fresh(lab, 4), fresh(lab, 4))
    x = fresh(lab, 4)
    expected = (x + 1) * 2
    assert torch.equal(function(x, x), expected)
    assert torch.equal(x * 2, expected)


@debugged
def test_a_state_that_is_written_and_returned_anew_goes_from_call_to_call(
    lab: Lab, words: str
) -> None:
    def step(state: Tensor, x: Tensor) -> Tensor:
        state.add_(1)
        return state * 2 + x

    function = cgraph.graphed(step, debug=words)
    ours = fresh(lab, 4)
    theirs = ours.clone()
    for _ in range(4):
        x = fresh(lab, 4)
        ours = function(ours, x)
        theirs = step(theirs, x)
        assert torch.equal(ours, theirs)


@debugged
def test_generators_of_the_user_s_own_advance_once_in_each_call(lab: Lab, words: str) -> None:
    generator = torch.Generator(lab.device)

    def draw(x: Tensor) -> Tensor:
        return x + torch.rand(x.shape, device=x.device, generator=generator)

    x = fresh(lab, 8)
    generator.manual_seed(3)
    expected = [draw(x) for _ in range(3)]
    function = cgraph.graphed(draw, debug=words)
    generator.manual_seed(3)
    for one in expected:
        assert torch.equal(function(x), one)


@debugged
@pytest.mark.filterwarnings("error:.*still referenced")
def test_graphed_functions_inside_are_part_of_it(lab: Lab, words: str) -> None:
    inner = cgraph.graphed(lambda x: x + 1)
    outer = cgraph.graphed(lambda x: inner(x) - inner(2 * x), debug=words)
    inner(fresh(lab, 4))
    for _ in range(3):
        x = fresh(lab, 4)
        torch.testing.assert_close(outer(x), -x)


@debugged
@pytest.mark.parametrize("grad", [False, True])
def test_autocast_inside_casts_weights_once_and_goes_on(lab: Lab, words: str, grad: bool) -> None:
    net = nn.Linear(6, 6, device=lab.device)

    def cast(x: Tensor) -> Tensor:
        with torch.autocast(lab.device, dtype=torch.bfloat16):
            return net(x) + net(x * 2)

    function = cgraph.graphed(cast, debug=words)
    with torch.set_grad_enabled(grad):
        for _ in range(2):
            x = fresh(lab, 4, 6)
            torch.testing.assert_close(function(x), cast(x))
    assert states(function) == ["captured"]


@debugged
def test_gradients_of_arguments_are_taken_inside(lab: Lab, words: str) -> None:
    def slope(x: Tensor) -> Tensor:
        return torch.autograd.grad((x * x).sum(), x)[0]

    function = cgraph.graphed(slope, debug=words)
    for _ in range(2):
        x = fresh(lab, 4).requires_grad_()
        torch.testing.assert_close(function(x), 2 * x.detach())


@pytest.mark.parametrize("warmup", [1, 3])
def test_state_that_a_graphed_function_inside_writes_is_written_once(lab: Lab, warmup: int) -> None:
    total = torch.zeros(4, device=lab.device)
    inner = cgraph.graphed(lambda x: total.add_(x) * 1)
    outer = cgraph.graphed(lambda x: inner(x) + 1, warmup=warmup)
    expected = torch.zeros(4, device=lab.device)
    for function in (inner, inner, outer, outer):
        x = fresh(lab, 4)
        function(x)
        expected += x
        torch.testing.assert_close(total, expected)
    cgraph.dry_run(outer, fresh(lab, 4))
    torch.testing.assert_close(total, expected)


def test_a_result_with_a_size_and_one_without_names_are_compared(lab: Lab) -> None:
    class Pair:
        def __init__(self, *parts: Any) -> None:
            self.parts = parts

    torch.utils._pytree.register_pytree_node(
        Pair, lambda pair: ([*pair.parts], None), lambda parts, _: Pair(*parts)
    )
    run = cgraph.graphed(
        lambda x: {"size": x.shape, "pair": Pair(x * 2, x + 1)},
        debug="compare",
    )
    for _ in range(2):
        x = fresh(lab, 3)
        result = run(x)
        assert result["size"] == x.shape
        one, other = result["pair"].parts
        assert torch.equal(one, x * 2)
        assert torch.equal(other, x + 1)
