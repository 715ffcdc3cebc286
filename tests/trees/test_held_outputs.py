"""Outputs that are held when their step ends: kept, made in new memory, or raising."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from cgraph import _torch, trees
from interrupts import interrupt_at
from lab import Lab, fresh
from tree_programs import graphs_of, half, in_tree, line, step

RAISES = {"held_outputs": "raise"}
aliases = pytest.mark.parametrize(
    "alias", [lambda y: y, torch.Tensor.detach, lambda y: y[1:], lambda y: y.view(-1)]
)


@aliases
def test_outputs_that_are_held_when_their_step_ends_stay_right_whatever_refers_to_them(
    lab: Lab, alias: Any
) -> None:
    fast = in_tree(lab, half, fresh(lab, 4, 4))
    held = []
    for _ in range(8):
        step()
        held.append((alias(fast(x := fresh(lab, 4, 4))), alias(half(x))))
        for found, want in held:
            torch.testing.assert_close(found, want)
    assert graphs_of(fast) == 2


@aliases
def test_with_an_option_an_output_of_an_earlier_step_raises_whatever_refers_to_it(
    lab: Lab, alias: Any
) -> None:
    fast = in_tree(lab, half, fresh(lab, 4, 4), options=RAISES)
    for _ in range(4):
        step()
        held = alias(fast(fresh(lab, 4, 4)))
    held.sum()
    step()
    fast(fresh(lab, 4, 4))
    with pytest.raises(
        RuntimeError, match="accessing tensor output of CUDAGraphs that has been"
    ) as error:
        held.sum()
    assert "half" in str(error.value)
    assert "clone" in str(error.value)


def test_outputs_of_recordings_raise_after_their_step_as_those_of_replays_do(lab: Lab) -> None:
    fast = in_tree(lab, half, fresh(lab, 4), options=RAISES)
    held = []
    for _ in range(5):
        step()
        held.append(fast(fresh(lab, 4)))
    held.pop(0).sum()  # that of the first run, which is ordinary memory
    held.pop().sum()
    for one in held:
        with pytest.raises(RuntimeError, match="overwritten by a subsequent run"):
            one.sum()


def test_an_output_of_the_step_that_ends_stays_right_as_an_argument_also_where_others_raise(
    lab: Lab,
) -> None:
    fast = in_tree(lab, lambda x: (x * 2, x + 1), fresh(lab, 4), options=RAISES)
    x = fresh(lab, 4)
    for _ in range(6):
        step()
        before, want = x, x.clone()
        x, other = fast(x)
        torch.testing.assert_close(before, want)
        torch.testing.assert_close(x, want * 2)
        torch.testing.assert_close(other, want + 1)


def test_results_that_are_held_in_each_step_are_soon_made_in_memory_of_their_own(lab: Lab) -> None:
    fast = in_tree(lab, lambda x: (half(x), x[1:] + 1, None), fresh(lab, 256))
    held = []
    for number in range(200):
        step()
        y, z, none = fast(x := fresh(lab, 256))
        torch.testing.assert_close((y, z), (half(x), x[1:] + 1))
        assert none is None
        if number < 100:
            held = [*held[-3:], (y, z, half(x), x[1:] + 1)]
        for one, other, *want in held:
            torch.testing.assert_close((one, other), tuple(want))
        del y, z
    # The first ones that were held, and one to see whether they still are.
    [tree] = trees.report().trees
    assert 2 * 2044 <= tree.kept_bytes <= 5 * 2044
    assert "of held outputs copied" in str(tree)
    assert graphs_of(fast) == 2


def test_a_function_behind_one_whose_results_are_held_is_right(lab: Lab) -> None:
    first, second = in_tree(lab, half, fresh(lab, 8)), in_tree(lab, line, fresh(lab, 8))
    for number in range(30):
        step()
        y = first(x := fresh(lab, 8))
        if number > 6 and number % 3:
            z = second(y)
            torch.testing.assert_close(z, line(half(x)))
        torch.testing.assert_close(y, half(x))


def test_gradients_that_are_held_when_their_step_ends_get_memory_of_their_own(lab: Lab) -> None:
    gradient = in_tree(lab, line, fresh(lab, 8), is_backward=True, is_inference=False)
    total, want = None, torch.zeros(8, device=lab.device)
    for _ in range(8):
        step()
        x = fresh(lab, 8)
        found = gradient(x)
        total = found if total is None else total.add_(found)
        want += line(x)
        assert torch.allclose(total, want, atol=1e-5)


def test_who_looks_at_the_storage_of_an_output_and_lets_go_does_not_hold_it(lab: Lab) -> None:
    first, second = in_tree(lab, half, fresh(lab, 8)), in_tree(lab, line, fresh(lab, 8))
    for _ in range(8):
        step()
        y = first(x := fresh(lab, 8))
        y.untyped_storage().nbytes()
        assert torch.allclose(y, half(x))
        del y
    step()
    y = first(x := fresh(lab, 8))
    y.untyped_storage().nbytes()
    del y
    for _ in range(3):
        x = fresh(lab, 8)
        assert torch.allclose(second(second(x)), line(line(x)))
    assert graphs_of(first) == 1


def test_lazy_conjugates_and_small_views_of_held_outputs_are_as_in_eager(lab: Lab) -> None:
    def numbers() -> Tensor:
        return torch.randn(8, dtype=torch.complex64, device=lab.device)

    first = in_tree(lab, lambda x: (x * 2)[2:6], numbers())
    second = in_tree(lab, lambda y: (y.conj(), y.as_strided((8,), (1,), 0)[:2]), numbers()[:4])
    held = []
    for _ in range(8):
        step()
        x = numbers()
        y = first(x)
        conjugate, begin = second(y)
        assert torch.allclose(conjugate, (x * 2)[2:6].conj())
        assert torch.allclose(begin, (x * 2)[:2])
        held[:] = [y, conjugate]


def test_a_held_output_that_cannot_be_copied_is_right_after_the_error_and_in_later_calls(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = in_tree(lab, half, fresh(lab, 4))
    for replays in (0, 1, 2):
        trees.reset()
        for _ in range(2 + replays):
            step()
            y = fast(x := fresh(lab, 4))

        def fail(_: object) -> Any:
            raise MemoryError("no memory for a copy")

        with monkeypatch.context() as patched:
            patched.setattr(Tensor, "clone", fail)
            patched.setattr(_torch, "copied_memory", fail)
            for _ in range(2):
                step()
                with pytest.raises(MemoryError, match="no memory for a copy"):
                    fast(fresh(lab, 4))
                torch.testing.assert_close(y, half(x))
        for _ in range(3):
            step()
            torch.testing.assert_close(fast(other := fresh(lab, 4)), half(other))
            torch.testing.assert_close(y, half(x))


@pytest.mark.parametrize("held_outputs", ["keep", "raise"])
def test_an_interrupt_while_a_step_ends_leaves_held_outputs_right_or_raising(
    lab: Lab, held_outputs: str
) -> None:
    interrupted = 0
    for calls in (2, 4):
        # Each function of Python's that the call enters may be interrupted.
        for number in range(1, 40):
            fast = in_tree(
                lab,
                lambda x: (half(x), x[1:] * 2),
                fresh(lab, 4),
                options={"held_outputs": held_outputs},
            )
            for _ in range(calls):
                step()
                held = fast(x := fresh(lab, 4))
            want = half(x), x[1:] * 2
            step()
            with interrupt_at(number) as found:
                fast(fresh(lab, 4))
            interrupted += found[0]
            for _ in range(3):
                step()
                other = fresh(lab, 4)
                torch.testing.assert_close(fast(other), (half(other), other[1:] * 2))
            for one, right in zip(held, want, strict=True):
                try:
                    torch.testing.assert_close(one, right)
                except RuntimeError as error:
                    assert held_outputs == "raise"
                    assert "overwritten by a subsequent run" in str(error)
            if not found[0]:
                break
    assert interrupted > 10


def test_an_output_that_garbage_holds_may_go_while_the_next_call_is_recorded(lab: Lab) -> None:
    for threshold in range(1, 40, 3):
        first = in_tree(lab, lambda x: (x * 2, x * 3), fresh(lab, 3))
        second = in_tree(lab, line, fresh(lab, 3))
        gc.collect()
        gc.disable()
        try:
            for number in range(4):
                step()
                y, z = first(fresh(lab, 3))
                if number == 1:
                    second(fresh(lab, 3))  # its first run
                if number == 3:
                    garbage: list[Any] = [y]
                    garbage.append(garbage)
                    want, x = z.clone(), fresh(lab, 3)
                    del garbage, y
                    gc.set_threshold(gc.get_count()[0] + threshold)
                    gc.enable()
                    torch.testing.assert_close(second(x), line(x))
                    torch.testing.assert_close(z, want)
                del z
        finally:
            gc.enable()
            gc.set_threshold(700, 10, 10)
