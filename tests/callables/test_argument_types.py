"""Arguments of graphed callables."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from cgraph import make_graphed_callables
from cgraph.errors import ArgumentError
from lab import Lab, fresh
from networks import LAYOUTS, leaf, network


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


def test_arguments_may_be_nested_in_containers(lab: Lab) -> None:
    def function(pair: Pair, rest: dict[str, list[Tensor]]) -> Tensor:
        return pair.first * pair.second + sum(rest["all"])

    def arguments() -> tuple[Any, ...]:
        tensors = [fresh(lab, 5) for _ in range(5)]
        return Pair(*tensors[:2]), {"all": tensors[2:]}

    graphed = make_graphed_callables(function, arguments())
    for _ in range(3):
        given = arguments()
        assert_close(graphed(*given), function(*given))


def test_values_that_are_no_tensors_are_constants(lab: Lab) -> None:
    def function(x: Tensor, factor: int, mode: str | None, extra: Any) -> Tensor:
        return x * factor if mode is None else x + factor

    nan = float("nan")
    graphed = make_graphed_callables(function, (fresh(lab, 4), 3, None, nan))
    x = fresh(lab, 4)
    assert_close(graphed(x, 3, None, nan), x * 3)
    with pytest.raises(AssertionError, match=r"args\[1\].* is 4, expected 3"):
        graphed(x, 4, None, nan)
    with pytest.raises(ArgumentError, match=r"args\[1\].* is 3.0, expected 3"):
        graphed(x, 3.0, None, nan)
    with pytest.raises(ArgumentError, match=r"args\[2\].* is 'add', expected None"):
        graphed(x, 3, "add", nan)


def test_a_container_among_as_many_arguments_as_tensors_is_asked_for(lab: Lab) -> None:
    def function(pair: list[Tensor], factor: int) -> Tensor:
        return (pair[0] - pair[1]) * factor

    graphed = make_graphed_callables(function, ([fresh(lab, 4), fresh(lab, 4)], 2))
    a, b = fresh(lab, 4), fresh(lab, 4)
    assert_close(graphed([a, b], 2), (a - b) * 2)
    with pytest.raises(ArgumentError, match="called with 2 values in another order or container"):
        graphed(a, b)


def test_keyword_arguments_of_the_sample_come_in_any_order(lab: Lab) -> None:
    def function(x: Tensor, *, scale: Tensor, shift: Tensor, mode: str = "mul") -> Tensor:
        return x * scale + shift if mode == "mul" else x

    graphed = make_graphed_callables(
        function,
        (fresh(lab, 4),),
        sample_kwargs={"shift": fresh(lab, 4), "scale": fresh(lab, 4), "mode": "mul"},
    )
    x, a, b = fresh(lab, 4), fresh(lab, 4), fresh(lab, 4)
    assert_close(graphed(x, scale=a, shift=b, mode="mul"), x * a + b)
    assert_close(graphed(x, mode="mul", shift=a, scale=b), x * b + a)
    for kwargs in ({"scale": a}, {"scale": a, "shift": b}, {}):
        with pytest.raises(ArgumentError, match=r"missing .*kwargs\['mode'\]"):
            graphed(x, **kwargs)
    with pytest.raises(TypeError, match=r"not expected .*kwargs\['bias'\]") as caught:
        graphed(x, scale=a, shift=b, mode="mul", bias=a)
    assert isinstance(caught.value, ArgumentError)
    with pytest.raises(ArgumentError, match=r"not expected .*kwargs\['more'\]"):
        graphed(x, scale=a, shift=b, mode="mul", more=a)
    with pytest.raises(ArgumentError, match=r"kwargs\['scale'\].* is 2.0, expected a tensor"):
        graphed(x, scale=2.0, shift=b, mode="mul")


def test_sample_kwargs_of_several_callables_are_a_tuple(lab: Lab) -> None:
    def function(x: Tensor, *, y: Tensor) -> Tensor:
        return x - y

    first, second = make_graphed_callables(
        (function, torch.sin),
        ((fresh(lab, 4),), (fresh(lab, 2),)),
        sample_kwargs=({"y": fresh(lab, 4)}, None),
    )
    x, y = fresh(lab, 4), fresh(lab, 4)
    assert_close(first(x, y=y), x - y)
    assert_close(second(x[:2]), x[:2].sin())


def test_keywords_work_in_the_graphed_and_the_eager_mode_of_a_module(lab: Lab) -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
            return x * scale

    module = make_graphed_callables(
        Scaled(), (fresh(lab, 4),), sample_kwargs={"scale": fresh(lab, 4)}
    )
    x, scale = fresh(lab, 4), fresh(lab, 4)
    assert_close(module(x, scale=scale), x * scale)
    assert_close(module.eval()(x, scale=scale), x * scale)


def test_the_sample_itself_is_not_copied_and_other_tensors_are(lab: Lab) -> None:
    sample = fresh(lab, 8)
    graphed = make_graphed_callables(torch.sin, (sample,))
    sample.normal_()
    assert_close(graphed(sample), sample.sin())
    x = fresh(lab, 8)
    assert_close(graphed(x), x.sin())
    assert_close(sample, x)


def test_a_view_with_the_address_of_the_sample_is_right_or_refused(lab: Lab) -> None:
    sample = fresh(lab, 4, 4)
    graphed = make_graphed_callables(torch.cumsum, (sample,), sample_kwargs={"dim": 1})
    sample.normal_()
    turned = sample.t()
    expected = turned.clone().cumsum(1)
    assert turned.data_ptr() == sample.data_ptr()
    with pytest.raises(RuntimeError, match=r"clone\(\)"):
        graphed(turned, dim=1)
    assert_close(graphed(turned.clone(), dim=1), expected)
    sample.normal_()
    for other in (sample[:2], sample.view(16), sample.view(2, 8)):
        assert other.data_ptr() == sample.data_ptr()
        with pytest.raises(ArgumentError, match=r"expected a torch.float32 tensor of shape"):
            graphed(other, dim=1)
    numbers = sample.view(torch.int32)
    expected = numbers.float().cumsum(1)
    assert_close(graphed(numbers, dim=1), expected)


@pytest.mark.parametrize("shape", [(1, 6), (6,), (), (4, 1), (1,), (4, 6, 1), (2, 4, 6), (3, 6)])
def test_shapes_that_would_broadcast_are_refused(lab: Lab, shape: tuple[int, ...]) -> None:
    graphed = make_graphed_callables(torch.sin, (fresh(lab, 4, 6),))
    with pytest.raises(ArgumentError, match=r"argument 0 .*expected .*\[4, 6\]") as caught:
        graphed(torch.randn(shape, device=lab.device))
    assert "args[0]" in caught.value.__notes__[0]
    x = fresh(lab, 4, 6)
    assert_close(graphed(x), x.sin())


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("sampled", LAYOUTS.values(), ids=LAYOUTS)
def test_inputs_and_samples_of_any_strides_give_the_right_result(
    lab: Lab, layout: Callable[[Tensor], Tensor], sampled: Callable[[Tensor], Tensor]
) -> None:
    module = network(lab)
    eager = copy.deepcopy(module)
    make_graphed_callables(module, (sampled(fresh(lab, 4, 6)),))
    x = layout(fresh(lab, 4, 6))
    assert_close(module(x), eager(x))


def test_a_tensor_that_is_two_samples_stands_for_two_arguments(lab: Lab) -> None:
    x = leaf(lab, 3, 3)

    def function(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return a @ b - c

    graphed = make_graphed_callables(function, (x, x, x.detach()[:2][:1]))
    for a, b in [(leaf(lab, 3, 3), leaf(lab, 3, 3))] * 2 + [(y := leaf(lab, 3, 3), y)]:
        c = fresh(lab, 1, 3)
        found = torch.autograd.grad(graphed(a, b, c).square().sum(), {a, b})
        expected = torch.autograd.grad(function(a, b, c).square().sum(), {a, b})
        assert_close(found, expected)


def test_a_parameter_as_argument_is_differentiated_once(lab: Lab) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(fresh(lab, 4))

        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            return x * weight + self.weight

    module = Tied()
    eager = copy.deepcopy(module)
    make_graphed_callables(module, (fresh(lab, 4), module.weight))
    x = fresh(lab, 4)
    for one in (module, eager):
        one(x, one.weight).square().sum().backward()
    assert_close(module.weight.grad, eager.weight.grad)
