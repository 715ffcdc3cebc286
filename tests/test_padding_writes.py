"""What padding trials make of memory that a function writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import cgraph
from cgraph._functions.padding import writes
from cgraph._functions.padding.writes import Writes
from lab import SimLab, fresh

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.complex128]


def numbers(dtype: torch.dtype, count: int) -> Tensor:
    """Of which no two are equal, but for truth values."""
    return (torch.randperm(count) + 1).to(dtype)


def verdict(
    before: Tensor,
    right: Tensor,
    *padded: Tensor,
    again: Tensor | None = None,
    is_free: bool = False,
) -> bool:
    """Whether a call with padding is found to have spoilt the memory.

    ``again`` is what the call without padding leaves with other random numbers.
    """
    now = right.clone()
    writes = Writes([(before, now)], is_free)
    if again is not None:
        now.copy_(again)
        writes.see_again([(before, now)])
    for one in padded:
        now.copy_(one)
        writes.see([(before, now)])
    return writes.are_spoilt()


def written(before: Tensor, places: list[int]) -> Tensor:
    """Other numbers at some places."""
    after = before.clone()
    for place in places:
        after[place] = ~before[place] if before.dtype is torch.bool else before[place] + 100
    return after


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_behind_those_of_the_call_may_be_written(dtype: torch.dtype) -> None:
    before = numbers(dtype, 64)
    right, padded = written(before, [3, 4, 5]), written(before, [3, 4, 5, 6, 7])
    assert not verdict(before, right, padded, padded, padded)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_the_call_writes_must_stay_as_it_is(dtype: torch.dtype) -> None:
    before = numbers(dtype, 64)
    right, padded = written(before, [3, 4, 5]), written(before, [3, 4])
    assert verdict(before, right, padded)
    # Unless it is random; then all paddings must leave the same.
    assert not verdict(before, right, padded, again=padded, is_free=True)
    assert not verdict(before, right, padded, padded, again=padded, is_free=True)
    assert verdict(before, right, padded, right, again=padded, is_free=True)
    # What came out alike is not random.
    assert verdict(before, right, padded, again=right, is_free=True)


@pytest.mark.parametrize("count", [4, 40])
def test_places_that_depend_on_the_contents_of_padding_are_refused(count: int) -> None:
    before = numbers(torch.float32, 256)
    right = written(before, [0])
    one = written(before, [0, *range(10, 10 + count)])
    other = written(before, [0, *range(100, 100 + count)])
    assert verdict(before, right, one, other)
    assert verdict(before, right, one, other, other)
    assert not verdict(before, right, one, other, is_free=True)


def test_buffers_of_many_parts_are_compared_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writes, "_PART", 7)
    for dtype in DTYPES:
        test_rows_behind_those_of_the_call_may_be_written(dtype)
        test_what_the_call_writes_must_stay_as_it_is(dtype)
    for count in (4, 40):
        test_places_that_depend_on_the_contents_of_padding_are_refused(count)
    test_few_elements_may_hold_what_they_held_before_by_chance()


def test_few_elements_may_hold_what_they_held_before_by_chance() -> None:
    before = numbers(torch.float32, 256)
    right = written(before, [0])
    whole = list(range(10, 50))
    paddings = [written(before, [0, *whole[skip:]]) for skip in (0, 3, 1)]
    assert not verdict(before, right, *paddings)


def test_one_trial_alone_may_write_nothing_elsewhere() -> None:
    before = numbers(torch.float32, 64)
    right = written(before, [0])
    assert not verdict(before, right, right)
    assert verdict(before, right, written(before, [0, 1]))


def test_a_buffer_of_another_size_is_spoilt() -> None:
    before, after = numbers(torch.float32, 8), numbers(torch.float32, 9)
    for right, padded in ((after, after), (after, before), (before, after)):
        writes = Writes([(before, right)], False)
        writes.see([(before, padded)])
        assert writes.are_spoilt()


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("shape", [(4, 0), (4, 3)])
@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex32, torch.float32])
def test_a_trial_takes_buffers_of_any_kind(
    sim: SimLab, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    class Kept(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("kept", torch.zeros(shape, dtype=dtype))

        def forward(self, x: Tensor) -> Tensor:
            self.kept.fill_(0.5)
            return x * 2

    graphed = cgraph.graphed(Kept(), sizes=[4])
    for _ in range(2):
        x = fresh(sim, 3, 5)
        assert torch.equal(graphed(x), x * 2)
    assert [key.state for key in graphed.report().keys] == ["captured"]


def test_no_mode_of_the_caller_sees_the_comparison(sim: SimLab) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    before = numbers(torch.float32, 64)
    right, padded = written(before, [3, 4, 5]), written(before, [3, 4, 5, 6, 7])
    now = right.clone()
    with Seen():
        writes = Writes([(before, now)], False)
    now.copy_(padded)
    with Seen():
        for _ in range(2):
            writes.see([(before, now)])
        assert not writes.are_spoilt()
    assert seen == []
