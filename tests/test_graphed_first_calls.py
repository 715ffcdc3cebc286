"""What first calls of keys make, keep and count."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from cgraph import _driver
from graphed_calls import near, states
from lab import Lab, fresh


@pytest.fixture(autouse=True)
def libraries(lab: Lab) -> None:
    """Loads what a first capture without warm-up cannot, as torch's own cannot."""
    net = nn.Linear(3, 3).to(lab.device)
    net(torch.ones(2, 3, device=lab.device)).sum().backward()


class Trainer:
    """Makes its optimizer in the first call with gradients."""

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


@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("warmup", [1, 2, 3])
def test_an_optimizer_that_the_first_call_makes_trains_the_parameters(
    lab: Lab, warmup: int, is_warm: bool
) -> None:
    ours, theirs = Trainer(lab), Trainer(lab)
    graphed = cgraph.graphed(ours.step, warmup=warmup, outputs="clone")
    if is_warm:
        x = fresh(lab, 2, 3)
        with torch.no_grad():
            assert near(graphed(x), theirs.step(x))
    for _ in range(5):
        x = fresh(lab, 2, 3)
        assert near(graphed(x), theirs.step(x))
    assert near(ours.net.weight, theirs.net.weight)
    assert set(states(graphed)) == {"captured"}


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


@pytest.mark.parametrize("warmup", [0, 1, 2, 3])
def test_without_preserve_state_a_step_is_called_as_often_as_asked(lab: Lab, warmup: int) -> None:
    net, count = nn.Linear(3, 3).to(lab.device), torch.zeros((), device=lab.device)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def step(x: Tensor) -> Tensor:
        count.add_(1)
        optimizer.zero_grad()
        loss = net(x).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    graphed = cgraph.graphed(step, warmup=warmup, preserve_state=False, measure=False)
    graphed(fresh(lab, 2, 3))
    # A gradient that the capture would make is made by a call of its own.
    assert count.item() == warmup + 1


class Schedule:
    """A step with a learning rate scheduler in it."""

    def __init__(self, lab: Lab, kind: str) -> None:
        torch.manual_seed(4)
        self.net = nn.Linear(3, 3).to(lab.device)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.5)
        rates = torch.optim.lr_scheduler
        self.scheduler: Any = None
        if kind == "exponential":
            self.scheduler = rates.ExponentialLR(self.optimizer, 0.5)
        elif kind == "lambda":
            self.scheduler = rates.LambdaLR(self.optimizer, lambda epoch: 1 / (1 + epoch))
        elif kind == "sequence":
            parts: list[Any] = [rates.ConstantLR(self.optimizer), rates.StepLR(self.optimizer, 1)]
            self.scheduler = rates.SequentialLR(self.optimizer, parts, [2])

    def step(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.net(x).square().sum()
        loss.backward()
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        else:
            for group in self.optimizer.param_groups:
                group["lr"] *= 0.5
        return loss.detach()


# torch 2.8 warns of what its own SequentialLR does.
@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize("warmup", [0, 1, 3])
@pytest.mark.parametrize("kind", ["exponential", "lambda", "sequence", "by hand"])
def test_a_step_that_changes_the_learning_rate_runs_eagerly(
    lab: Lab, kind: str, warmup: int
) -> None:
    ours, theirs = Schedule(lab, kind), Schedule(lab, kind)
    graphed = cgraph.graphed(ours.step, warmup=warmup)
    with pytest.warns(UserWarning, match="of an optimizer or of a learning rate scheduler"):
        for _ in range(6):
            x = fresh(lab, 2, 3)
            assert near(graphed(x), theirs.step(x))
            assert ours.optimizer.param_groups[0]["lr"] == theirs.optimizer.param_groups[0]["lr"]
    assert near(ours.net.weight, theirs.net.weight)
    if ours.scheduler is not None:
        assert ours.scheduler.last_epoch == theirs.scheduler.last_epoch


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


@pytest.mark.parametrize("warmup", [0, 1, 3])
def test_a_learning_rate_that_each_call_sets_anew_is_set(lab: Lab, warmup: int) -> None:
    ours, theirs = Schedule(lab, "by hand"), Schedule(lab, "by hand")

    def over(one: Schedule) -> Any:
        def step(x: Tensor) -> Tensor:
            for group in one.optimizer.param_groups:
                group["lr"] = 0.05
            one.optimizer.zero_grad()
            loss = one.net(x).square().sum()
            loss.backward()
            one.optimizer.step()
            return loss.detach()

        return step

    graphed, eager = cgraph.graphed(over(ours), warmup=warmup), over(theirs)
    for _ in range(4):
        x = fresh(lab, 2, 3)
        assert near(graphed(x), eager(x))
        assert ours.optimizer.param_groups[0]["lr"] == 0.05
    assert near(ours.net.weight, theirs.net.weight)
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
    assert states(graphed) == ["eager"]


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

    graphed = cgraph.graphed(run, warmup=0)
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


class Library:
    """Makes something for each thread at its first use, which a capture does not allow.

    So do cuBLAS and others, whose words these are.
    """

    def __init__(self, words: str) -> None:
        self.words = words
        self.threads: set[int] = set()
        self.is_broken = False

    def double(self, x: Tensor) -> Tensor:
        if threading.get_ident() not in self.threads or self.is_broken:
            if _driver.current().is_capturing():
                raise RuntimeError(self.words)
            self.threads.add(threading.get_ident())
        return x * 2


WORDS = [
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate(handle)`.",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "cuFFT error: CUFFT_INTERNAL_ERROR",
]


@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize("on_fail", ["eager", "raise"])
def test_a_first_call_that_makes_a_library_ready_runs_eagerly_and_the_next_one_is_captured(
    lab: Lab, words: str, on_fail: Any
) -> None:
    library = Library(words)
    graphed = cgraph.graphed(library.double, warmup=0, measure=False, on_fail=on_fail)
    found: list[bool] = []

    def call() -> None:
        with torch.no_grad():
            x = fresh(lab, 3)
            found.append(torch.equal(graphed(x), x * 2))

    call()
    assert states(graphed) == ["eager"]
    call()
    call()
    assert found == [True] * 3 and states(graphed) == ["captured"]
    (key,) = graphed.report().keys
    assert key.eager_calls == 1 and key.reason is None


def test_a_library_that_is_never_ready_is_told_after_a_few_calls(lab: Lab) -> None:
    library = Library(WORDS[0])
    library.is_broken = True
    graphed = cgraph.graphed(library.double, warmup=0, measure=False)
    with torch.no_grad():
        for _ in range(3):
            x = fresh(lab, 3)
            assert torch.equal(graphed(x), x * 2)
        with pytest.warns(UserWarning, match="cublasCreate"):
            assert torch.equal(graphed(x), x * 2)
    (key,) = graphed.report().keys
    assert key.state == "eager" and key.reason is not None and "cublasCreate" in key.reason
