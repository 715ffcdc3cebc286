"""What callers change of optimizers, hooks and frozen parameters between captured steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing import assert_close

import cgraph
from lab import Lab

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
