"""Numbers of Python's that a function changes, which no replay does."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from graphed_calls import near, states
from lab import Lab, fresh


class Engine:
    """Counts its calls, and computes with the count."""

    def __init__(self) -> None:
        self.place = 1

    def step(self, x: Tensor) -> Tensor:
        self.place += 1
        return x * self.place


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.place = 1
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        self.place += 1
        return x * self.place * self.weight


def of_namespace() -> tuple[Any, Any]:
    space = SimpleNamespace(place=1)

    def step(x: Tensor) -> Tensor:
        space.place += 1
        return x * space.place

    return step, lambda: space.place


def of_dictionary() -> tuple[Any, Any]:
    known = {"place": 1}

    def step(x: Tensor) -> Tensor:
        known["place"] += 1
        return x * known["place"]

    return step, lambda: known["place"]


def of_method() -> tuple[Any, Any]:
    engine = Engine()
    return engine.step, lambda: engine.place


def of_closure() -> tuple[Any, Any]:
    place = 1

    def step(x: Tensor) -> Tensor:
        nonlocal place
        place += 1
        return x * place

    return step, lambda: place


def of_global() -> tuple[Any, Any]:
    global place
    place = 1

    def step(x: Tensor) -> Tensor:
        global place
        place += 1
        return x * place

    return step, lambda: place


def of_class() -> tuple[Any, Any]:
    class Known:
        place = 1

    def step(x: Tensor) -> Tensor:
        Known.place += 1
        return x * Known.place

    return step, lambda: Known.place


place = 1


@pytest.mark.parametrize("options", [{}, {"warmup": 0}, {"warmup": 1, "measure": False}])
@pytest.mark.parametrize(
    "make", [of_namespace, of_dictionary, of_method, of_closure, of_global, of_class]
)
def test_a_function_that_counts_runs_eagerly_from_its_first_call_on(
    lab: Lab, make: Any, options: dict[str, Any]
) -> None:
    function, place = make()
    graphed = cgraph.graphed(function, **options)
    changes = r"changes (place|cell_contents) from \d+ to \d+, and replays do not"
    with pytest.warns(UserWarning, match=changes):
        for count in range(2, 8):
            x = fresh(lab, 3)
            assert torch.equal(graphed(x), x * count)
            assert place() == count
    assert states(graphed) == ["eager"]


@pytest.mark.parametrize("grad", [True, False])
def test_a_module_that_counts_runs_eagerly_with_the_right_gradients(lab: Lab, grad: bool) -> None:
    module = Counting().to(lab.device)
    graphed = cgraph.graphed(module)
    with pytest.warns(UserWarning, match="changes place"), torch.set_grad_enabled(grad):
        for count in range(2, 8):
            x = fresh(lab, 3)
            result = graphed(x)
            assert near(result, x * count * module.weight)
            if grad:
                module.zero_grad()
                result.sum().backward()
                assert module.weight.grad is not None
                assert near(module.weight.grad, x * count)
            assert module.place == count


def test_a_number_that_only_the_first_call_sets_is_no_hindrance(lab: Lab) -> None:
    class Lazy:
        def __init__(self) -> None:
            self.width = 0

        def step(self, x: Tensor) -> Tensor:
            self.width = self.width or x.shape[-1]
            return x * self.width

    lazy = Lazy()
    graphed = cgraph.graphed(lazy.step)
    for _ in range(3):
        x = fresh(lab, 5)
        assert torch.equal(graphed(x), x * 5)
    assert states(graphed) == ["captured"]


@pytest.mark.parametrize("options", [{}, {"warmup": 0}])
def test_what_the_first_call_takes_away_is_there_for_it(lab: Lab, options: dict[str, Any]) -> None:
    known, space = {"scale": 5}, SimpleNamespace(scale=3)

    def step(x: Tensor) -> Tensor:
        scale = space.scale if hasattr(space, "scale") else 1
        vars(space).pop("scale", None)
        return x * known.pop("scale", 1) * scale

    graphed = cgraph.graphed(step, **options)
    for scale in (15, 1, 1, 1):
        x = fresh(lab, 3)
        assert near(graphed(x), x * scale)
    assert states(graphed) == ["captured"]


def test_what_only_the_first_call_does_is_done_by_it(lab: Lab) -> None:
    class Once:
        is_first = True

        def __init__(self) -> None:
            self.is_first = True

        def step(self, x: Tensor) -> Tensor:
            if self.is_first:
                self.is_first = False
                return x * 10
            return x * 2

    graphed = cgraph.graphed(Once().step)
    for scale in (10, 2, 2, 2):
        x = fresh(lab, 3)
        assert torch.equal(graphed(x), x * scale)
    assert states(graphed) == ["captured"]


def test_what_a_break_counts_is_counted_by_replays(lab: Lab) -> None:
    engine = Engine()

    @cgraph.eager_break
    def counted(x: Tensor) -> Tensor:
        engine.place += 1
        return x + engine.place

    graphed = cgraph.graphed(lambda x: counted(x * 2) * 3)
    graphed(fresh(lab, 3))
    for _ in range(3):
        x, before = fresh(lab, 3), engine.place
        assert near(graphed(x), (x * 2 + before + 1) * 3)
        assert engine.place == before + 1
    assert states(graphed) == ["captured"]


class Counted(torch.optim.Optimizer):
    """Corrects by a count of steps that is a number, for each parameter or for all."""

    def __init__(self, parameters: Any, kept: str) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.kept = kept
        self.steps = 0

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.steps += self.kept == "own"
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["mean"], state["step"] = torch.zeros_like(parameter), 0
                state["step"] += self.kept == "state"
                state["mean"].lerp_(parameter.grad, 0.1)
                count = self.steps if self.kept == "own" else state["step"]
                parameter.sub_(state["mean"] / (1 - math.pow(0.9, count)) * group["lr"])


@pytest.mark.parametrize("options", [{}, {"warmup": 0}])
@pytest.mark.parametrize("kept", ["own", "state"])
def test_an_optimizer_that_counts_its_steps_in_python_runs_eagerly(
    lab: Lab, kept: str, options: dict[str, Any]
) -> None:
    start = fresh(lab, 3)
    weights = [nn.Parameter(start.clone()) for _ in range(2)]
    optimizers = [Counted([one], kept) for one in weights]

    def step(place: int, x: Tensor) -> Tensor:
        optimizers[place].zero_grad()
        loss = (weights[place] * x).square().sum()
        loss.backward()
        optimizers[place].step()
        return loss.detach()

    graphed = cgraph.graphed(lambda x: step(0, x), **options)
    with pytest.warns(UserWarning, match="changes (step|steps) "):
        for _ in range(7):
            x = fresh(lab, 3)
            assert near(graphed(x), step(1, x))
            assert near(weights[0], weights[1])


@pytest.mark.parametrize("grad", [True, False])
def test_what_the_first_call_sets_up_from_its_data_is_set_up(lab: Lab, grad: bool) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(3))
            self.is_ready = False

        def forward(self, x: Tensor) -> Tensor:
            if not self.is_ready:
                self.shift.data.copy_(-x.detach().mean(0))
                self.is_ready = True
            return x + self.shift

    mine = Normed().to(lab.device)
    eager = copy.deepcopy(mine)
    graphed = cgraph.graphed(mine)
    with torch.set_grad_enabled(grad):
        for _ in range(4):
            x = fresh(lab, 4, 3)
            assert near(graphed(x), eager(x))
            assert near(mine.shift, eager.shift)
    assert states(graphed) == ["captured"]


@pytest.mark.parametrize("period", [2, 3, 4, 5])
def test_a_step_in_every_few_calls_comes_when_it_comes_in_eager(lab: Lab, period: int) -> None:
    class Loop:
        def __init__(self, net: nn.Module) -> None:
            self.net, self.turn = net, 0
            self.optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)

        def step(self, x: Tensor) -> Tensor:
            loss: Tensor = self.net(x).square().mean()
            loss.backward()
            self.turn += 1
            if self.turn % period == 0:
                self.optimizer.step()
                self.optimizer.zero_grad()
            return loss.detach()

    net = nn.Linear(6, 3).to(lab.device)
    mine, eager = Loop(net), Loop(copy.deepcopy(net))
    graphed = cgraph.graphed(mine.step)
    with pytest.warns(UserWarning, match="changes turn"):
        for _ in range(10):
            x = fresh(lab, 4, 6)
            assert near(graphed(x), eager.step(x))


@pytest.mark.parametrize("warmup", [3, 0])
def test_a_scheduler_behind_an_object_steps_once_in_each_call(lab: Lab, warmup: int) -> None:
    class Trainer:
        def __init__(self, net: nn.Module) -> None:
            self.net = net
            self.optimizer = torch.optim.SGD(net.parameters(), 0.1)
            self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)

    def step(trainer: Trainer, x: Tensor) -> Tensor:
        trainer.optimizer.zero_grad()
        loss: Tensor = trainer.net(x).square().mean()
        loss.backward()
        trainer.optimizer.step()
        trainer.scheduler.step()
        return loss.detach()

    net = nn.Linear(6, 3).to(lab.device)
    mine, eager = Trainer(net), Trainer(copy.deepcopy(net))
    graphed = cgraph.graphed(lambda x: step(mine, x), warmup=warmup)
    with pytest.warns(UserWarning, match="of an optimizer or of a learning rate scheduler"):
        for _ in range(6):
            x = fresh(lab, 4, 6)
            assert near(graphed(x), step(eager, x))
            assert mine.scheduler.state_dict() == eager.scheduler.state_dict()


@pytest.mark.parametrize("is_method", [True, False])
def test_what_a_call_counts_before_it_raises_stays_counted(lab: Lab, is_method: bool) -> None:
    class Loader:
        calls = 0

        def step(self, x: Tensor) -> Tensor:
            self.calls = min(self.calls + 1, 2)
            if self.calls == 1:
                raise KeyError("not ready")
            return x * 2

    loader = Loader()
    loader.calls = 0
    graphed = cgraph.graphed(loader.step if is_method else lambda x: loader.step(x))
    with pytest.raises(KeyError):
        graphed(fresh(lab, 3))
    for _ in range(4):
        x = fresh(lab, 3)
        assert torch.equal(graphed(x), x * 2)
    assert states(graphed) == ["captured"]
