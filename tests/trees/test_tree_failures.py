"""Calls of graph trees that are refused or fail, and what goes on after them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from cgraph import _driver, _torch, trees
from cgraph._captures.turns import Turn
from cgraph.errors import ArgumentError, EagerWarning, StateError
from lab import Lab, fresh
from tree_programs import graphs_of, half, in_tree, step


def test_a_function_that_keeps_a_tensor_that_it_makes_runs_once_a_call_and_is_told(
    lab: Lab,
) -> None:
    kept: list[Tensor] = []

    def keeper(x: Tensor) -> Tensor:
        kept.append(x * 2)
        return x + 1

    fast, other = in_tree(lab, keeper, fresh(lab, 4)), in_tree(lab, half, fresh(lab, 4))
    wanted = []
    with pytest.warns(EagerWarning, match="makes, keeps and does not return"):
        for _ in range(5):
            step()
            y = fast(x := fresh(lab, 4))
            wanted.append(x * 2)
            torch.testing.assert_close(y, x + 1)
            z = other(x := fresh(lab, 4))
            torch.testing.assert_close(z, half(x))
    torch.testing.assert_close(kept, wanted)
    assert graphs_of(fast) == 0
    assert graphs_of(other) > 0


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


@contextmanager
def another_thread_captures() -> Iterator[None]:
    """Let another thread have the turn at capturing in a ``with`` block."""
    begun, over = threading.Event(), threading.Event()

    def work() -> None:
        with Turn(_driver.current()):
            begun.set()
            over.wait()

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("returned", [tuple, list, lambda results: results[0]])
def test_a_call_returns_a_list_whatever_the_function_returns_and_wherever_it_runs(
    lab: Lab, returned: Any
) -> None:
    def twice(args: list[Any]) -> Any:
        return returned([args.pop() * 2])

    fast: Any = trees.cudagraphify(twice, [fresh(lab, 4)], is_inference=True)
    for number in range(4):
        step()
        if number == 1:
            with another_thread_captures():
                found = fast([x := fresh(lab, 4)])
        else:
            found = fast([x := fresh(lab, 4)])
        assert type(found) is list
        assert torch.equal(found[0], x * 2)
    [node] = [node for *_, node in fast.tree.nodes]
    assert node.replays == 1


def test_in_a_torch_that_says_nowhere_in_memory_who_holds_an_output_calls_are_as_right(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def count(storage: int, counted: Any = _torch.count_uses) -> Any:
        asked.append(storage)
        return counted(storage)

    monkeypatch.setattr(_torch, "counts_uses_natively", lambda: False)
    monkeypatch.setattr(_torch, "count_uses", count)
    first = in_tree(lab, half, fresh(lab, 4), options={"held_outputs": "raise"})
    second = in_tree(lab, torch.neg, fresh(lab, 4))
    for number in range(8):
        step()
        y = first(x := fresh(lab, 4))
        z = second(y)
        assert torch.allclose(z, -half(x))
        if number % 2:
            del y
            assert torch.allclose(second(z), half(x))
        del z
    # Behind the first function, and behind itself.
    assert graphs_of(second) == 2
    asked.clear()
    held = first(fresh(lab, 4))
    step()
    first(fresh(lab, 4))
    assert asked
    with pytest.raises(RuntimeError, match="overwritten by a subsequent run"):
        held.sum()
