"""Gradients, training steps, random state and captures are undone, bit by bit."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import cgraph
from bits import same, undone
from cgraph import _torch
from cgraph._operators.rollback import Rollback
from lab import SimLab


@pytest.mark.parametrize("given", [True, False])
def test_a_gradient_that_was_none_is_none_again(given: bool) -> None:
    layer = nn.Linear(3, 2)
    rollback = Rollback(leaves=layer.parameters() if given else ())
    with rollback:
        layer(torch.randn(4, 3)).sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())
    rollback.undo()
    assert all(parameter.grad is None for parameter in layer.parameters())


def test_a_gradient_that_was_there_is_the_same_object_with_its_contents() -> None:
    layer, x = nn.Linear(3, 2), torch.randn(4, 3)
    layer(x).sum().backward()
    grads = [parameter.grad for parameter in layer.parameters()]
    contents = [grad.clone() for grad in grads if grad is not None]
    rollback = Rollback()
    with rollback:
        layer(x).exp().sum().backward()
        layer.zero_grad(set_to_none=True)
        layer(x).sum().backward()
    rollback.undo()
    for parameter, grad, content in zip(layer.parameters(), grads, contents, strict=True):
        assert parameter.grad is grad
        assert grad is not None
        assert same(grad, content)


def test_a_given_leaf_has_its_gradient_again_although_it_was_dropped_first() -> None:
    layer, x = nn.Linear(3, 2), torch.randn(4, 3)
    layer(x).sum().backward()
    grads = [parameter.grad for parameter in layer.parameters()]
    rollback = Rollback(leaves=layer.parameters())
    with rollback:
        layer.zero_grad()
        layer(x).sum().backward()
    rollback.undo()
    assert all(p.grad is grad for p, grad in zip(layer.parameters(), grads, strict=True))


def test_leaves_behind_a_given_tensor_have_their_gradients_again() -> None:
    layer = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    loss = layer(torch.randn(5, 3)).sum()
    rollback = Rollback(leaves=[loss])
    with rollback:
        loss.backward()
    assert layer[0].weight.grad is not None
    rollback.undo()
    assert all(parameter.grad is None for parameter in layer.parameters())


class Net(nn.Module):
    """A module with all the state that a training step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = (
            nn.Linear(6, 8, bias=False),
            nn.BatchNorm1d(8),
            nn.Dropout(0.5),
        )
        self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.norm(self.first(x)).relu()))


OPTIMISERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "Adam": lambda p: torch.optim.Adam(p, foreach=False),
    "Adam, foreach": lambda p: torch.optim.Adam(p, foreach=True),
    "Adam, fused": lambda p: torch.optim.Adam(p, fused=True, amsgrad=True),
}


@pytest.mark.parametrize("first_step", [True, False])
@pytest.mark.parametrize("name", OPTIMISERS)
def test_a_training_step_is_undone_and_gives_the_same_when_repeated(
    name: str, first_step: bool
) -> None:
    net, x = Net(), torch.randn(16, 6)
    optimiser = OPTIMISERS[name](net.parameters())

    def step() -> Tensor:
        optimiser.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimiser.step()
        return loss.detach()

    if not first_step:
        step()
    weights = copy.deepcopy(net.state_dict())
    state = copy.deepcopy(optimiser.state_dict()["state"])
    grads = [parameter.grad for parameter in net.parameters()]
    contents = [None if grad is None else grad.clone() for grad in grads]
    rollback = Rollback(leaves=net.parameters())
    with rollback:
        losses = [step() for _ in range(3)]
    changed = copy.deepcopy(net.state_dict())
    rollback.undo()
    assert [key for key, value in weights.items() if same(changed[key], value)] == []
    assert all(same(net.state_dict()[key], value) for key, value in weights.items())
    for parameter, grad, content in zip(net.parameters(), grads, contents, strict=True):
        assert parameter.grad is grad
        assert grad is None or (content is not None and same(grad, content))
    after = optimiser.state_dict()["state"]
    for number, entries in state.items():
        for key, value in entries.items():
            assert value is None or same(after[number][key], value)
    if first_step:  # the optimizer's new state stays, as the docstring says
        optimiser.state.clear()
    assert all(same(step(), loss) for loss in losses)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_the_statistics_of_a_batch_norm_are_put_back(mode: Callable[[], Any]) -> None:
    norm, x = nn.BatchNorm1d(5), torch.randn(8, 5)
    norm(x)
    mean, variance, count = norm.running_mean, norm.running_var, norm.num_batches_tracked
    assert mean is not None and variance is not None and count is not None
    with undone(mean, variance, count), mode():
        norm(x * 3 + 1)


def test_random_numbers_are_drawn_again_after_undo() -> None:
    own = torch.Generator().manual_seed(torch.seed() % 1000)
    x, rollback = torch.randn(50), Rollback()

    def draw() -> tuple[Tensor, Tensor]:
        return functional.dropout(x), torch.rand(9, generator=own)

    with rollback:
        first = draw()
    rollback.undo()
    assert all(same(*pair) for pair in zip(draw(), first, strict=True))


@pytest.mark.parametrize("optimiser", [torch.optim.SGD, torch.optim.SparseAdam])
def test_a_step_with_sparse_gradients_is_undone(optimiser: Any) -> None:
    table = nn.Embedding(10, 3, sparse=True)
    words, other = torch.randint(10, (4,)), torch.randint(10, (6,))
    steps = optimiser(table.parameters(), lr=0.1)
    table(words).sum().backward()
    grad = table.weight.grad
    assert grad is not None
    dense = grad.to_dense()
    with undone(table.weight):
        table(other).square().sum().backward()
        steps.step()
        table.weight.grad = None
        table(words).exp().sum().backward()
    assert table.weight.grad is grad
    assert same(grad.to_dense(), dense)


def test_a_sparse_tensor_that_is_written_is_put_back() -> None:
    x = torch.randn(4, 4).relu().to_sparse()
    dense, rollback = x.to_dense(), Rollback()
    with rollback:
        x.mul_(3)
        x.add_(torch.ones(4, 4).to_sparse())
    rollback.undo()
    assert same(x.to_dense(), dense)


def test_a_sparse_parameter_that_is_only_read_shares_its_values_as_before() -> None:
    weight = nn.Parameter(torch.randn(4, 4).relu().to_sparse())
    values, rollback = weight.detach()._values(), Rollback(leaves=[weight])
    with rollback:
        torch.sparse.mm(weight, torch.randn(4, 2)).sum().backward()
    rollback.undo()
    values.mul_(2)
    assert same(weight.detach()._values(), values)


def test_a_static_output_has_no_history_after_undo() -> None:
    layer, x, out, rows = nn.Linear(3, 2), torch.randn(4, 3), torch.randn(4, 2), torch.randn(2, 2)
    rollback = Rollback()
    with undone(out, rows):
        with rollback:
            out.copy_(layer(x))
            rows[0] = layer(x)[0]
            assert out.requires_grad and rows.requires_grad
        rollback.undo()
        assert not out.requires_grad and out.grad_fn is None
        assert not rows.requires_grad and rows.grad_fn is None
        out.add_(1)  # so that the outer one has something to do


def test_warm_up_and_capture_are_undone_and_the_graph_holds_no_copy(sim: SimLab) -> None:
    net, x, out = Net(), torch.randn(16, 6), torch.randn(())
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
    weights, original = copy.deepcopy(net.state_dict()), out.clone()

    def step() -> None:
        optimiser.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimiser.step()
        out.copy_(loss.detach())

    def nodes(graph: cgraph.CUDAGraph) -> int:
        with cgraph.graph(graph):
            step()
        return len(json.loads(graph._template.json())["nodes"])

    rollback = Rollback(leaves=net.parameters(), is_capturing=cgraph.is_current_stream_capturing)
    with rollback:
        step()
        watched = nodes(cgraph.CUDAGraph(keep_graph=True))
    rollback.undo()
    assert all(same(net.state_dict()[key], value) for key, value in weights.items())
    assert same(out, original)
    assert all(parameter.grad is None for parameter in net.parameters())
    assert watched == nodes(cgraph.CUDAGraph(keep_graph=True))


def test_what_runs_aside_is_not_watched_and_put_back_if_it_was_written_before() -> None:
    x, y = torch.randn(3), torch.randn(3)
    before, other = x.clone(), y.clone()
    with Rollback() as rollback:
        x.add_(1)
        with rollback.aside():
            assert _torch.mode_count() == 0
            x.add_(1)
            y.add_(1)
        assert _torch.mode_count() == 1
    rollback.undo()
    assert torch.equal(x, before)
    assert torch.equal(y, other + 1)
