"""What callers change of optimizers, hooks and frozen parameters between captured steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import cgraph
from graphed_calls import numbers
from lab import Lab, fresh

Wrap = Callable[[Any], Any]


def plain(function: Any) -> Any:
    """The function itself."""
    return function


def both(lab: Lab, run: Callable[[Wrap], list[Any]]) -> None:
    """Compare what a run gives with graphed functions and without."""
    for got, right in zip(run(cgraph.graphed), run(plain), strict=True):
        assert_close(got, right)


def after_steps(
    wrap: Wrap,
    weight: nn.Parameter,
    optimizer: torch.optim.Optimizer,
    change: Callable[[bool], None],
) -> Tensor:
    """A weight after four steps, of which the last two come after a change."""

    @wrap
    def step(x: Tensor) -> None:
        weight.grad = None
        (weight * x).sum().backward()
        optimizer.step()

    for place in range(4):
        change(place >= 2)
        step(torch.ones_like(weight))
    return weight.detach()


@pytest.mark.parametrize("set_to_none", [False, True])
def test_a_parameter_that_is_unfrozen_later_steps_from_then_on(lab: Lab, set_to_none: bool) -> None:
    def run(wrap: Wrap) -> list[Any]:
        body, head = (nn.Parameter(torch.ones(1, device=lab.device)) for _ in range(2))
        both = [body, head]
        optimizer = torch.optim.SGD(both, lr=0.1)

        @wrap
        def step() -> Tensor:
            norm = nn.utils.clip_grad_norm_(both, 10.0)
            optimizer.step()
            return norm * 1

        found: list[Any] = []
        for place in range(6):
            body.requires_grad_(place >= 2)
            optimizer.zero_grad(set_to_none=set_to_none)
            (body * 2 + head * 3).sum().backward()
            found += [step().clone(), body.detach().clone(), head.detach().clone()]
        return found

    both(lab, run)


def test_a_frozen_parameter_with_a_gradient_that_comes_later_steps(lab: Lab) -> None:
    def run(wrap: Wrap) -> list[Any]:
        one, other = (nn.Parameter(torch.ones(1, device=lab.device)) for _ in range(2))
        other.requires_grad_(False)
        optimizer = torch.optim.SGD([one, other], lr=0.1)
        step = wrap(lambda: optimizer.step())
        found: list[Any] = []
        for place in range(4):
            one.grad = torch.ones_like(one)
            other.grad = torch.ones_like(other) if place >= 2 else None
            step()
            found += [one.detach().clone(), other.detach().clone()]
        return found

    both(lab, run)


class Sign(torch.optim.Optimizer):
    """An optimizer of the user's with an attribute of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.k = 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                one.sub_(one.grad.sign() * self.k, alpha=group["lr"])


def test_attributes_of_an_optimizer_of_the_users_are_followed(lab: Lab) -> None:
    def run(wrap: Wrap) -> list[Any]:
        weight = nn.Parameter(torch.ones(1, device=lab.device))
        optimizer = Sign([weight])

        def change(is_later: bool) -> None:
            optimizer.k = 10.0 if is_later else 1.0

        return [after_steps(wrap, weight, optimizer, change)]

    both(lab, run)


def test_settings_of_optimizers_and_schedulers_that_code_reads_are_followed(lab: Lab) -> None:
    def run(wrap: Wrap) -> list[Any]:
        weight = nn.Parameter(torch.ones(1, device=lab.device))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        decay = wrap(lambda x: x * optimizer.param_groups[0]["lr"])
        last = wrap(lambda x: x * scheduler.get_last_lr()[0] + scheduler.last_epoch)
        found = []
        for place in range(4):
            if place == 2:
                optimizer.step()
                scheduler.step()
            x = torch.ones(1, device=lab.device)
            found += [decay(x).clone(), last(x).clone()]
        return found

    both(lab, run)


def scale(one: nn.Parameter, cfg: Any) -> None:
    """Scale a gradient."""
    one.grad.mul_(cfg.k)


HOOKS: dict[str, Callable[[nn.Parameter, torch.optim.Optimizer, Any], object]] = {
    "a leaf": lambda weight, _, cfg: weight.register_hook(lambda grad: grad * cfg.k),
    "a leaf that has its gradient": lambda weight, _, cfg: (
        weight.register_post_accumulate_grad_hook(lambda one: scale(one, cfg))
    ),
    "a step": lambda weight, optimizer, cfg: optimizer.register_step_pre_hook(
        lambda *_: scale(weight, cfg)
    ),
}


class Config:
    """A setting."""

    k = 1.0


@pytest.mark.parametrize("kind", HOOKS)
def test_what_hooks_of_leaves_and_steps_read_is_followed(lab: Lab, kind: str) -> None:
    def run(wrap: Wrap) -> list[Any]:
        weight, cfg = nn.Parameter(torch.ones(1, device=lab.device)), Config()
        optimizer = torch.optim.SGD([weight], lr=0.1)
        HOOKS[kind](weight, optimizer, cfg)

        def change(is_later: bool) -> None:
            cfg.k = 3.0 if is_later else 1.0

        return [after_steps(wrap, weight, optimizer, change)]

    both(lab, run)


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
def test_a_hook_that_counts_is_called_as_often_as_eagerly(lab: Lab) -> None:
    weight, count = nn.Parameter(fresh(lab, 3)), Config()

    def counts(grad: Tensor) -> Tensor:
        count.k += 1
        return grad * 2

    weight.register_hook(counts)

    @cgraph.graphed
    def step(x: Tensor) -> None:
        weight.grad = None
        (weight * x).sum().backward()

    for place in range(5):
        x = fresh(lab, 3)
        step(x)
        assert count.k == place + 2
        assert_close(weight.grad, x * 2)
    assert numbers(step)[0] == 0
