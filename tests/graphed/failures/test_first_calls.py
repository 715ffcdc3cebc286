"""Effects of first calls of keys: objects made, kept and counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from graphed_calls import near, states
from lab import Lab, fresh


@pytest.fixture(autouse=True)
def libraries(lab: Lab) -> None:
    """Load libraries that a first capture without warm-up cannot load, as torch's own cannot."""
    net = nn.Linear(3, 3).to(lab.device)
    net(torch.ones(2, 3, device=lab.device)).sum().backward()


class Trainer:
    """A trainer that makes its optimizer in the first call with gradients."""

    def __init__(self, lab: Lab) -> None:
        torch.manual_seed(3)
        self.net = nn.Linear(3, 3).to(lab.device)
        self.optimizer: torch.optim.Optimizer | None = None
        self.kept: list[nn.Parameter] = []

    def step(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return self.net(x).sum()  # type: ignore[no-any-return]
        if self.optimizer is None:
            self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.optimizer.zero_grad()
        loss = self.net(x).square().sum()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def loss(self, x: Tensor) -> Tensor:
        if not self.kept and torch.is_grad_enabled():
            self.kept += self.net.parameters()
        return self.net(x).square().sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize("warmup", [1, 3])
def test_parameters_that_the_first_call_keeps_are_those_of_the_module(
    lab: Lab, warmup: int
) -> None:
    trainer = Trainer(lab)
    graphed = cgraph.graphed(trainer.loss, warmup=warmup)
    with torch.no_grad():
        graphed(fresh(lab, 2, 3))
    graphed(fresh(lab, 2, 3)).backward()
    assert [*map(id, trainer.kept)] == [*map(id, trainer.net.parameters())]


@pytest.mark.parametrize("kind", ["exponential", "chained", "plateau"])
def test_a_scheduler_that_does_not_step_is_no_obstacle_and_stays_as_it_is(
    lab: Lab, kind: str
) -> None:
    runs = []
    for _ in range(2):
        torch.manual_seed(5)
        net = nn.Linear(3, 3).to(lab.device)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        rates = torch.optim.lr_scheduler
        scheduler: Any = rates.ExponentialLR(optimizer, 0.5)
        if kind == "chained":
            scheduler = rates.ChainedScheduler([scheduler], optimizer)
        elif kind == "plateau":
            scheduler = rates.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        scheduler.history = [1]

        def step(
            x: Tensor, net: Any = net, optimizer: Any = optimizer, scheduler: Any = scheduler
        ) -> Tensor:
            optimizer.zero_grad()
            loss = net(x).square().sum()
            loss.backward()
            optimizer.step()
            return loss.detach() * len(scheduler.history)  # type: ignore[no-any-return]

        runs.append((net, scheduler, step))
    (net, scheduler, step), (other, _, eager) = runs
    history = scheduler.history
    graphed = cgraph.graphed(step)
    for _ in range(4):
        x = fresh(lab, 2, 3)
        assert near(graphed(x), eager(x))
    assert near(net.weight, other.weight)
    assert scheduler.history is history
    assert states(graphed) == ["captured"]


@pytest.mark.filterwarnings("ignore:.*runs eagerly for:UserWarning")
@pytest.mark.parametrize("warmup", [1, 3])
def test_an_optimizer_that_the_first_call_makes_keeps_its_rate(lab: Lab, warmup: int) -> None:
    ours, theirs = Trainer(lab), Trainer(lab)

    def over(one: Trainer) -> Any:
        def step(x: Tensor) -> Tensor:
            loss = one.step(x)
            assert one.optimizer is not None
            one.optimizer.param_groups[0]["lr"] *= 0.5
            return loss

        return step

    graphed, eager = cgraph.graphed(over(ours), warmup=warmup), over(theirs)
    for _ in range(6):
        x = fresh(lab, 2, 3)
        assert near(graphed(x), eager(x))
        assert ours.optimizer is not None and theirs.optimizer is not None
        rates = [one.optimizer.param_groups[0]["lr"] for one in (ours, theirs)]  # type: ignore[union-attr]
        assert rates[0] == rates[1]
    assert "captured" not in states(graphed)


@pytest.mark.parametrize("how", ["no_grad", "detach", "requires"])
def test_without_warm_up_a_break_is_judged_by_what_comes_out(lab: Lab, how: str) -> None:
    net = nn.Linear(3, 3).to(lab.device)
    doubled = cgraph.eager_break(lambda x: x * 2)

    def run(x: Tensor) -> Tensor:
        if how == "no_grad":
            with torch.no_grad():
                return doubled(net(x))
        y = net(x)
        return doubled(y.detach()) + (y if how == "requires" else 0)  # type: ignore[no-any-return]

    graphed = cgraph.graphed(run)
    for _ in range(3):
        x = fresh(lab, 2, 3)
        found, expected = graphed(x), run(x)
        assert near(found.detach(), expected)
        assert found.requires_grad == expected.requires_grad == (how == "requires")
        if found.requires_grad:
            pair = [
                torch.autograd.grad(one.sin().sum(), net.weight)[0] for one in (found, expected)
            ]
            assert near(*pair)
        del found
    assert states(graphed) == ["captured"]


@pytest.mark.parametrize("warmup", [1, 3])
def test_a_graphed_function_in_a_hook_of_a_backward_pass_is_part_of_the_step(
    lab: Lab, warmup: int
) -> None:
    counts = [torch.zeros((), device=lab.device) for _ in range(2)]
    weights = [nn.Parameter(torch.ones(3, device=lab.device)) for _ in range(2)]

    def over(place: int, of_hook: Any) -> Any:
        def step(x: Tensor) -> Tensor:
            weights[place].grad = None
            y = weights[place] * x
            y.register_hook(of_hook)
            y.sum().backward()
            return y.detach()

        return step

    def counted(place: int) -> Any:
        def double(gradient: Tensor) -> Tensor:
            counts[place].add_(1)
            return gradient * 2

        return double

    inner = cgraph.graphed(counted(0))
    inner(fresh(lab, 3))
    counts[0].zero_()
    graphed, eager = cgraph.graphed(over(0, inner), warmup=warmup), over(1, counted(1))
    for _ in range(4):
        x = fresh(lab, 3)
        assert near(graphed(x), eager(x))
        ours, theirs = (one.grad for one in weights)
        assert ours is not None and theirs is not None and near(ours, theirs)
        assert counts[0].item() == counts[1].item()
