"""Debug calls of keys with gradients: both passes compared with eager, the forward in steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cgraph.errors import CompareError, StateError
from debug_calls import MANY, Unseen, equal, graphed, line_of
from lab import Lab, SimLab, fresh


@pytest.mark.parametrize("debug", MANY)
def test_with_gradients_results_and_gradients_equal_eager(lab: Lab, debug: str) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).to(lab.device)
    run = graphed(module, debug)
    for _ in range(3):
        x = fresh(lab, 4, 8)
        run(x).square().sum().backward()
        found = [one.grad for one in module.parameters()]
        module.zero_grad()
        module(x).square().sum().backward()
        assert equal(found, [one.grad for one in module.parameters()])
        module.zero_grad()


def test_a_forward_pass_that_differs_is_found_with_gradients(lab: Lab) -> None:
    module, by = nn.Linear(8, 8).to(lab.device), Unseen(1.0)

    def forward(x: Tensor) -> Tensor:
        return module(x) * by[0]  # scaled

    run, x = graphed(forward, "compare"), fresh(lab, 4, 8)
    run(x)
    run(x)
    by[0] = 3.0
    with pytest.raises(CompareError, match="forward") as caught:
        run(x)
    assert "aten.mul.Tensor" in str(caught.value.operator)
    assert line_of(__file__, "module(x) * by[0]  # scaled") in str(caught.value.operator)


def test_a_padded_forward_pass_that_differs_is_found_with_gradients(lab: Lab) -> None:
    module, by = nn.Linear(8, 8).to(lab.device), Unseen(1.0)
    run = graphed(lambda x: module(x) * by[0], "compare", sizes=[4])
    x = fresh(lab, 3, 8)
    assert equal(run(x), module(x))
    assert equal(run(x), module(x))
    by[0] = 3.0
    with pytest.raises(CompareError, match=r"padded from 3 rows differs from eager: output 0"):
        run(x)


class Scaled(torch.autograd.Function):
    """A doubling function with a backward pass that can be changed."""

    by = Unseen(2.0)

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * Scaled.by[0]


@pytest.fixture
def backward_by() -> Iterator[Any]:
    """Set the factor of gradients in the ``with`` block; it is 2 again afterwards."""

    def change(by: float) -> None:
        Scaled.by[0] = by

    yield change
    change(2.0)


@pytest.mark.parametrize("named", ["x", "weight"])
def test_a_backward_pass_that_differs_is_found_and_the_gradient_named(
    lab: Lab, backward_by: Any, named: str
) -> None:
    module = nn.Linear(4, 4).to(lab.device)

    def body(x: Tensor) -> Tensor:
        return module(Scaled.apply(x)) if named == "x" else Scaled.apply(module(x))

    run, x = graphed(body, "compare"), fresh(lab, 3, 4).requires_grad_(named == "x")
    for _ in range(2):
        run(x).sum().backward()
    backward_by(5.0)
    with pytest.raises(CompareError, match="the backward pass") as caught:
        run(x).sum().backward()
    assert caught.value.output == f"the gradient of {named}"
    backward_by(2.0)
    wanted = [one for one in (x, *module.parameters()) if one.requires_grad]
    found = torch.autograd.grad(run(x).sum(), wanted)
    assert equal(found, torch.autograd.grad(body(x).sum(), wanted))


class Odd(nn.Module):
    """A module that draws, counts, leaves a parameter unused and returns extra values."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.4))
        self.idle = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor, y: Tensor, *, more: dict[str, Tensor]) -> Any:
        total = self.layers(x * y) + more["z"]
        return {"total": total, "index": total.argmax(1), "text": "odd"}, total.detach()


@pytest.mark.parametrize("debug", MANY)
def test_with_gradients_draws_counters_and_unused_tensors_are_as_in_eager(
    lab: Lab, debug: str
) -> None:
    graphs, eager = Odd().to(lab.device), Odd().to(lab.device)
    eager.load_state_dict(graphs.state_dict())
    run = graphed(graphs, debug)
    x = fresh(lab, 4, 6).requires_grad_()
    torch.manual_seed(3)
    run(x, x, more={"z": x})[0]["total"].sum().backward()
    torch.manual_seed(3)
    eager(x.detach(), x.detach(), more={"z": x.detach()})
    for seed in range(3):
        x, y, z = (fresh(lab, 4, 6).requires_grad_(one < 2) for one in range(3))
        loss = fresh(lab, 4, 6)
        found, right = [], []
        for model, all_found in ((run, found), (eager, right)):
            torch.manual_seed(seed)
            result = model(x, y, more={"z": z})
            wanted = [x, y, *(graphs if model is run else eager).layers.parameters()]
            gradients = torch.autograd.grad(result[0]["total"], wanted, loss)
            all_found += [result[0]["total"].clone(), result[0]["index"].clone(), *gradients]
            all_found.append(torch.rand(2, device=lab.device))
        assert equal(found, right)
        assert equal(dict(graphs.named_buffers()), dict(eager.named_buffers()))


def test_gradients_of_an_argument_that_is_given_twice_are_compared_one_by_one(lab: Lab) -> None:
    run = graphed(lambda x, y: x * 2 + y.sin(), "compare")
    for _ in range(3):
        x = fresh(lab, 5).requires_grad_()
        run(x, x).square().sum().backward()
        (right,) = torch.autograd.grad((x * 2 + x.sin()).square().sum(), x)
        assert equal(x.grad, right)


def test_a_difference_with_gradients_leaves_all_state_as_before_the_call(lab: Lab) -> None:
    module, by = nn.BatchNorm1d(4).to(lab.device), Unseen(1.0)

    def body(x: Tensor) -> Tensor:
        return nn.functional.dropout(module(x), 0.3) * by[0]

    run, x = graphed(body, "sync,compare"), fresh(lab, 6, 4)
    run(x), run(x)
    buffers = {name: one.clone() for name, one in module.named_buffers()}
    by[0] = 2.0
    torch.manual_seed(7)
    with pytest.raises(CompareError) as caught:
        run(x)
    assert "aten.mul.Tensor" in str(caught.value.operator)
    drawn = torch.rand(2, device=lab.device)
    torch.manual_seed(7)
    assert equal(drawn, torch.rand(2, device=lab.device))
    assert equal(dict(module.named_buffers()), buffers)


@pytest.mark.parametrize("debug", MANY)
def test_backward_passes_inside_the_function_are_debugged_as_a_whole(lab: Lab, debug: str) -> None:
    def slope(x: Tensor) -> Tensor:
        own = x.detach().requires_grad_()
        (found,) = torch.autograd.grad((own.tanh() + own.sin() * own).sum(), own)
        return found * 2

    run = graphed(slope, debug)
    for _ in range(3):
        x = fresh(lab, 3, 4)
        assert equal(run(x), slope(x))


def test_parameters_with_hooks_are_compared_before_these(lab: Lab) -> None:
    module, calls = nn.Linear(4, 2).to(lab.device), []
    module.weight.register_hook(lambda gradient: (calls.append(1), gradient * 0.5)[1])
    run = graphed(lambda x: module(x), "compare")
    for _ in range(2):
        x = fresh(lab, 3, 4)
        module.zero_grad()
        run(x).square().sum().backward()
        (right,) = torch.autograd.grad(module(x).square().sum(), module.weight)
        assert equal(module.weight.grad, right)
    assert len(calls) == 4


class Busy(torch.autograd.Function):
    """A module that draws and counts in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: Tensor) -> Tensor:
        ctx.count = count
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.count.add_(1)
        return gradient * torch.rand_like(gradient), None


@pytest.mark.parametrize("debug", ["compare", "sync,compare"])
def test_what_a_backward_pass_draws_and_writes_happens_once(lab: Lab, debug: str) -> None:
    module = nn.BatchNorm1d(4).to(lab.device)
    run = graphed(lambda x: Busy.apply(module(x), module.num_batches_tracked), debug)
    run(fresh(lab, 3, 4).requires_grad_()).sum().backward()
    for seed in range(3):
        before, x = int(module.num_batches_tracked), fresh(lab, 3, 4).requires_grad_()
        torch.manual_seed(seed)
        (found,) = torch.autograd.grad(run(x).square().sum(), x)
        after = int(module.num_batches_tracked)
        torch.manual_seed(seed)
        own = Busy.apply(module(x), module.num_batches_tracked)
        (right,) = torch.autograd.grad(own.square().sum(), x)
        assert equal(found, right)
        assert after == before + 2  # the forward pass counts, too


def test_an_argument_that_is_written_before_the_backward_pass_is_compared_as_it_was(
    lab: Lab,
) -> None:
    module = nn.Linear(4, 2).to(lab.device)
    run, x = graphed(lambda x: module(x).exp(), "compare"), fresh(lab, 3, 4)
    run(x)
    (right,) = torch.autograd.grad(module(x).exp().sum(), module.weight)
    result = run(x)
    x.normal_()
    (found,) = torch.autograd.grad(result.sum(), module.weight)
    assert equal(found, right)


def test_steps_that_fail_leave_what_an_earlier_backward_pass_reads(sim: SimLab) -> None:
    table = fresh(sim, 3)
    run = graphed(lambda x, i: x.square() + table.index_select(0, i), "sync")
    x, index = fresh(sim, 3).requires_grad_(), torch.tensor([0, 1, 2])
    run(x, index)
    result = run(x, index)
    with pytest.raises((IndexError, RuntimeError), match="index"):
        run(torch.full((3,), 100.0).requires_grad_(), torch.tensor([0, 1, 99]))
    (found,) = torch.autograd.grad(result.sum(), x)
    assert equal(found, 2 * x)


def inside(x: Tensor, index: Tensor) -> Tensor:
    class Picking(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient.index_select(0, index) * Scaled.by[0]

    own = x.detach().requires_grad_()
    (found,) = torch.autograd.grad(Picking.apply(own).sum(), own)
    return found * 3 if x.dim() == 1 else found


@pytest.mark.parametrize("dims", [1, 2])
def test_a_backward_pass_inside_that_fails_or_differs_is_said_to_be_one(
    sim: SimLab, backward_by: Any, dims: int
) -> None:
    run, good, bad = graphed(inside, "sync"), torch.tensor([1, 0]), torch.tensor([1, 99])
    x = fresh(sim, *[2] * dims)
    run(x, good)
    run(x, good)
    with pytest.raises((IndexError, RuntimeError), match="index") as caught:
        run(x, bad)
    named = "or the backward pass before it" if dims == 1 else "such as a backward pass"
    assert named in "\n".join(caught.value.__notes__)
    run = graphed(inside, "compare")
    run(x, good), run(x, good)
    backward_by(7.0)
    named = "or the backward pass before it" if dims == 1 else "a backward pass inside"
    with pytest.raises(CompareError, match=named):
        run(x, good)


@pytest.mark.parametrize("options", [{"outputs": "static"}, {"sizes": [8]}])
def test_copies_and_padded_calls_are_compared_in_both_passes(
    lab: Lab, options: dict[str, Any]
) -> None:
    module = nn.Linear(4, 2).to(lab.device)
    run = graphed(module, "sync,compare", **options)
    for _ in range(3):
        x = fresh(lab, 5, 4).requires_grad_()
        wanted = [x, *module.parameters()]
        found = torch.autograd.grad(run(x).square().sum(), wanted)
        assert equal(found, torch.autograd.grad(module(x).square().sum(), wanted))


def test_gradients_of_keyword_arguments_are_compared_by_name(lab: Lab) -> None:
    run = graphed(lambda b, a: a.sin() * 2 + b.sum() * 3, "compare")
    for _ in range(2):
        a, b = fresh(lab, 2, 3).requires_grad_(), fresh(lab, 4).requires_grad_()
        found = torch.autograd.grad(run(b=b, a=a).sum(), (a, b))
        assert equal(found, torch.autograd.grad((a.sin() * 2 + b.sum() * 3).sum(), (a, b)))


@pytest.mark.parametrize("debug", ["", "compare"])
def test_a_second_backward_pass_is_refused_as_without_debugging(lab: Lab, debug: str) -> None:
    run, x = graphed(lambda x: x.exp(), debug), fresh(lab, 5).requires_grad_()
    run(x)
    result = run(x).sum()
    result.backward(retain_graph=True)
    with pytest.raises(StateError, match="second time"):
        result.backward()


def test_a_parameter_that_is_an_argument_too_has_its_hooks_called_once(lab: Lab) -> None:
    module, calls = nn.Linear(4, 4).to(lab.device), []
    run = graphed(lambda x, weight: module(x) @ weight, "compare")
    run(fresh(lab, 3, 4), module.weight)
    hook = module.weight.register_hook(lambda _: calls.append(1))
    x = fresh(lab, 3, 4)
    run(x, module.weight).sum().backward()
    assert len(calls) == 1
    hook.remove()
    (right,) = torch.autograd.grad((module(x) @ module.weight).sum(), module.weight)
    assert equal(module.weight.grad, right)
