"""Graphed functions with breaks write state once in each call, however they are captured."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import cgraph
from lab import Lab, fresh


@cgraph.eager_break
def looked_at(x: Tensor) -> Tensor:
    return x * 2


class Counting(nn.Module):
    """Counts its calls in a buffer, before a break, inside it or behind it."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.register_buffer("count", torch.zeros(1))

    def add(self, where: str) -> None:
        if where == self.where:
            self.count.add_(1)

    def forward(self, x: Tensor) -> Tensor:
        self.add("before")
        y = self.broken(x)
        self.add("behind")
        return y + self.count

    @cgraph.eager_break
    def broken(self, x: Tensor) -> Tensor:
        self.add("inside")
        return x * 2


@pytest.mark.parametrize("measure", [False, True])
@pytest.mark.parametrize("warmup", [0, 1, 3])
@pytest.mark.parametrize("where", ["before", "inside", "behind"])
def test_a_buffer_is_counted_up_once_in_each_call(
    lab: Lab, where: str, warmup: int, measure: bool
) -> None:
    ours, theirs = Counting(where).to(lab.device), Counting(where).to(lab.device)
    function = cgraph.graphed(ours, warmup=warmup, measure=measure)
    with torch.no_grad():
        for rows in (2, 2, 3, 2):
            x = fresh(lab, rows)
            torch.testing.assert_close(function(x), theirs(x))
            assert torch.equal(ours.count, theirs.count)


@pytest.mark.parametrize("warmup", [0, 1])
def test_a_static_argument_is_written_once_in_each_call(lab: Lab, warmup: int) -> None:
    def store(x: Tensor, cache: Tensor) -> Tensor:
        cache.add_(x)
        return looked_at(x) + cache

    function = cgraph.graphed(store, static_argnames="cache", warmup=warmup)
    for _ in range(2):  # another cache each time
        cache = torch.zeros(3, device=lab.device)
        expected = torch.zeros(3, device=lab.device)
        for _ in range(3):
            x = fresh(lab, 3)
            torch.testing.assert_close(function(x, cache), store(x, expected))
            assert torch.equal(cache, expected)


def test_a_ladder_of_captures_with_breaks_writes_no_state(lab: Lab) -> None:
    net = Counting("before").to(lab.device)
    function = cgraph.graphed(net, sizes=[1, 2, 4], warmup=0, measure=False)
    with torch.no_grad():
        function.capture(fresh(lab, 4))
        assert not net.count.any()
        x = fresh(lab, 2)
        assert torch.equal(function(x), x * 2 + 1)


class Lazy(nn.Module):
    """Makes modules and a parameter in its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.is_made, self.inner, self.parts = False, nn.Identity(), nn.ModuleList()
        self.register_parameter("scale", None)

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_made:
            self.inner = nn.Linear(3, 3, device=x.device)
            self.scale = nn.Parameter(torch.full((3,), 2.0, device=x.device))
            self.parts.append(nn.Linear(3, 3, device=x.device))
            self.is_made = True
        return looked_at(x) + self.parts[0](self.inner(x)) * self.scale


@pytest.mark.parametrize("warmup", [0, 1])
def test_modules_that_the_first_call_makes_have_their_weights(lab: Lab, warmup: int) -> None:
    net = Lazy()
    function = cgraph.graphed(net, warmup=warmup, measure=False)
    with torch.no_grad():
        for _ in range(3):
            x = fresh(lab, 2, 3)
            torch.testing.assert_close(function(x), net(x))
        assert len(net.parts) == 1
        assert all(one.isfinite().all() and one.any() for one in net.parameters())
        net.inner = nn.Linear(3, 3, device=lab.device)
        x = fresh(lab, 2, 3)
        torch.testing.assert_close(function(x), net(x))


def test_a_break_that_returns_an_object_with_tensors_makes_the_calls_eager(lab: Lab) -> None:
    class Pair:
        def __init__(self, one: Tensor) -> None:
            self.one = one

    function = cgraph.graphed(lambda x: cgraph.eager_break(Pair)(x * 2).one + 1)
    x = fresh(lab, 3)
    with pytest.warns(UserWarning, match=r"a \S*Pair, whose tensors pytree does not know"):
        torch.testing.assert_close(function(x), x * 2 + 1)
    x = fresh(lab, 3)
    torch.testing.assert_close(function(x), x * 2 + 1)
