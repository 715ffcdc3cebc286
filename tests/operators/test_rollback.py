"""Writes of operators are undone, bit by bit."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _python_dispatch as python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from bits import same, undone
from cgraph._operators.rollback import Rollback
from cgraph._torch import WeakStorage


def copies(body: Callable[[], object], **options: Any) -> int:
    """Count the copies made while a body runs that makes none itself."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        with Rollback(**options):
            body()
    return sum(event.name == "aten::clone" for event in profiler.events())


class Stop(Exception):
    """An exception that a function raises in the middle."""


def test_what_is_written_in_place_is_put_back() -> None:
    x = torch.randn(4, 5)
    with undone(x):
        x.mul_(2)
        x[1] = 7
        x.relu_().add_(1)


def test_an_exception_in_the_middle_changes_nothing_of_that() -> None:
    x, before = torch.randn(4), torch.get_rng_state()
    original, rollback = x.clone(), Rollback()
    with pytest.raises(Stop), rollback:
        x.normal_()
        raise Stop
    rollback.undo()
    assert same(x, original)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_operator_that_fails_leaves_the_contents_as_they_were() -> None:
    x, rollback = torch.randn(3), Rollback()
    original = x.clone()
    with pytest.raises(RuntimeError, match="size"), rollback:
        x.add_(torch.randn(4))
    rollback.undo()
    assert same(x, original)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[1:3],
        lambda x: x.t(),
        lambda x: x.as_strided((3, 3), (1, 2), 4),
        lambda x: x.view(torch.int32),
        lambda x: x.detach(),
    ],
)
def test_what_is_written_through_a_view_is_put_back(view: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(6, 4)
    outside = view(x)
    with undone(x):
        view(x).add_(1)
        outside.mul_(3)
        x.sub_(2)


def test_a_view_of_a_part_brings_its_whole_storage_back() -> None:
    whole = torch.randn(10)
    part = whole[2:4]
    with undone(whole, part):
        part.zero_()
        torch.as_strided(part, (10,), (1,), 0).zero_()


def test_views_of_one_storage_are_copied_once() -> None:
    x = torch.randn(6)
    first, second = x[:4], x[2:]

    def body() -> None:
        for one in (first, second, x, first):
            one.add_(1)

    assert copies(body) == 1


def test_operators_that_write_nothing_cost_no_copy() -> None:
    x, layer = torch.randn(5, 4), nn.Linear(4, 4)
    assert copies(lambda: layer(x).relu().sum()) == 0


def test_a_tensor_made_inside_is_neither_copied_nor_put_back() -> None:
    x, made = torch.randn(5), []

    def body() -> None:
        made.append(x + 1)
        made.append(made[0].view(5, 1)[2:])
        made[0].mul_(2)
        made[1].add_(1)

    assert copies(body) == 0
    rollback, expected = Rollback(), (x + 1) * 2
    with rollback:
        y = x + 1
        y.mul_(2)
    rollback.undo()
    assert same(y, expected)


def test_memory_made_inside_is_let_go() -> None:
    x = torch.randn(64)
    with Rollback():
        made = x * 2
        made.add_(1)
        storage = WeakStorage(made)
        del made
        gc.collect()
        assert storage.get() is None


def test_addresses_that_are_used_again_are_not_mixed_up() -> None:
    outside = [torch.randn(32) for _ in range(50)]
    before = [one.clone() for one in outside]
    rollback = Rollback()
    with rollback:
        for one in outside:
            for _ in range(4):
                torch.randn(32).mul_(2)  # dies, and its address with it
            one.add_(torch.randn(32))
    rollback.undo()
    assert all(same(*pair) for pair in zip(outside, before, strict=True))


def test_lists_of_foreach_operators_are_put_back() -> None:
    tensors = [torch.randn(n + 1) for n in range(4)]
    others = [torch.randn(n + 1) for n in range(4)]
    with undone(*tensors, *others):
        torch._foreach_add_(tensors, others)
        torch._foreach_mul_(tensors, 3.0)
        torch._foreach_zero_(others)


def test_out_arguments_are_put_back() -> None:
    x, out, values, indices = torch.randn(5), torch.randn(5), torch.randn(2), torch.tensor([8, 9])
    with undone(out, values, indices):
        torch.add(x, 1, out=out)
        torch.topk(x, 2, out=(values, indices))


def test_an_out_argument_that_was_resized_has_its_size_and_contents_again() -> None:
    empty, small = torch.empty(0), torch.randn(2)
    contents, nbytes = small.clone(), small.untyped_storage().nbytes()
    rollback = Rollback()
    with rollback:
        torch.add(torch.randn(7), 1, out=empty)
        small.resize_(100).normal_()
    rollback.undo()
    assert empty.shape == (0,)
    assert empty.untyped_storage().nbytes() == 0
    assert same(small, contents)
    assert small.untyped_storage().nbytes() == nbytes


def test_a_tensor_that_got_another_storage_or_shape_has_its_own_again() -> None:
    x, y = torch.randn(2, 6), torch.randn(3, 4)
    original, address, shape = x.clone(), x.data_ptr(), y.clone()
    rollback = Rollback()
    with rollback:
        x.set_(torch.randn(3))
        x.add_(1)
        y.t_()
    rollback.undo()
    assert x.data_ptr() == address
    assert same(x, original)
    assert same(y, shape)
    assert y.stride() == (4, 1)


def test_two_storages_on_the_same_memory_are_put_back() -> None:
    array = torch.randn(8).numpy()
    first, second = torch.from_numpy(array), torch.from_numpy(array)
    with undone(first, second):
        first.add_(1)
        second.mul_(2)
        first.add_(1)


def test_memory_that_is_first_seen_through_numpy_inside_is_put_back() -> None:
    x = torch.randn(8)
    array = x.numpy()
    with undone(x):
        torch.from_numpy(array).add_(1)
        torch.as_tensor(array).mul_(2)


def test_not_a_number_and_odd_types_come_back_bit_by_bit() -> None:
    x = torch.tensor([float("nan"), -0.0, float("inf"), 1.0])
    halves, flags, pairs = x.bfloat16(), x > 0, torch.complex(x, x)
    with undone(x, halves, flags, pairs):
        for one in (x, halves, pairs):
            one.fill_(3)
        flags.logical_not_()


def test_rollbacks_nest() -> None:
    x, y = torch.randn(4), torch.randn(4)
    outer, inner = Rollback(), Rollback()
    originals = x.clone(), y.clone()
    with outer:
        x.add_(1)
        middle = x.clone()
        state = torch.get_rng_state()
        with inner:
            x.mul_(torch.rand(4))
            y.add_(1)
        inner.undo()
        assert same(x, middle)
        assert same(y, originals[1])
        assert torch.equal(torch.get_rng_state(), state)
        y.sub_(5)
    outer.undo()
    assert same(x, originals[0])
    assert same(y, originals[1])


def test_a_second_undo_changes_nothing_that_was_written_since() -> None:
    x, rollback = torch.randn(4), Rollback()
    with rollback:
        x.add_(1)
    rollback.undo()
    x.mul_(2)
    expected = x.clone()
    rollback.undo()
    assert same(x, expected)


def test_modes_that_the_function_left_behind_do_not_keep_it_in_force() -> None:
    class Left(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    x, left = torch.randn(4), Left()
    with undone(x):
        left.__enter__()
        x.add_(1)
    assert python_dispatch._get_current_dispatch_mode_stack() == [left]
    left.__exit__(None, None, None)


class Pair(Tensor):
    """A wrapper around two tensors."""

    @staticmethod
    def __new__(cls, first: Tensor, second: Tensor) -> Pair:
        made = Tensor._make_wrapper_subclass(cls, first.shape, dtype=first.dtype)  # type: ignore
        made.first, made.second = first, second
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["first", "second"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], *_: object) -> Pair:
        return cls(inner["first"], inner["second"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for name in ("first", "second"):
            func(*[getattr(one, name) if isinstance(one, cls) else one for one in args])
        return args[0]


def test_tensors_inside_a_wrapper_are_put_back() -> None:
    first, second = torch.randn(3), torch.randn(3)
    pair = Pair(first, second)
    with undone(first, second):
        pair.mul_(2)


def test_an_operator_without_a_schema_may_write_all_that_it_is_given() -> None:
    flag, x, y = torch.tensor(True), torch.randn(3), torch.randn(3)

    def body() -> None:
        torch.cond(flag, lambda a, b: a + b, lambda a, b: a - b, (x, y))

    assert copies(body) == 3


def test_while_a_capture_is_open_nothing_is_copied_but_gradients_are_noted() -> None:
    layer, out = nn.Linear(3, 2), torch.randn(4, 2)

    def body() -> None:
        y = layer(torch.randn(4, 3))
        y.sum().backward()
        out.mul_(2)

    assert copies(lambda: out.mul_(2), is_capturing=lambda: True) == 0
    rollback = Rollback(is_capturing=lambda: True)
    with rollback:
        body()
    rollback.undo()
    assert layer.weight.grad is None


def test_between_calls_a_storage_stays_as_large_as_a_tensor_in_it_has_become() -> None:
    x = torch.rand(4)
    before = x.clone()
    with Rollback() as rollback:
        x.resize_(1024).fill_(3)
        rollback.rewind()
        # The next call finds a tensor that is large already.
        assert x.untyped_storage().nbytes() >= x.numel() * x.itemsize
        x.resize_(1024).fill_(5)
    rollback.undo()
    assert same(x, before)
