"""State set up by a refused call is not there in part: another call sets it up anew."""

from __future__ import annotations

import threading
import time
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import cgraph
from lab import Lab, fresh

# Each of these functions runs eagerly, and warns.
pytestmark = pytest.mark.filterwarnings("ignore:.*runs eagerly")


def table(x: Tensor) -> Tensor:
    return torch.arange(3.0, device=x.device)


def once(lab: Lab, kind: str) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """Return a module, and a function whose first call changes the module's parts."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to(lab.device)
    part: Any = net[0]
    host = types.SimpleNamespace(done=False, count=0, parts=nn.ParameterList())

    def change() -> None:
        if kind == "hook":
            part.register_forward_hook(lambda _module, _args, result: result * 2)
        elif kind == "buffer":
            part.register_buffer("scale", torch.full((3,), 2.0, device=lab.device))
        elif kind == "larger":
            part.weight = nn.Parameter(torch.ones(4, 3, device=lab.device))
            part.out_features = 4
        elif kind == "list":
            host.parts.append(nn.Parameter(torch.ones(3, device=lab.device)))
        elif kind == "pruned":
            prune.l1_unstructured(part, "weight", amount=0.5)
        else:
            parametrize.register_parametrization(part, "weight", nn.Tanh())

    def function(x: Tensor) -> Tensor:
        if not host.done:
            change()
            host.done = True
        host.count += 1
        y = nn.functional.linear(x, part.weight) if kind == "larger" else net(x)
        return y.sum(-1) * len(host.parts or [1]) * host.count

    return net, function


@pytest.mark.parametrize("kind", ["hook", "buffer", "larger", "list", "pruned", "parametrized"])
@pytest.mark.parametrize("grad", [False, True])
def test_modules_that_a_refused_call_has_changed_are_changed_once(
    lab: Lab, kind: str, grad: bool
) -> None:
    torch.manual_seed(5)
    net, function = once(lab, kind)
    torch.manual_seed(5)
    other, eager = once(lab, kind)
    graphed = cgraph.graphed(function)
    with torch.set_grad_enabled(grad):
        for _ in range(4):
            x = fresh(lab, 2, 3)
            torch.testing.assert_close(graphed(x), eager(x))
    assert [*net.state_dict()] == [*other.state_dict()]


def test_what_other_threads_put_where_a_call_was_refused_stays(lab: Lab) -> None:
    host = types.SimpleNamespace(calls=0, rows=[0.5], table={}, seen=None)
    is_over, count = threading.Event(), [0]

    def fill() -> None:
        while not is_over.is_set():
            host.rows.append(count[0])
            host.table[count[0]] = count[0]
            count[0] += 1
            time.sleep(0.0005)

    def function(x: Tensor) -> Tensor:
        if host.seen is None:
            host.seen, host.table["own"] = True, table(x)
        host.calls += 1
        return x * host.table["own"] * host.rows[0] * host.calls

    thread = threading.Thread(target=fill)
    thread.start()
    try:
        graphed = cgraph.graphed(function)
        for number in range(1, 4):
            x = fresh(lab, 3)
            torch.testing.assert_close(graphed(x), x * table(x) * 0.5 * number)
    finally:
        is_over.set()
        thread.join()
    assert len(host.rows) == len(host.table) == count[0] + 1


@pytest.mark.parametrize("grad", [False, True])
def test_weights_that_the_first_call_sets_from_its_data_are_set(lab: Lab, grad: bool) -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3, device=lab.device))

        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "is_set"):
                with torch.no_grad():
                    self.scale.copy_(x.std(0) + 0.5)
                self.is_set = True
            return x * self.scale

    net = Norm()
    graphed = cgraph.graphed(net)
    with torch.set_grad_enabled(grad):
        first = fresh(lab, 4, 3)
        expected = first.std(0) + 0.5
        torch.testing.assert_close(graphed(first), first * expected)
        for _ in range(3):
            x = fresh(lab, 4, 3)
            torch.testing.assert_close(graphed(x), x * expected)


def test_a_counter_is_put_back_beside_weights_that_torch_computes_in_each_call(lab: Lab) -> None:
    calls = 0
    net = nn.LSTM(3, 3).to(lab.device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(net, "weight_hh_l0")

    def function(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x * calls + (net(x)[0] * 0).detach()

    graphed = cgraph.graphed(function)
    with torch.no_grad():
        for number in range(1, 5):
            x = fresh(lab, 2, 1, 3)
            torch.testing.assert_close(graphed(x), x * number)
