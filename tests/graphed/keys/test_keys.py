"""Calls of a graphed function that share a graph."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils import _pytree as pytree

import cgraph
from cgraph import _torch
from graphed_calls import agree, misses, states
from lab import Lab, fresh


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclass
class Batch:
    ids: Tensor
    scale: float


pytree.register_dataclass(Batch)


def twice(x: Tensor) -> Tensor:
    return x * 2 + 1


def test_each_shape_and_dtype_has_one_key(lab: Lab) -> None:
    function = cgraph.graphed(twice)
    inputs: list[Callable[[], Tensor]] = [
        lambda: fresh(lab, 4),
        lambda: fresh(lab, 2, 2),
        lambda: fresh(lab, 4, 1),
        lambda: fresh(lab, 4).double(),
        lambda: fresh(lab, 4).half(),
        lambda: torch.randint(9, (4,), device=lab.device),
    ]
    for _ in range(3):
        for make in inputs:
            agree(function, twice, make())
    assert states(function) == ["captured"] * len(inputs)
    with misses() as seen:
        for make in reversed(inputs):
            agree(function, twice, make())
    assert not seen


def test_channels_last_has_a_key_and_a_result_of_its_own(lab: Lab) -> None:
    function = cgraph.graphed(twice)
    for _ in range(3):
        dense = fresh(lab, 2, 3, 4, 5)
        last = fresh(lab, 2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
        agree(function, twice, dense)
        agree(function, twice, last)
        assert function(last).stride() == twice(last).stride()
        assert function(dense).stride() == twice(dense).stride()
    assert states(function) == ["captured"] * 2


def test_a_transposed_tensor_is_copied_rightly(lab: Lab) -> None:
    function = cgraph.graphed(lambda x: x.cumsum(1) * 2)
    for _ in range(3):
        x = fresh(lab, 3, 3).t()
        assert_close(function(x), x.cumsum(1) * 2)
        x = fresh(lab, 3, 3)
        assert_close(function(x), x.cumsum(1) * 2)


def test_one_one_point_zero_and_true_are_three_keys(lab: Lab) -> None:
    def kind(x: Tensor, factor: Any) -> tuple[Tensor, int]:
        return x * factor, len(type(factor).__name__)

    function = cgraph.graphed(kind)
    for factor in (1, 1.0, True, True, 1.0, 1):
        agree(function, kind, fresh(lab, 4), factor)
    assert states(function) == ["captured"] * 3


def test_positive_and_negative_zero_are_two_keys(lab: Lab) -> None:
    def signed(x: Tensor, zero: Any) -> Tensor:
        return x / torch.full_like(x, zero)

    function = cgraph.graphed(signed)
    x = fresh(lab, 4).abs()
    for zero in (0.0, -0.0, 0.0, -0.0):
        assert_close(function(x, zero), signed(x, zero))


def test_not_a_number_shares_the_key_of_itself(lab: Lab) -> None:
    def plus(x: Tensor, number: float) -> Tensor:
        return x + number

    function = cgraph.graphed(plus)
    for _ in range(3):
        agree(function, plus, fresh(lab, 3), float("nan"))
    assert states(function) == ["captured"]


def test_a_changed_constant_is_noticed_each_time(lab: Lab) -> None:
    def scaled(x: Tensor, factor: float, mode: str | None = None) -> Tensor:
        return x * factor if mode is None else x + factor

    function = cgraph.graphed(scaled)
    for _ in range(2):
        for factor in (2, 3.5, -1):
            for mode in (None, "add"):
                agree(function, scaled, fresh(lab, 4), factor, mode)
    assert states(function) == ["captured"] * 6


def test_an_unhashable_constant_has_the_key_of_its_contents_or_is_captured_anew(lab: Lab) -> None:
    class Scale:
        __hash__ = None  # type: ignore[assignment]

        def __init__(self, factor: float) -> None:
            self.factor = factor

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Scale) and other.factor == self.factor

    def scaled(x: Tensor, scale: Scale) -> Tensor:
        return x * scale.factor

    function = cgraph.graphed(scaled)
    two, three = Scale(2), Scale(3)
    for scale in (two, three, two, three, Scale(2)):
        agree(function, scaled, fresh(lab, 4), scale)
    with misses() as seen:
        agree(function, scaled, fresh(lab, 4), three)
    assert not seen


def test_an_unhashable_constant_that_is_changed_in_place_is_noticed(lab: Lab) -> None:
    def scaled(x: Tensor, factors: set[float]) -> Tensor:
        return x * sum(factors)

    function, factors = cgraph.graphed(scaled), {2.0}
    agree(function, scaled, fresh(lab, 4), factors)
    factors.add(5.0)
    agree(function, scaled, fresh(lab, 4), factors)
    agree(function, scaled, fresh(lab, 4), {2.0})


def test_a_constant_whose_comparison_fails_does_not_end_the_call(lab: Lab) -> None:
    class Odd:
        def __eq__(self, other: object) -> bool:
            raise RuntimeError("not comparable")

        def __hash__(self) -> int:
            return 7

    def scaled(x: Tensor, _: Odd) -> Tensor:
        return x * 3

    function = cgraph.graphed(scaled)
    for odd in (Odd(), Odd(), Odd()):
        x = fresh(lab, 4)
        for _ in range(2):
            assert_close(function(x, odd), x * 3)


def test_containers_of_all_kinds_are_arguments_and_results(lab: Lab) -> None:
    def mixed(pair: Any, rest: dict[str, Any], batch: Batch) -> dict[str, Any]:
        first, second = pair
        total = first - second + batch.ids * batch.scale
        for one in rest["all"]:
            total = total + one
        return {"sum": total, "parts": [pair[0] + 1, (rest["all"][0] * 2, None)], "n": 3}

    function = cgraph.graphed(mixed)

    def arguments(kind: Callable[..., Any], count: int, scale: float) -> tuple[Any, ...]:
        pair = kind(fresh(lab, 4), fresh(lab, 4))
        return pair, {"all": [fresh(lab, 4) for _ in range(count)]}, Batch(fresh(lab, 4), scale)

    kinds: list[Callable[..., Any]] = [lambda *two: two, lambda *two: list(two), Pair]
    for _ in range(2):
        for kind in kinds:
            for count, scale in ((1, 2.0), (2, 3.0)):
                agree(function, mixed, *arguments(kind, count, scale))
    assert states(function) == ["captured"] * 6


def test_a_dictionary_in_another_order_is_another_key(lab: Lab) -> None:
    def difference(rest: dict[str, Tensor]) -> Tensor:
        first, second = rest.values()
        return first - second

    function = cgraph.graphed(difference)
    a, b = fresh(lab, 3), fresh(lab, 3)
    agree(function, difference, {"a": a, "b": b})
    agree(function, difference, {"b": b, "a": a})
    agree(function, difference, {"a": a, "b": b})


def test_entries_of_dictionaries_are_told_apart_by_name_in_any_order(lab: Lab) -> None:
    function = cgraph.graphed(lambda values: values["a"] - 2 * values["b"])
    for order in ("ab", "ba", "ab", "ba"):
        values = {name: fresh(lab, 3) for name in order}
        assert_close(function(values), values["a"] - 2 * values["b"])


def test_keyword_arguments_come_in_any_order_and_share_a_key(lab: Lab) -> None:
    def linear(x: Tensor, *, scale: Tensor, shift: Tensor) -> Tensor:
        return x * scale + shift

    function = cgraph.graphed(linear)
    for _ in range(2):
        x, a, b = (fresh(lab, 4) for _ in range(3))
        agree(function, linear, x, scale=a.clone(), shift=b.clone())
        agree(function, linear, x, shift=b, scale=a)
    assert states(function) == ["captured"]


def test_a_default_and_the_same_value_given_are_both_right(lab: Lab) -> None:
    def scaled(x: Tensor, factor: float = 2.0, *, shift: float = 1.0) -> Tensor:
        return x * factor + shift

    function = cgraph.graphed(scaled)
    for _ in range(2):
        agree(function, scaled, fresh(lab, 4))
        agree(function, scaled, fresh(lab, 4), 2.0)
        agree(function, scaled, fresh(lab, 4), factor=2.0, shift=1.0)
        agree(function, scaled, fresh(lab, 4), shift=5.0)
    assert set(states(function)) == {"captured"}


def test_variable_arguments_are_counted(lab: Lab) -> None:
    def total(*tensors: Tensor, **more: Tensor) -> Tensor:
        return torch.stack([*tensors, *more.values()]).sum(0)

    function = cgraph.graphed(total)
    for _ in range(2):
        for count in (1, 2, 3):
            agree(function, total, *(fresh(lab, 4) for _ in range(count)))
            agree(function, total, *(fresh(lab, 4) for _ in range(count)), extra=fresh(lab, 4))
    assert states(function) == ["captured"] * 6


MODES: dict[str, Callable[[str], AbstractContextManager[Any]]] = {
    "grad": lambda device: torch.enable_grad(),
    "no grad": lambda device: torch.no_grad(),
    "inference": lambda device: torch.inference_mode(),
    "bfloat16": lambda device: torch.autocast(device, torch.bfloat16),
    "float16": lambda device: torch.autocast(device, torch.float16),
    "autocast off": lambda device: torch.autocast(device, enabled=False),
}


@pytest.mark.parametrize("has_own_functions", [False, True])
def test_each_mode_of_torch_has_a_key(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, has_own_functions: bool
) -> None:
    assert {"is_grad_enabled", "is_inference", "is_autocast"} < set(_torch.mode_addresses())
    if not has_own_functions:
        monkeypatch.setattr(_torch, "mode_addresses", dict)

    def product(x: Tensor, y: Tensor) -> tuple[Tensor, bool, bool]:
        return x @ y, torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    function = cgraph.graphed(product)
    for _ in range(3):
        for mode in MODES.values():
            x, y = fresh(lab, 4, 4), fresh(lab, 4, 4)
            with mode(lab.device):
                found, expected = function(x, y), product(x, y)
                assert found[1:] == expected[1:]
                assert_close(found[0], expected[0])
                del found
    assert states(function) == ["captured"] * 5


def test_the_training_flag_of_a_module_and_of_its_parts_is_part_of_the_key(lab: Lab) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.part(x) + (1 if self.training else 2)

    net = Net()
    function = cgraph.graphed(lambda x: net(x))
    x = fresh(lab, 64)
    for _ in range(2):
        net.eval()
        assert_close(function(x), x + 2)
        net.train()
        torch.manual_seed(3)
        expected = net(x)
        torch.manual_seed(3)
        assert_close(function(x), expected)
        net.part.eval()
        assert_close(function(x), x + 1)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [(0, {}), (3, {}), (1, {"wrong": 1}), (2, {"x": 1}), (1, {})],
)
def test_wrong_arguments_raise_the_functions_own_error_and_the_next_call_works(
    lab: Lab, args: int, kwargs: dict[str, Any]
) -> None:
    def plus(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    function = cgraph.graphed(plus)
    for _ in range(2):
        with pytest.raises(TypeError) as expected:
            plus(*(fresh(lab, 3) for _ in range(args)), **kwargs)
        with pytest.raises(TypeError) as found:
            function(*(fresh(lab, 3) for _ in range(args)), **kwargs)
        assert str(found.value) == str(expected.value)
        agree(function, plus, fresh(lab, 3), fresh(lab, 3))


def test_a_function_gets_keywords_in_the_order_of_the_call(lab: Lab) -> None:
    def joined(x: Tensor, **parts: Tensor) -> Tensor:
        return torch.cat([x, *parts.values()])

    graphed = cgraph.graphed(joined)
    for _ in range(3):
        x, a, b = fresh(lab, 1), fresh(lab, 2), fresh(lab, 2)
        assert torch.equal(graphed(x=x, a=a, b=b), torch.cat([x, a, b]))
        assert torch.equal(graphed(b=b, x=x, a=a), torch.cat([x, b, a]))
    with misses() as seen:
        assert torch.equal(graphed(b=b, x=x, a=a), torch.cat([x, b, a]))
        assert torch.equal(graphed(x=x, a=a, b=b), torch.cat([x, a, b]))
    assert not seen and states(graphed) == ["captured"] * 2


def test_the_order_of_keywords_that_have_parameters_makes_no_keys(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda a, b, **rest: a - b * rest["c"])
    a, b, c = (fresh(lab, 2) for _ in range(3))
    assert torch.equal(graphed(a=a, b=b, c=c), a - b * c)
    assert torch.equal(graphed(c=c, b=b, a=a), a - b * c)
    assert states(graphed) == ["captured"]


def test_keywords_of_the_name_of_a_place_keep_their_order(lab: Lab) -> None:
    def joined(x: Tensor, /, **parts: Tensor) -> Tensor:
        return torch.cat([x, *parts.values()])

    graphed = cgraph.graphed(joined)
    for _ in range(2):
        a, b, c = fresh(lab, 1), fresh(lab, 2), fresh(lab, 2)
        assert torch.equal(graphed(a, x=b, y=c), torch.cat([a, b, c]))
        assert torch.equal(graphed(a, y=c, x=b), torch.cat([a, c, b]))


def test_a_wrapper_gets_keywords_in_the_order_of_the_call(lab: Lab) -> None:
    def difference(a: Tensor, b: Tensor) -> Tensor:
        return a - b

    @functools.wraps(difference)
    def joined(**parts: Tensor) -> Tensor:
        return torch.cat([difference(**parts), *parts.values()])

    graphed = cgraph.graphed(joined)
    for _ in range(2):
        a, b = fresh(lab, 2), fresh(lab, 2)
        assert torch.equal(graphed(a=a, b=b), torch.cat([a - b, a, b]))
        assert torch.equal(graphed(b=b, a=a), torch.cat([a - b, b, a]))


def test_without_gradients_an_argument_with_a_history_may_be_written(lab: Lab) -> None:
    def doubled(x: Tensor) -> Tensor:
        with torch.enable_grad():
            x.mul_(2)
        return x.detach() * 3

    for sizes in (None, [4]):
        graphed = cgraph.graphed(doubled, sizes=sizes)
        for _ in range(2):
            x = fresh(lab, 3).requires_grad_() * 1
            expected = x.detach() * 2
            with torch.no_grad():
                assert torch.equal(graphed(x), expected * 3)
            assert torch.equal(x, expected)
        assert "captured" in states(graphed)
