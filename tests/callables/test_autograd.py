"""Gradients of graphed callables."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import cgraph
from cgraph import graph_pool_handle, make_graphed_callables
from cgraph.errors import StateError
from lab import Lab, fresh
from networks import LAYOUTS, leaf, network


class Block(nn.Module):
    """A module with temporary memory, which gradients captured later may get."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            shift = x.exp().sin().mean()
        return self.second(self.first(x).tanh()) + shift


class Identity(torch.autograd.Function):
    """A function that marks its second output as not differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        rounded = x.round()
        ctx.mark_non_differentiable(rounded)
        return x.clone(), rounded

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Tensor:
        return grad * 3


def pair(lab: Lab, build: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    module = build().to(lab.device)
    return module, copy.deepcopy(module)


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in module.parameters()]


def test_gradients_of_arguments_and_parameters_equal_eager(lab: Lab) -> None:
    module, eager = pair(lab, lambda: network(lab))
    make_graphed_callables(module, (leaf(lab, 4, 6),))
    for _ in range(3):
        x, y = leaf(lab, 4, 6), fresh(lab, 4, 3)
        z = x.detach().clone().requires_grad_()
        for one, given in ((module, x), (eager, z)):
            one.zero_grad()
            (one(given) - y).square().mean().backward()
        assert_close(x.grad, z.grad)
        assert_close(gradients(module), gradients(eager))


@pytest.mark.parametrize("optimiser", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_ten_steps_of_training_with_dropout_equal_eager(
    lab: Lab, optimiser: Any, set_to_none: bool
) -> None:
    module, eager = pair(
        lab, lambda: network(lab, nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 8))
    )
    make_graphed_callables(module, (fresh(lab, 16, 6),), preserve_state=True)
    batches = [(fresh(lab, 16, 6), fresh(lab, 16, 3)) for _ in range(10)]
    losses = []
    for one in (module, eager):
        torch.manual_seed(17)
        steps, found = optimiser(one.parameters(), lr=1e-2), []
        for x, y in batches:
            steps.zero_grad(set_to_none=set_to_none)
            loss = (one(x) - y).square().mean()
            loss.backward()
            steps.step()
            found.append(loss.detach().clone())
        losses.append(torch.stack(found))
    assert_close(*losses, rtol=1e-4, atol=1e-5)
    assert_close(list(module.parameters()), list(eager.parameters()), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("zeroed", ["never", "zero", "none"])
def test_gradients_accumulate_over_calls_of_several_callables_as_in_eager(
    lab: Lab, zeroed: str, count: int
) -> None:
    blocks, eager = pair(lab, lambda: nn.Sequential(*(Block() for _ in range(count))))
    make_graphed_callables(tuple(blocks), tuple((leaf(lab, 5, 6),) for _ in range(count)))
    x, z = leaf(lab, 5, 6), leaf(lab, 5, 6)
    z.data.copy_(x.data)
    for step in range(5):
        if step == 3 and zeroed != "never":
            for one in (blocks, eager):
                one.zero_grad(set_to_none=zeroed == "none")
            x.grad = z.grad = None
        with torch.no_grad():
            x.normal_()
            z.copy_(x)
        blocks(x).square().sum().backward()
        eager(z).square().sum().backward()
        with torch.no_grad():
            blocks(fresh(lab, 5, 6))  # an evaluation between backward and the use of gradients
        assert_close(gradients(blocks), gradients(eager), rtol=1e-4, atol=1e-4)
        assert_close(x.grad, z.grad, rtol=1e-4, atol=1e-4)


def test_gradients_accumulate_where_callables_were_graphed_one_by_one_into_a_pool(
    lab: Lab,
) -> None:
    blocks, eager = pair(lab, lambda: nn.Sequential(Block(), Block()))
    handle = graph_pool_handle()
    for block in blocks:
        make_graphed_callables(block, (leaf(lab, 5, 6),), pool=handle)
    for _ in range(3):
        x = fresh(lab, 5, 6)
        for one in (blocks, eager):
            for block in one:
                block(x).square().sum().backward()
        assert_close(gradients(blocks), gradients(eager), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("operator", ["view", "add", "transpose", "graphed"])
def test_gradients_that_pass_on_unchanged_to_a_leaf_accumulate_as_in_eager(
    lab: Lab, operator: str
) -> None:
    before: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "view": lambda x, p: p.view(4, 6),
        "add": lambda x, p: x + p.view_as(x) if p.shape != x.shape else x + p,
        "transpose": lambda x, p: p.view(6, 4).t(),
        "graphed": lambda x, p: p.view(4, 6),
    }
    shape = (4, 6) if operator == "add" else (24,)
    module, eager = pair(lab, lambda: network(lab))
    samples = before[operator](fresh(lab, 4, 6), leaf(lab, *shape))
    make_graphed_callables(module, (samples.detach().requires_grad_(),))
    first: Any = before[operator]
    if operator == "graphed":
        first = make_graphed_callables(first, (fresh(lab, 4, 6), leaf(lab, *shape)))
    p, q = leaf(lab, *shape), leaf(lab, *shape)
    q.data.copy_(p.data)
    for _ in range(3):
        x = fresh(lab, 4, 6)
        module(first(x, p)).square().sum().backward()
        eager(before[operator](x, q)).square().sum().backward()
        assert_close(p.grad, q.grad)


def test_one_gradient_for_two_leaves_is_in_two_places(lab: Lab) -> None:
    graphed = make_graphed_callables(lambda x, y: x + y, (leaf(lab, 4), leaf(lab, 4)))
    for _ in range(2):
        x, y, weight = leaf(lab, 4), leaf(lab, 4), fresh(lab, 4)
        (graphed(x, y) * weight).sum().backward()
        x.grad.mul_(0.5)
        assert_close(x.grad, weight * 0.5)
        assert_close(y.grad, weight)
        y.grad.fill_(float("nan"))


def test_a_gradient_from_another_operator_adds_to_the_graphed_one(lab: Lab) -> None:
    module, eager = pair(lab, lambda: network(lab))
    make_graphed_callables(module, (leaf(lab, 4, 6),))
    weight, other = module[0].weight, eager[0].weight
    for _ in range(3):
        x = fresh(lab, 4, 6)
        y = x.clone().requires_grad_()
        z = x.clone().requires_grad_()
        (module(y).sum() + (weight * 3).sum() + (y * y).sum()).backward()
        (eager(z).sum() + (other * 3).sum() + (z * z).sum()).backward()
        assert_close(gradients(module), gradients(eager))
        assert_close(y.grad, z.grad)


def test_a_parameter_of_two_callables_gets_both_gradients(lab: Lab) -> None:
    def build() -> nn.Module:
        first, second = Block(), Block()
        second.first = first.first
        return nn.Sequential(first, second)

    blocks, eager = pair(lab, build)
    make_graphed_callables(tuple(blocks), ((leaf(lab, 5, 6),), (leaf(lab, 5, 6),)))
    for step in range(4):
        x = fresh(lab, 5, 6)
        for one in (blocks, eager):
            (one(x) if step % 2 else one[0](x)).square().sum().backward()
        assert_close(gradients(blocks), gradients(eager), rtol=1e-4, atol=1e-4)


def test_parameters_frozen_after_the_capture_keep_their_gradients(lab: Lab) -> None:
    module, eager = pair(lab, lambda: network(lab))
    make_graphed_callables(module, (fresh(lab, 4, 6),))
    for frozen in (False, True, True, False):
        x = fresh(lab, 4, 6)
        for one in (module, eager):
            one[0].requires_grad_(not frozen)
            one(x).square().sum().backward()
        assert_close(gradients(module), gradients(eager))
    module.requires_grad_(False)
    assert not module(fresh(lab, 4, 6)).requires_grad


def test_parameters_frozen_before_the_capture_get_none_and_a_warning_when_they_want_one(
    lab: Lab,
) -> None:
    module, eager = pair(lab, lambda: network(lab))
    for one in (module, eager):
        one[0].requires_grad_(False)
    make_graphed_callables(module, (leaf(lab, 4, 6),))
    x = fresh(lab, 4, 6)
    for one in (module, eager):
        one(x).square().sum().backward()
    assert_close(gradients(module)[2:], gradients(eager)[2:])
    module[0].requires_grad_(True)
    with pytest.warns(UserWarning, match="a parameter of Sequential requires a gradient"):
        module(x).sum().backward()
    module(x)
    assert module[0].weight.grad is None


def test_an_argument_that_wants_a_gradient_unlike_its_sample_is_warned_of_once(
    lab: Lab,
) -> None:
    module = network(lab)
    make_graphed_callables(module, (fresh(lab, 4, 6),))
    x = leaf(lab, 4, 6)
    with torch.no_grad():
        module(x)
    with pytest.warns(UserWarning, match="an argument of Sequential requires") as caught:
        module(x).sum().backward()
    assert caught[0].filename == __file__
    assert x.grad is None
    module(x)


def test_an_argument_without_gradient_unlike_its_sample_gets_none(lab: Lab) -> None:
    graphed = make_graphed_callables(lambda x, y: x * y, (leaf(lab, 4), leaf(lab, 4)))
    x, y = leaf(lab, 4), fresh(lab, 4)
    graphed(x, y).sum().backward()
    assert_close(x.grad, y)
    assert y.grad is None
    assert not graphed(x.detach(), y).requires_grad


def test_an_unused_argument_is_an_error_or_gets_none(lab: Lab) -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return x * 2

    samples = leaf(lab, 4), leaf(lab, 4)
    with pytest.raises(RuntimeError, match="not have been used") as caught:
        make_graphed_callables(function, samples)
    assert "allow_unused_input=True" in caught.value.__notes__[0]
    graphed = make_graphed_callables(function, samples, allow_unused_input=True)
    x, y, weight = leaf(lab, 4), leaf(lab, 4), fresh(lab, 4)
    (graphed(x, y) * weight).sum().backward()
    assert_close(x.grad, weight * 2)
    assert y.grad is None


def test_outputs_without_gradient_are_constants_of_autograd(lab: Lab) -> None:
    def function(x: Tensor) -> tuple[Any, ...]:
        return x.argsort(), 3, *Identity.apply(x), x.detach(), None, x * x

    graphed = make_graphed_callables(function, (leaf(lab, 6),))
    x = leaf(lab, 6)
    results, expected = graphed(x), function(x)
    for mine, other in zip(results, expected, strict=True):
        assert type(mine) is type(other)
        if isinstance(other, Tensor):
            assert mine.requires_grad == other.requires_grad
            assert_close(mine, other)
    weight = fresh(lab, 6)
    (found,) = torch.autograd.grad((results[2] * weight).sum() + results[-1].sum(), x)
    assert_close(found, weight * 3 + 2 * x)


def test_an_output_that_the_loss_does_not_use_counts_as_zero(lab: Lab) -> None:
    graphed = make_graphed_callables(lambda x: (x * 2, x * 5), (leaf(lab, 4),))
    for used in (0, 1, 0):
        x, weight = leaf(lab, 4), fresh(lab, 4)
        (graphed(x)[used] * weight).sum().backward()
        assert_close(x.grad, weight * (2, 5)[used])
    x = leaf(lab, 4)
    first, second = graphed(x)
    (first.sum() + second.sum()).backward()
    assert_close(x.grad, torch.full_like(x, 7.0))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_gradients_of_any_strides_are_right(lab: Lab, layout: Callable[[Tensor], Tensor]) -> None:
    graphed = make_graphed_callables(torch.sin, (leaf(lab, 4, 6),))
    for _ in range(2):
        x, grad = leaf(lab, 4, 6), layout(fresh(lab, 4, 6))
        graphed(x).backward(grad)
        assert_close(x.grad, grad * x.cos())
    x = leaf(lab, 4, 6)
    graphed(x).sum().backward()
    assert_close(x.grad, x.cos())
    x.grad = None
    graphed(x.t().contiguous().t()).t()[::2].square().sum().backward()
    y = x.detach().requires_grad_()
    y.sin().t()[::2].square().sum().backward()
    assert_close(x.grad, y.grad)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_gradients_of_reductions_and_views_are_right_and_dense(lab: Lab) -> None:
    for function in (torch.sum, lambda x: x.t(), lambda x: x[1:3], lambda x: x.expand(2, 4, 6)):
        graphed = make_graphed_callables(function, (leaf(lab, 4, 6),))
        for _ in range(2):
            x = leaf(lab, 4, 6)
            y = x.detach().requires_grad_()
            result, expected = graphed(x), function(y)
            grad = torch.randn(expected.shape, device=lab.device)
            result.backward(grad)
            expected.backward(grad)
            assert_close(result, expected)
            assert_close(x.grad, y.grad)


def test_complex_inputs_outputs_and_gradients_are_right(lab: Lab) -> None:
    def function(z: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return z * w, z.conj() * 2, (z * w).abs()

    def value() -> Tensor:
        return torch.randn(4, dtype=torch.complex64, device=lab.device).requires_grad_()

    graphed = make_graphed_callables(function, (value(), value()))
    for _ in range(2):
        z, w = value(), value()
        found = []
        for one in (graphed, function):
            a, b, c = one(z, w.conj())
            loss = (a.conj() * b).real.sum() + (c * a.imag).sum()
            found.append(torch.autograd.grad(loss, (z, w)))
        assert_close(*found)


def test_hooks_and_retained_gradients_of_inputs_work(lab: Lab) -> None:
    graphed = make_graphed_callables(torch.sin, (leaf(lab, 4),))
    for _ in range(2):
        x, seen = leaf(lab, 4), []
        y = x * 1
        y.retain_grad()
        x.register_hook(lambda grad: grad * 10)
        y.register_hook(lambda grad, seen=seen: seen.append(grad.clone()))
        result = graphed(y)
        result.retain_grad()
        result.square().sum().backward()
        expected = 2 * x.sin() * x.cos()
        assert_close(y.grad, expected)
        assert_close(seen, [expected])
        assert_close(x.grad, expected * 10)
        assert_close(result.grad, 2 * x.sin())


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("clone", [True, False])
def test_a_second_derivative_is_refused(lab: Lab, clone: bool) -> None:
    graphed = make_graphed_callables(torch.sin, (leaf(lab, 4),), clone_outputs=clone)
    x = leaf(lab, 4)
    (grad,) = torch.autograd.grad(graphed(x).sum(), x, create_graph=True)
    assert_close(grad, x.cos())
    with pytest.raises(StateError, match=r"double backward through .*sin"):
        grad.square().sum().backward()
    (grad,) = torch.autograd.grad(graphed(x).sum(), x, create_graph=True)
    with pytest.raises(StateError, match=r"double backward through .*sin"):
        torch.autograd.grad(grad.sum(), x, allow_unused=True)
    graphed(x).square().sum().backward(create_graph=True)
    with pytest.raises(StateError, match=r"double backward through .*sin"):
        torch.autograd.grad(x.grad.sum(), x)
    x.grad = None


def test_a_second_backward_through_one_call_is_refused(lab: Lab) -> None:
    graphed = make_graphed_callables(torch.sin, (leaf(lab, 4),))
    x = leaf(lab, 4)
    loss = graphed(x).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(StateError, match=r"for the second time through one call of .*sin"):
        loss.backward()
    graphed(x).sum().backward()


def test_backward_through_an_older_call_is_refused(lab: Lab) -> None:
    graphed = make_graphed_callables(torch.sin, (leaf(lab, 4),))
    x, y = leaf(lab, 4), leaf(lab, 4)
    older, newer = graphed(x).sum(), graphed(y).sum()
    with pytest.raises(StateError, match=r"through an older call of .*sin: later replays"):
        older.backward()
    newer.backward()
    assert_close(y.grad, y.cos())
    older = graphed(x).sum()
    with torch.no_grad():
        graphed(y)
    with pytest.raises(StateError, match="older call"):
        older.backward()


def test_another_order_than_that_of_the_captures_is_refused_or_right(lab: Lab) -> None:
    blocks, eager = pair(lab, lambda: nn.ModuleList([Block(), Block()]))
    make_graphed_callables(tuple(blocks), ((leaf(lab, 5, 6),), (leaf(lab, 5, 6),)))
    x = fresh(lab, 5, 6)
    first, second = blocks[0](x).sum(), blocks[1](x).sum()
    first.backward()
    with pytest.raises(StateError, match="in the order in which they were given"):
        second.backward()
    late = blocks[1](x).sum()
    blocks[0](x)
    with pytest.raises(StateError, match="in the order in which they were given"):
        late.backward()
    # One after the other, each with its backward pass, is fine.
    blocks.zero_grad()
    for _ in range(2):
        for mine, other in zip(reversed(blocks), reversed(eager), strict=True):
            mine(x).square().sum().backward()
            other(x).square().sum().backward()
    assert_close(gradients(blocks), gradients(eager), rtol=1e-4, atol=1e-4)


def test_graphing_leaves_gradients_alone(lab: Lab) -> None:
    module, x = network(lab), leaf(lab, 4, 6)
    make_graphed_callables(module, (x,))
    assert x.grad is None
    assert all(grad is None for grad in gradients(module))


def test_a_gradient_of_only_some_arguments_can_be_asked_for(lab: Lab) -> None:
    graphed = make_graphed_callables(torch.mul, (leaf(lab, 4), leaf(lab, 4)))
    x, y = leaf(lab, 4), leaf(lab, 4)
    (found,) = torch.autograd.grad(graphed(x, y).sum(), y)
    assert_close(found, x)
    assert x.grad is None


def test_a_result_may_be_changed_in_place(lab: Lab) -> None:
    graphed = make_graphed_callables(torch.sin, (leaf(lab, 4),))
    for _ in range(2):
        x = leaf(lab, 4)
        result = graphed(x)
        result.mul_(3)
        result.sum().backward()
        assert_close(x.grad, 3 * x.cos())


def test_a_second_derivative_by_an_argument_that_is_no_leaf_is_refused(lab: Lab) -> None:
    graphed = cgraph.graphed(lambda x: (x**3).sum())
    graphed(fresh(lab, 3).requires_grad_() * 1)  # an eager call has the second derivative
    with pytest.raises(StateError, match="double backward"):
        torch.autograd.functional.hessian(graphed, fresh(lab, 3))  # type: ignore[no-untyped-call]
    leaf = fresh(lab, 3).requires_grad_()
    (slope,) = torch.autograd.grad(graphed(leaf * 1), leaf, create_graph=True)
    assert_close(slope, 3 * leaf.detach() ** 2)
    with pytest.raises(StateError, match="double backward"):
        torch.autograd.grad(slope.sum(), leaf, allow_unused=True)
