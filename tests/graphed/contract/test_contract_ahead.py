"""The contract, "Ahead of time": each test quotes its sentence."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from cgraph.errors import CaptureError, StateError
from contract_calls import Box, counted, equal, runs_of, states_of
from graphed_calls import numbers
from lab import Lab, fresh
from networks import random_state


class Writing(nn.Module):
    """A module that writes a buffer, its argument and a tensor in a list, and draws numbers."""

    def __init__(self, lab: Lab) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(3))
        self.to(lab.device)
        self.tables = [torch.zeros(3, device=lab.device)]

    def forward(self, x: Tensor, into: Tensor) -> Tensor:
        self.seen.add_(x.sum(0))
        self.tables[0].mul_(0.5).add_(1)
        into.add_(x)
        return self.linear(x) * self.seen + nn.functional.dropout(x, 0.5)


def test_a_capture_ahead_of_time_puts_back_tensors_and_random_states(lab: Lab) -> None:
    """`.capture(*sample, sizes=…)` puts back tensors and random states that it wrote."""
    net = Writing(lab)
    twin = copy.deepcopy(net)
    counting, counter = counted(net)
    graphed = cgraph.graphed(counting)
    with torch.no_grad():
        x, into = fresh(lab, 4, 3), fresh(lab, 4, 3)
        kept, state = (x.clone(), into.clone()), random_state(lab)
        assert graphed.capture(x, into, progress=False) is graphed
        equal((x, into), kept)
        equal(random_state(lab), state)
        equal((net.state_dict(), net.tables), (twin.state_dict(), twin.tables))
        before = runs_of(counter)
        assert states_of(graphed) == {"captured"}
        for number in range(4):
            x, into = fresh(lab, 4, 3), fresh(lab, 4, 3)
            other = into.clone()
            torch.manual_seed(number)
            found = graphed(x, into)
            torch.manual_seed(number)
            equal(found, twin(x, other))
            equal((into, net.seen, net.tables), (other, twin.seen, twin.tables))
    assert runs_of(counter) == before == 2


def test_a_capture_of_a_training_step_puts_back_parameters_state_and_gradients(lab: Lab) -> None:
    """… puts back tensors … that it wrote."""
    net = nn.Linear(3, 3).to(lab.device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def step(net: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step(net, optimizer, fresh(lab, 4, 3))
    twin, other = copy.deepcopy((net, optimizer))
    for one, its in zip(twin.parameters(), net.parameters(), strict=True):
        one.grad = its.grad.clone()
    graphed = cgraph.graphed(lambda x: step(net, optimizer, x))
    graphed.capture(fresh(lab, 4, 3), progress=False)

    def state(net: nn.Module, optimizer: Any) -> Any:
        parameters = [*net.parameters()]
        momenta = [optimizer.state[one]["momentum_buffer"] for one in parameters]
        return [one.detach() for one in parameters], [one.grad for one in parameters], momenta

    equal(state(net, optimizer), state(twin, other))
    for _ in range(4):
        x = fresh(lab, 4, 3)
        equal(graphed(x), step(twin, other, x))
        equal(state(net, optimizer), state(twin, other))
    assert numbers(graphed)[:2] == (1, 4)


@pytest.mark.parametrize("given", [True, False], ids=["of the call", "of the options"])
def test_a_capture_of_sizes_makes_a_graph_of_each(lab: Lab, given: bool) -> None:
    """`.capture(*sample, sizes=…)`."""
    counting, counter = counted(lambda x: x * 2)
    sizes = [2, 4, 8]
    graphed = cgraph.graphed(counting, **({} if given else {"sizes": sizes}))
    with torch.no_grad():
        sample = fresh(lab, 3, 3)
        kept = sample.clone()
        graphed.capture(sample, progress=False, **({"sizes": sizes} if given else {}))
        equal(sample, kept)
        assert graphed.report().captured == 3
        before = runs_of(counter)
        for rows in sizes * 2:
            x = fresh(lab, rows, 3)
            equal(graphed(x), x * 2)
    assert runs_of(counter) == before


def _lazy_attribute(box: Box, x: Tensor) -> Tensor:
    if box.table is None:
        box.table = torch.full_like(x, 2.0)
    return x * box.table


def _lazy_dictionary(box: Box, x: Tensor) -> Tensor:
    if "k" not in box.tables:
        box.tables["k"] = x * 0 + 2.0
    return x * box.tables["k"]


def _flag(box: Box, x: Tensor) -> Tensor:
    if not box.is_ready:
        box.is_ready = True
    return x * 2


def _list(box: Box, x: Tensor) -> Tensor:
    if not box.items:
        box.items.append(2.0)
    return x * box.items[0]


def _other_function(box: Box, x: Tensor) -> Tensor:
    box.function = torch.sigmoid
    return torch.sigmoid(x)


STATE = [_lazy_attribute, _lazy_dictionary, _flag, _list, _other_function]


@pytest.mark.parametrize("make", STATE)
def test_a_sample_that_makes_state_raises_until_that_is_there(
    lab: Lab, make: Callable[[Box, Tensor], Tensor]
) -> None:
    """A sample that leaves new tensors or changes guarded values raises («make that state …»)."""
    box = Box(table=None, tables={}, items=[], is_ready=False, function=torch.tanh)
    counting, counter = counted(lambda x: make(box, x))
    graphed = cgraph.graphed(counting)
    with torch.no_grad():
        with pytest.raises(CaptureError, match=r"[Mm]ake that state first: call it once"):
            graphed.capture(fresh(lab, 3), progress=False)
        assert graphed.report().captured == 0
        for _ in range(2):
            x = fresh(lab, 3)
            equal(graphed(x), make(box, x))
        graphed.reset()
        graphed.capture(fresh(lab, 3), progress=False)
        before = runs_of(counter)
        for _ in range(3):
            x = fresh(lab, 3)
            equal(graphed(x), make(box, x))
    assert runs_of(counter) == before


class _Ready(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.is_ready = False

    def prepare(self) -> None:
        if not self.is_ready:
            with torch.no_grad():
                self.weight.fill_(2.0)
            self.is_ready = True

    def forward(self, x: Tensor) -> Tensor:
        self.prepare()
        return x * self.weight


@pytest.mark.parametrize("where", ["self", "closure", "argument"])
def test_a_flag_that_a_sample_sets_in_a_method_raises(lab: Lab, where: str) -> None:
    """… or changes guarded values raises."""
    net = _Ready().to(lab.device)
    graphed: Any = {
        "self": lambda: cgraph.graphed(net),
        "closure": lambda: cgraph.graphed(lambda x: net(x)),
        "argument": lambda: cgraph.graphed(lambda x, net: net(x)),
    }[where]()
    more = (net,) if where == "argument" else ()
    with torch.no_grad(), pytest.raises(CaptureError, match=r"is_ready.*call it once"):
        graphed.capture(fresh(lab, 3), *more, progress=False)


def test_a_sample_that_counts_raises(lab: Lab) -> None:
    """… or changes guarded values raises."""
    box = Box(n=0)

    def function(x: Tensor) -> Tensor:
        box.n += 1
        return x * 2

    with torch.no_grad(), pytest.raises(CaptureError, match="n "):
        cgraph.graphed(function).capture(fresh(lab, 3), progress=False)


def test_a_capture_that_fails_puts_back_what_it_wrote(lab: Lab) -> None:
    """… puts back tensors and random states that it wrote."""
    table, state = torch.zeros(3, device=lab.device), random_state(lab)

    def function(x: Tensor) -> Tensor:
        table.add_(x)
        return x * table.sum().item() + torch.rand_like(x)

    with torch.no_grad(), pytest.raises(CaptureError):
        x = torch.ones(3, device=lab.device)
        cgraph.graphed(function).capture(x, progress=False)
    equal(table, torch.zeros_like(table))
    equal(random_state(lab), state)


NEEDS: dict[str, Callable[[Box, Callable[[Tensor], Tensor], Lab], object]] = {
    "shape": lambda _, call, lab: call(fresh(lab, 5)),
    "dtype": lambda _, call, lab: call(fresh(lab, 3).double()),
    "plain": lambda box, call, lab: setattr(box, "by", 3.0) or call(fresh(lab, 3)),
    "object": lambda box, call, lab: setattr(box, "f", lambda x: x) or call(fresh(lab, 3)),
    "tensor": lambda box, call, lab: setattr(box, "t", fresh(lab, 3)) or call(fresh(lab, 3)),
}


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("case", NEEDS)
def test_a_frozen_function_refuses_captures(lab: Lab, case: str, ahead: bool) -> None:
    """`.freeze()`: a call that needs a capture raises."""
    box = Box(by=2.0, f=lambda x: x + 1, t=fresh(lab, 3))
    kept = dict(vars(box))
    counting, counter = counted(lambda x: box.f(x[:3]) * box.by * box.t)
    graphed = cgraph.graphed(counting)
    with torch.no_grad():
        if ahead:
            graphed.capture(fresh(lab, 3), progress=False)
        else:
            for _ in range(2):
                graphed(fresh(lab, 3))
        assert graphed.freeze() is graphed and graphed.is_frozen
        before = runs_of(counter)
        with pytest.raises(StateError, match="frozen"):
            NEEDS[case](box, graphed, lab)
        vars(box).update(kept)
        for _ in range(2):
            x = fresh(lab, 3)
            equal(graphed(x), (x + 1) * 2.0 * box.t)
        assert runs_of(counter) == before
        graphed.reset()
        NEEDS[case](box, graphed, lab)
    assert runs_of(counter) == before + 1
