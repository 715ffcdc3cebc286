"""Parameters that the loss does not depend on have no gradient, as in eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from lab import Lab, fresh


class Heads(nn.Module):
    """Two results, of which each has a part of its own besides a common one."""

    def __init__(self) -> None:
        super().__init__()
        self.common, self.first, self.second = (nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        z = self.common(x)
        return {"first": self.first(z), "second": self.second(z * y), "alone": y * 2}


def graphed(net: nn.Module, x: Tensor, y: Tensor, how: str) -> Any:
    if how == "callables":
        return cgraph.make_graphed_callables(net, (x, y))
    return cgraph.graphed(net, outputs=how)


@pytest.mark.parametrize("how", ["static", "clone", "callables"])
@pytest.mark.parametrize("names", [["first"], ["second"], ["alone"], ["first", "alone"]])
def test_gradients_are_those_of_eager_and_none_where_eager_has_none(
    lab: Lab, names: list[str], how: str
) -> None:
    theirs, ours = Heads().to(lab.device), Heads().to(lab.device)
    ours.load_state_dict(theirs.state_dict())
    sample = [fresh(lab, 2, 3).requires_grad_() for _ in range(2)]
    function = graphed(ours, *sample, how)
    optimizers = [
        torch.optim.AdamW(net.parameters(), 0.1, weight_decay=0.5) for net in (ours, theirs)
    ]
    for _ in range(3):
        x, y = (fresh(lab, 2, 3).requires_grad_() for _ in range(2))
        leaves: list[list[Tensor]] = []
        for net, call in ((ours, function), (theirs, theirs)):
            given = [one.detach().clone().requires_grad_() for one in (x, y)]
            net.zero_grad()
            found = call(*given)
            sum(found[name].square().sum() for name in names).backward()
            leaves.append([*given, *net.parameters()])
        for mine, right in zip(*leaves, strict=True):
            assert (mine.grad is None) is (right.grad is None)
            torch.testing.assert_close(mine.grad, right.grad)
        for optimizer in optimizers:
            optimizer.step()
        for mine, right in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine, right)


class Returning(nn.Module):
    """Returns an argument and a parameter as they are, beside what depends on them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.ones(())), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.inner(x) * self.scale, self.scale, x, self.inner(x)


@pytest.mark.parametrize("how", ["static", "clone"])
@pytest.mark.parametrize("places", [[0], [1], [2], [3], [1, 3], [1, 2], [0, 2]])
def test_what_is_returned_as_it_is_depends_on_itself(lab: Lab, places: list[int], how: str) -> None:
    theirs, ours = Returning().to(lab.device), Returning().to(lab.device)
    ours.load_state_dict(theirs.state_dict())
    function = cgraph.graphed(ours, outputs=how)  # type: ignore[call-overload]
    for _ in range(2):
        x = fresh(lab, 2, 3)
        both: list[list[Tensor]] = []
        for net, call in ((ours, function), (theirs, theirs)):
            given = x.clone().requires_grad_()
            net.zero_grad()
            found = call(given)
            sum(found[place].square().sum() for place in places).backward()
            both.append([given, *net.parameters()])
        for mine, right in zip(*both, strict=True):
            torch.testing.assert_close(mine.grad, right.grad)
