"""Calls of graph trees that are refused or fail, and what goes on after them; trap T123."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cgraph import trees
from cgraph.errors import ArgumentError, CaptureError, StateError
from lab import Lab, fresh
from tree_programs import graphs_of, half, in_tree, step


def test_a_tensor_that_a_recording_keeps_is_refused_and_other_functions_go_on(lab: Lab) -> None:
    kept: list[Tensor] = []

    def keeper(x: Tensor) -> Tensor:
        kept.append(x * 2)
        return x + 1

    fast, other = in_tree(lab, keeper, fresh(lab, 4)), in_tree(lab, half, fresh(lab, 4))
    step()
    fast(fresh(lab, 4)), other(fresh(lab, 4))
    step()
    with pytest.raises(CaptureError, match="keeps a tensor that it has made"):
        fast(fresh(lab, 4))
    for _ in range(3):
        step()
        x = fresh(lab, 4)
        assert torch.allclose(other(x), half(x))


def test_an_error_of_the_function_comes_out_and_the_next_call_is_captured(lab: Lab) -> None:
    fails = []

    def risky(x: Tensor) -> Tensor:
        y = x * 2
        if fails:
            raise KeyError("mine")
        return y

    fast, other = in_tree(lab, risky, fresh(lab, 4)), in_tree(lab, half, fresh(lab, 4))
    step()
    fast(fresh(lab, 4)), other(fresh(lab, 4))
    step()
    held = other(x := fresh(lab, 4))
    fails.append(1)
    with pytest.raises(KeyError, match="mine"):
        fast(fresh(lab, 4))
    assert torch.allclose(held, half(x))
    fails.clear()
    for _ in range(3):
        step()
        x = fresh(lab, 4)
        assert torch.equal(fast(x), x * 2)
    assert graphs_of(fast) == 1


def test_wrong_arguments_are_named(lab: Lab) -> None:
    with pytest.raises(ArgumentError, match="both True, expected one"):
        trees.cudagraphify(half, [fresh(lab, 4)], is_backward=True, is_inference=True)
    fast = in_tree(lab, half, fresh(lab, 4))
    with pytest.raises(ArgumentError, match="number of inputs is 2, expected 1"):
        fast(fresh(lab, 4), fresh(lab, 4))
    with pytest.raises(ArgumentError, match=r"places \[-1\], expected places of its 1 inputs"):
        in_tree(lab, half, fresh(lab, 4), static_input_idxs=[-1])
    with pytest.raises(ArgumentError, match="a tuple, expected a list"):
        fast.made((fresh(lab, 4),))
    with pytest.raises(ArgumentError, match="input 0 is on meta"):
        in_tree(lab, half, torch.empty(4, device="meta"))


def test_a_reset_inside_of_a_call_is_refused(lab: Lab) -> None:
    inner: list[Any] = []

    def resets(x: Tensor) -> Tensor:
        if inner:
            with pytest.raises(StateError, match="call it when that has returned"):
                trees.reset()
        return x * 2

    fast = in_tree(lab, resets, fresh(lab, 4))
    for number in range(4):
        step()
        x = fresh(lab, 4)
        assert torch.equal(fast(x), x * 2)
        if number == 0:
            inner.append(1)
    assert graphs_of(fast) == 1
