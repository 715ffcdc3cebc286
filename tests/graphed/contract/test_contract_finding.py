"""The contract, "Finding violations": each test quotes its sentence."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from cgraph.errors import CompareError
from contract_calls import Box, counted, equal, runs_of
from lab import Lab, fresh
from networks import leaf, network

WORDS = {"debug": {"debug": "compare"}, "check_every": {"check_every": 1}}


@pytest.fixture
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


without_gradients = pytest.mark.usefixtures("_without_gradients")


def hidden(box: Box, *parts: str) -> Any:
    """Return an attribute under a name that stands in no code."""
    return getattr(box, "".join(parts))


def _number(box: Box, x: Tensor) -> Tensor:
    return x * hidden(box, "sc", "ale") + 1


def _table(box: Box, x: Tensor) -> Tensor:
    return x * hidden(box, "ta", "ble") + 1


def _branch(box: Box, x: Tensor) -> Tensor:
    return x.tanh() if hidden(box, "fl", "ag") else x.relu()


def _change(box: Box) -> None:
    box.scale, box.table, box.flag = 5.0, box.table * 2 + 1, False


FUNCTIONS: dict[str, tuple[Callable[[Box, Tensor], Tensor], str]] = {
    "number": (_number, "mul"),
    "table": (_table, "mul"),
    "branch": (_branch, "tanh|relu"),
}


def boxed(lab: Lab) -> Box:
    """Return an object that functions read under hidden names."""
    return Box(scale=2.0, table=fresh(lab, 3), flag=True)


@without_gradients
@pytest.mark.parametrize("case", FUNCTIONS)
def test_debug_compare_compares_each_call(lab: Lab, case: str) -> None:
    """`debug="compare"` (each call)."""
    function, operator = FUNCTIONS[case]
    box = boxed(lab)
    graphed = cgraph.graphed(lambda x: function(box, x), debug="compare")
    for _ in range(5):
        x = torch.randn_like(box.table)
        equal(graphed(x), function(box, x))
    _change(box)
    with pytest.raises(CompareError, match=operator) as caught:
        graphed(-torch.rand(3, device=lab.device) - 1)
    assert "test_contract_finding.py" in str(caught.value)
    assert caught.value.operator is not None


@without_gradients
@pytest.mark.parametrize("by", ["option", "environment"])
@pytest.mark.parametrize("count", [1, 3])
def test_check_every_compares_one_replay_in_so_many(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, count: int, by: str
) -> None:
    """`check_every=N` / `CGRAPH_CHECK=N` (one replay in N against eager on copies …)."""
    box = boxed(lab)
    if by == "environment":
        monkeypatch.setenv("CGRAPH_CHECK", str(count))
    options = {"check_every": count} if by == "option" else {}
    graphed = cgraph.graphed(lambda x: _number(box, x), **options)
    for _ in range(2 + 3 * count):
        x = fresh(lab, 3)
        equal(graphed(x), x * 2.0 + 1)
    _change(box)
    raised = []
    for _ in range(3 * count):
        x = fresh(lab, 3)
        try:
            equal(graphed(x), x * 2.0 + 1)
            raised.append(False)
        except CompareError:
            raised.append(True)
    assert sum(raised) == 3, raised
    places = [place for place, one in enumerate(raised) if one]
    assert [b - a for a, b in itertools.pairwise(places)] == [count, count]


@without_gradients
@pytest.mark.parametrize("option", WORDS)
def test_the_error_names_operator_line_and_frozen_value(lab: Lab, option: str) -> None:
    """… operator, line, frozen value."""
    box = boxed(lab)

    def function(x: Tensor) -> Tensor:
        y = x + 1
        by = hidden(box, "sc", "ale")
        return y * by  # the line

    line = function.__code__.co_firstlineno + 3
    graphed = cgraph.graphed(function, **WORDS[option])
    for _ in range(4):
        x = fresh(lab, 3)
        equal(graphed(x), (x + 1) * 2.0)
    box.scale = 5.0
    with pytest.raises(CompareError) as caught:
        graphed(fresh(lab, 3))
    text = str(caught.value)
    assert "aten.mul" in text, text
    assert f"test_contract_finding.py:{line}" in text, text
    assert "2.0" in text and "5.0" in text, text
    assert (caught.value.output, "mul" in str(caught.value.operator)) == ("result", True)


@pytest.mark.parametrize("option", WORDS)
def test_a_checked_call_leaves_what_eager_leaves_once(lab: Lab, option: str) -> None:
    """… against eager on copies."""

    def function(table: Tensor, net: nn.Module, x: Tensor, into: Tensor) -> Tensor:
        table.add_(x.sum(0))
        into.mul_(2)
        return net(x) * table + torch.rand_like(x)

    net = nn.Linear(3, 3).to(lab.device)
    tables = [torch.zeros(3, device=lab.device) for _ in range(2)]
    counting, counter = counted(lambda x, into: function(tables[0], net, x, into))
    graphed = cgraph.graphed(counting, **WORDS[option])
    with torch.no_grad():
        for number in range(7):
            x, into = fresh(lab, 4, 3), fresh(lab, 2)
            twin = into.clone()
            torch.manual_seed(number)
            found = graphed(x, into)
            after = torch.rand(2, device=lab.device)
            torch.manual_seed(number)
            expected = function(tables[1], net, x, twin)
            equal((found, into, tables[0]), (expected, twin, tables[1]))
            equal(after, torch.rand(2, device=lab.device))
    assert runs_of(counter) >= 6


@pytest.mark.parametrize("option", WORDS)
def test_checked_calls_with_gradients_are_as_eager(lab: Lab, option: str) -> None:
    """`debug="compare"` (each call), `check_every=N`."""
    net = network(lab)
    graphed = cgraph.graphed(net, **WORDS[option])
    for _ in range(5):
        x = leaf(lab, 2, 6)
        other = x.detach().clone().requires_grad_()
        found, expected = graphed(x), net(other)
        torch.testing.assert_close(found, expected)
        found.square().sum().backward()
        first = [one.grad.clone() for one in net.parameters()]
        net.zero_grad()
        expected.square().sum().backward()
        torch.testing.assert_close(first, [one.grad for one in net.parameters()])
        torch.testing.assert_close(x.grad, other.grad)
        net.zero_grad()


@pytest.mark.parametrize("option", WORDS)
def test_checked_training_steps_are_as_eager(lab: Lab, option: str) -> None:
    """`debug="compare"` (each call), `check_every=N`."""
    pairs = []
    for _ in range(2):
        torch.manual_seed(3)
        net = network(lab)
        pairs.append((net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)))

    def step(net: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    graphed = cgraph.graphed(lambda x: step(*pairs[0], x), **WORDS[option])
    for _ in range(7):
        x = fresh(lab, 4, 6)
        torch.testing.assert_close(graphed(x), step(*pairs[1], x))
        for one, other in zip(pairs[0][0].parameters(), pairs[1][0].parameters(), strict=True):
            torch.testing.assert_close(one, other)
    assert graphed.report().captured == 1


EXPLAINED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "item": (lambda x: x * x.sum().item(), "host read"),
    "mask": (lambda x: x[x > 0].sum(), "shape"),
    "tolist": (lambda x: x * x.tolist()[0], "host read"),
}


@without_gradients
@pytest.mark.parametrize("case", EXPLAINED)
def test_explain_lists_what_a_capture_refuses(lab: Lab, case: str) -> None:
    """… `explain`."""
    function, kind = EXPLAINED[case]
    graphed = cgraph.graphed(function)
    for one in (function, graphed):
        x = torch.ones(3, device=lab.device)
        found = cgraph.explain(one, x)
        assert not found.ok
        assert kind in {finding.kind for finding in found.findings}
        assert all("test_contract_finding.py" in one.place for one in found.findings)
        equal(found.result, function(x))
    assert graphed.report().captured == 0
    assert cgraph.explain(lambda x: x * 2, fresh(lab, 3)).ok
