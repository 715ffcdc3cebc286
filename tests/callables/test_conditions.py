"""Surroundings of graphed callables: weights, hooks, autocast, gradients and transforms."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from cgraph import make_graphed_callables
from cgraph.errors import ArgumentError, CallableError, StateError
from lab import Lab, fresh


def net(lab: Lab) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).to(lab.device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int64])
def test_arguments_of_another_dtype_are_converted_as_copy_does(
    lab: Lab, dtype: torch.dtype
) -> None:
    module = net(lab)
    x = (fresh(lab, 5, 4) * 8).to(dtype)
    with torch.no_grad():
        expected = module(x.float())
    graphed = make_graphed_callables(module, (fresh(lab, 5, 4),))
    assert_close(graphed(x), expected)


def test_the_gradient_of_a_converted_argument_has_its_dtype(lab: Lab) -> None:
    module = net(lab)
    x = fresh(lab, 5, 4).half().requires_grad_()
    module(x.float()).sum().backward()
    assert x.grad is not None
    right, x.grad = x.grad, None
    graphed = make_graphed_callables(module, (fresh(lab, 5, 4).requires_grad_(),))
    graphed(x).sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float16
    assert_close(x.grad, right)


def test_arguments_of_the_host_are_converted_and_shapes_that_broadcast_are_refused(
    lab: Lab,
) -> None:
    graphed = make_graphed_callables(torch.sin, (fresh(lab, 4),))
    x = torch.randn(4)
    assert_close(graphed(x), x.sin().to(lab.device))
    with pytest.raises(ArgumentError, match="expected"):
        graphed(torch.randn(1, dtype=torch.float64))


def test_hooks_of_parameters_and_arguments_run_once_in_each_backward_pass(lab: Lab) -> None:
    module, x = net(lab), fresh(lab, 5, 4)
    counts: list[int] = []

    def doubled(grad: Tensor) -> Tensor:
        counts.append(1)
        return grad * 2

    module[0].weight.register_hook(doubled)
    module(x).sum().backward()
    right = [one.grad for one in module.parameters()]
    module.zero_grad(set_to_none=True)
    counts.clear()
    sample = fresh(lab, 5, 4).requires_grad_()
    sample.register_hook(doubled)
    graphed = make_graphed_callables(module, (sample,))
    assert counts == []
    graphed(x).sum().backward()
    assert len(counts) == 1
    for one, grad in zip(module.parameters(), right, strict=True):
        assert_close(one.grad, grad)


def assigned(module: Any, other: Any) -> str:
    module.load_state_dict(other.state_dict(), assign=True)
    return "0.weight"


def part(module: Any, other: Any) -> str:
    module[2] = other[2]
    return "submodule 2"


def data(module: Any, other: Any) -> str:
    module[2].bias.data = other[2].bias.data
    return "2.bias"


def halved(module: Any, other: Any) -> str:
    module.half()
    return "0.weight"


def swapped(module: Any, other: Any) -> str:
    torch.utils.swap_tensors(module[0].bias, other[0].bias)
    return "0.bias"


def activation(module: Any, other: Any) -> str:
    module[1] = nn.ReLU()
    return "submodule 1"


def added(module: Any, other: Any) -> str:
    module[1].register_buffer("shift", other[2].bias.data)
    return "1.shift"


@pytest.mark.parametrize("change", [assigned, part, data, halved, swapped, activation, added])
@pytest.mark.parametrize("grad", [True, False])
def test_a_module_whose_weights_or_parts_were_replaced_is_refused_by_name(
    lab: Lab, change: Callable[[Any, Any], str], grad: bool
) -> None:
    module, x = net(lab), fresh(lab, 5, 4)
    with torch.set_grad_enabled(grad):
        graphed = make_graphed_callables(module, (fresh(lab, 5, 4),))
        assert_close(graphed(x), module[2](module[1](module[0](x))))
        name = change(module, net(lab))
        with pytest.raises(StateError, match=rf"{re.escape(name)} of Sequential was replaced"):
            graphed(x)


def test_functional_call_with_other_weights_is_refused_and_the_next_call_is_right(
    lab: Lab,
) -> None:
    module, x = net(lab), fresh(lab, 5, 4)
    with torch.no_grad():
        graphed = make_graphed_callables(module, (fresh(lab, 5, 4),))
        with pytest.raises(StateError, match=r"0\.weight of Sequential was replaced"):
            torch.func.functional_call(module, dict(net(lab).named_parameters()), (x,))
        assert_close(graphed(x), module[2](module[1](module[0](x))))


def test_weights_that_are_written_in_place_or_frozen_are_those_of_the_call(lab: Lab) -> None:
    module, other, x = net(lab), net(lab), fresh(lab, 5, 4)
    graphed = make_graphed_callables(module, (fresh(lab, 5, 4),))
    module.load_state_dict(other.state_dict())
    assert_close(graphed(x), other(x))
    module.requires_grad_(False)
    assert_close(graphed(x), other(x))


class Counting(nn.Module):
    """Replaces a buffer in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return x + self.count


@pytest.mark.parametrize("preserve", [True, False])
def test_a_forward_that_replaces_a_buffer_is_refused_by_name_and_the_buffer_comes_back(
    lab: Lab, preserve: bool
) -> None:
    module = Counting().to(lab.device)
    before, x = module.count, fresh(lab, 4)
    with pytest.raises(CallableError, match="Counting replaces count"):
        make_graphed_callables(module, (fresh(lab, 4),), preserve_state=preserve)
    assert module.count is before and not before.any()
    assert_close(module(x), x + 1)


def under_autocast(lab: Lab) -> Any:
    return torch.autocast(lab.device, dtype=torch.bfloat16, cache_enabled=False)


def test_a_call_under_another_autocast_than_the_capture_is_refused(lab: Lab) -> None:
    x = fresh(lab, 5, 4)
    graphed = make_graphed_callables(net(lab), (fresh(lab, 5, 4),))
    with under_autocast(lab), pytest.raises(CallableError, match=r"without autocast .*bfloat16"):
        graphed(x)
    assert graphed(x).dtype == torch.float32
    with under_autocast(lab):
        graphed = make_graphed_callables(net(lab), (fresh(lab, 5, 4),))
        assert graphed(x).dtype == torch.bfloat16
    with pytest.raises(CallableError, match="bfloat16 and is called without autocast"):
        graphed(x)


@pytest.mark.parametrize("is_module", [False, True])
def test_a_callable_captured_without_gradients_runs_as_it_was_where_there_are_some(
    lab: Lab, is_module: bool
) -> None:
    module, twin = net(lab), net(lab)
    twin.load_state_dict(module.state_dict())
    function = module if is_module else lambda x: module(x)
    with torch.no_grad():
        graphed = make_graphed_callables(function, (fresh(lab, 5, 4),))
        x = fresh(lab, 5, 4)
        assert_close(graphed(x), twin(x))
    x = fresh(lab, 5, 4).requires_grad_(not is_module)
    other = x.detach().clone().requires_grad_(not is_module)
    graphed(x).square().sum().backward()
    twin(other).square().sum().backward()
    pairs = zip(module.parameters(), twin.parameters(), strict=True)
    for one, right in [(x, other)] if not is_module else pairs:
        assert_close(one.grad, right.grad)


def test_a_result_that_is_written_is_refused_where_the_backward_pass_reads_it(lab: Lab) -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.Sigmoid()).to(lab.device)
    x = fresh(lab, 5, 4)
    graphed = make_graphed_callables(module, (fresh(lab, 5, 4),))
    result = graphed(x)
    result.mul_(2)
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        result.sum().backward()
    graphed(x).sum().backward()


def test_a_result_that_no_backward_pass_reads_may_be_written(lab: Lab) -> None:
    module, x = nn.Linear(4, 3).to(lab.device), fresh(lab, 5, 4)
    module(x).mul_(2).sum().backward()
    right = module.weight.grad
    module.zero_grad(set_to_none=True)
    graphed = make_graphed_callables(module, (fresh(lab, 5, 4),))
    graphed(x).mul_(2).sum().backward()
    assert_close(module.weight.grad, right)


def test_a_transform_around_a_graphed_callable_is_refused_with_the_way_out(lab: Lab) -> None:
    graphed = make_graphed_callables(lambda x: torch.tanh(x).sum(-1), (fresh(lab, 3, 5),))
    x = fresh(lab, 3, 5)
    for run in (
        lambda: torch.func.grad(lambda v: graphed(v).sum())(x),
        lambda: torch.func.vmap(graphed)(torch.stack([x, x])),
        lambda: torch.func.jvp(graphed, (x,), (x,)),
    ):
        with pytest.raises(CallableError, match=r"transform of torch.func .*call the function"):
            run()
    assert_close(graphed(x), torch.tanh(x).sum(-1))
