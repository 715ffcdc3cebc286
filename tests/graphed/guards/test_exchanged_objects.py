"""Exchanges by a function or between its calls: modules, generators, frames, flags."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import cgraph
from graphed_calls import Case, exchanges, method, nothing, sets, states, twins_agree
from lab import Lab, fresh

# Some of these functions run eagerly, and warn.
pytestmark = pytest.mark.filterwarnings("ignore:.*runs eagerly")


def drawing(lab: Lab) -> Case:
    seeded = [torch.Generator(lab.device).manual_seed(seed) for seed in (3, 4, 5)]
    host = SimpleNamespace(by=seeded[0])

    def function(x: Tensor) -> Tensor:
        return x + torch.rand(3, device=lab.device, generator=host.by)

    return Case(function, sets(host, "by", *seeded[1:]), shape=(3,))


def test_a_generator_that_is_exchanged_is_drawn_from(lab: Lab) -> None:
    twins_agree(lab, drawing, rtol=1.3e-6)


DRAWS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "poisson": lambda x, own: torch.poisson(x, generator=own),
    "binomial": lambda x, own: torch.binomial(x, x / x.sum(), generator=own),
    "exponential": lambda x, own: torch.empty_like(x).exponential_(generator=own),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_generators_of_all_operators_are_as_after_the_eager_calls(lab: Lab, kind: str) -> None:
    def draws(lab: Lab) -> Case:
        own = torch.Generator(lab.device).manual_seed(7)
        x = torch.full((4,), 30.0, device=lab.device)
        return Case(lambda x: DRAWS[kind](x, own), inputs=lambda: (x,))

    twins_agree(lab, draws, rtol=1.3e-6)


def frames(lab: Lab) -> Any:
    return deque([fresh(lab, 3) for _ in range(3)], maxlen=3)


def turned(frames: Any, x: Tensor) -> Tensor:
    frames.rotate()
    return x + frames[0]  # type: ignore[no-any-return]


FRAMES: dict[str, Callable[[Lab], Case]] = {
    "come between calls": method(
        frames,
        lambda frames, x: x + torch.stack([*frames]).sum(0),
        lambda frames: [lambda: frames.append(torch.randn_like(frames[0]))] * 7,
    ),
    "a function turns": method(frames, turned, lambda frames: [nothing] * 4, list),
}


@pytest.mark.parametrize("which", FRAMES)
def test_frames_are_followed_that(lab: Lab, which: str) -> None:
    twins_agree(lab, FRAMES[which], calls=1, rtol=1.3e-6)


def weighted(lab: Lab) -> Any:
    net: Any = nn.Linear(3, 3, device=lab.device)
    net.weight.steps, net.weight.scale = 0, fresh(lab, 1)
    return net


def by_steps(net: Any, x: Tensor) -> Tensor:
    net.weight.steps += 1
    return net(x) * net.weight.steps  # type: ignore[no-any-return]


ATTRIBUTES: dict[str, Callable[[Lab], Case]] = {
    "a number that calls change": method(
        weighted, by_steps, lambda net: [nothing] * 3, lambda net: net.weight.steps
    ),
    "a tensor that is exchanged": method(
        weighted,
        lambda net, x: net(x) * net.weight.scale,
        lambda net: exchanges(net.weight, "scale", 3),
    ),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("what", ATTRIBUTES)
def test_an_attribute_of_a_weight_is_that_of_eager(lab: Lab, what: str, grad: bool) -> None:
    twins_agree(lab, ATTRIBUTES[what], grad=grad, calls=1, rtol=1.3e-6)


def test_a_result_whose_gradient_is_to_be_kept_keeps_it(lab: Lab) -> None:
    net = nn.Linear(3, 3, device=lab.device)

    def function(x: Tensor) -> Tensor:
        y = net(x)
        y.retain_grad()
        return y  # type: ignore[no-any-return]

    graphed = cgraph.graphed(function)
    for _ in range(3):
        y = graphed(fresh(lab, 2, 3))
        (y * 3).sum().backward()
        assert torch.equal(y.grad, torch.full_like(y, 3))


class Counting(nn.Module):
    """A module with a buffer that each call gives other memory."""

    def __init__(self, lab: Lab) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(3, device=lab.device))

    def forward(self, x: Tensor) -> Tensor:
        self.count.data = self.count.data + 1
        return x * self.count


@pytest.mark.parametrize("where", ["module", "method", "argument"])
def test_a_buffer_that_gets_other_memory_gets_it_once_a_call(lab: Lab, where: str) -> None:
    def counting(lab: Lab) -> Case:
        net = Counting(lab)
        functions: dict[str, Any] = {"module": net, "method": net.forward}
        function = functions.get(where, lambda x, net: net(x))
        more = (net,) if where == "argument" else ()
        return Case(function, state=lambda: net.count, inputs=lambda: (fresh(lab, 3), *more))

    twins_agree(lab, counting, grad=False, calls=4)


def test_hooks_of_a_parameter_that_a_call_does_not_use_are_not_called(lab: Lab) -> None:
    net: Any = nn.Module()
    net.used, net.unused = nn.Linear(3, 3, device=lab.device), nn.Linear(3, 3, device=lab.device)
    heard: list[str] = []
    for name, one in net.named_parameters():
        one.register_hook(lambda grad, name=name: heard.append(name) or grad * 2)
        one.register_post_accumulate_grad_hook(lambda one, name=name: heard.append(f"{name} after"))

    graphed = cgraph.graphed(lambda x: net.used(x) * 3)
    x = fresh(lab, 2, 3)
    graphed(x)
    heard.clear()
    graphed(x).sum().backward()
    assert sorted(heard) == ["used.bias", "used.bias after", "used.weight", "used.weight after"]
    assert net.unused.weight.grad is None
    expected = 2 * 3 * x.sum(0).expand(3, 3)
    torch.testing.assert_close(net.used.weight.grad, expected)


@pytest.mark.parametrize("warmup", [1, 3])
@pytest.mark.parametrize("grad", [False, True])
def test_a_state_in_a_dictionary_that_begins_empty_is_that_of_eager(
    lab: Lab, grad: bool, warmup: int
) -> None:
    def summing(lab: Lab) -> Case:
        kept: dict[str, Tensor] = {}
        net = nn.Linear(3, 3, device=lab.device)

        def function(x: Tensor) -> Tensor:
            kept["sum"] = kept.get("sum", 0) + x.detach()
            return net(x) + kept["sum"]  # type: ignore[no-any-return]

        return Case(function, state=lambda: kept, shape=(3,))

    twins_agree(lab, summing, grad=grad, calls=4, rtol=1.3e-6, warmup=warmup)


def training(
    lab: Lab,
    changes: dict[int, Callable[[Any, Any], object]],
    parts: slice = slice(None),
    momentum: float = 0.0,
) -> Case:
    """Return steps that train parts of a network, with changes before some of seven calls."""
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(lab.device)
    optimizer = torch.optim.SGD(module[parts].parameters(), 0.1, momentum=momentum)

    def step(x: Tensor) -> Tensor:
        module.zero_grad()
        loss = module(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def state() -> list[Tensor]:
        return [one.detach() for one in module.parameters()]

    between = [partial(changes.get(call, nothing), module, optimizer) for call in range(1, 7)]
    return Case(step, between, state, shape=(4, 3))


@pytest.mark.parametrize("sizes", [None, [4]])
def test_a_training_step_inside_the_function_trains(lab: Lab, sizes: Any) -> None:
    make = partial(training, changes={}, momentum=0.9)
    graphed = twins_agree(lab, make, calls=1, rtol=1e-4, sizes=sizes)
    assert states(graphed) == ["captured"]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("when", [1, 3])
def test_parameters_of_a_group_that_an_optimizer_gets_are_trained(
    lab: Lab, momentum: float, when: int
) -> None:
    def add(module: nn.Sequential, optimizer: Any) -> None:
        optimizer.add_param_group({"params": [*module[2].parameters()], "lr": 0.05})

    make = partial(training, changes={when: add}, parts=slice(1), momentum=momentum)
    twins_agree(lab, make, calls=1, rtol=1.3e-6)


@pytest.mark.parametrize("kind", ["pre", "post"])
def test_hooks_of_an_optimizer_come_and_go(lab: Lab, kind: str) -> None:
    def halve(optimizer: torch.optim.Optimizer, *_: object) -> None:
        with torch.no_grad():
            for one in optimizer.param_groups[0]["params"]:
                (one.grad if kind == "pre" else one).mul_(0.5)

    def add(module: nn.Module, optimizer: Any) -> None:
        optimizer.handle = getattr(optimizer, f"register_step_{kind}_hook")(halve)

    def remove(module: nn.Module, optimizer: Any) -> None:
        optimizer.handle.remove()

    twins_agree(lab, partial(training, changes={2: add, 5: remove}), calls=1, rtol=1.3e-6)


def scaled(by: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: x * by


def test_all_ways_to_a_tensor_through_functions_are_followed(lab: Lab) -> None:
    first, second = fresh(lab, 3), fresh(lab, 3)

    def both(one: Callable[..., Tensor], other: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x: one(x) + other(x)

    a = b = scaled(first)
    twice = cgraph.graphed(lambda x: a(x) - b(x) * 2)
    named = cgraph.graphed(lambda x: first.sum() + c(x))
    c = scaled(first)
    nested = cgraph.graphed(lambda x: both(d, e)(x) + d(x) * 2)
    d = scaled(first)
    e = both(d, d)
    for call in range(6):
        if call == 2:
            b = c = scaled(second)
            e = both(scaled(second), d)
        x = fresh(lab, 3)
        assert_close(twice(x), a(x) - b(x) * 2)
        assert_close(named(x), first.sum() + c(x))
        assert_close(nested(x), both(d, e)(x) + d(x) * 2)
