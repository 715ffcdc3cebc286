"""The contract, "Guarded", parts of modules: each test quotes its sentence."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from contract_calls import changed, equal
from lab import Lab, fresh


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


class Net(nn.Module):
    """A module with all kinds of parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.named = nn.ModuleDict({"a": nn.LayerNorm(3)})
        self.register_buffer("offset", torch.ones(3))
        self.drop = nn.Dropout(0.0)
        self.by = 1.0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.drop(self.named["a"](x)) * self.by + self.offset


def _data(net: Net) -> None:
    net.layers[0].weight.data = net.layers[0].weight.data * 2


MODULES: dict[str, Callable[[Net], object]] = {
    "attribute": lambda net: setattr(net, "by", 2.0),
    "append": lambda net: net.layers.append(nn.Linear(3, 3).to(net.offset.device)),
    "swap": lambda net: net.layers.__setitem__(0, nn.Linear(3, 3).to(net.offset.device)),
    "parameter": lambda net: setattr(
        net.layers[1], "bias", nn.Parameter(torch.ones_like(net.offset))
    ),
    "data": _data,
    "buffer": lambda net: setattr(net, "offset", net.offset * 2),
    "in place": lambda net: net.offset.mul_(2),
    "dictionary": lambda net: net.named.update({"a": nn.Tanh()}),
    "eps": lambda net: setattr(net.named["a"], "eps", 0.5),
    "forward": lambda net: setattr(net.named["a"], "forward", torch.tanh),
    "double": lambda net: setattr(net, "layers", nn.ModuleList([net.layers[0]] * 2)),
}


@pytest.mark.parametrize("by_name", MODULES)
@pytest.mark.parametrize("where", ["self", "argument", "closure", "method"])
def test_what_modules_have_is_guarded(lab: Lab, where: str, by_name: str) -> None:
    """… starting at the function, its `self`, the objects among its arguments and each module."""
    net = Net().to(lab.device)
    change = functools.partial(MODULES[by_name], net)
    if where == "argument":
        changed(lab, lambda x, one: one(x), change, args=lambda: (net,))
        return
    functions = {"self": net, "closure": lambda x: net(x), "method": net.forward}
    changed(lab, functions[where], change)


@pytest.mark.parametrize("case", ["training", "inner training", "hook", "pre hook", "removed"])
def test_training_flags_and_hooks_of_modules_are_guarded(lab: Lab, case: str) -> None:
    """Modules: training flag and hooks too."""
    inner = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to(lab.device)
    net = nn.Sequential(inner, nn.Tanh()).eval()
    handles: list[Any] = []

    def hook(*given: Any) -> Any:
        return given[-1] * 2 if isinstance(given[-1], Tensor) else (given[-1][0] * 2,)

    changes: dict[str, list[Callable[[], object]]] = {
        "training": [lambda: net.train(), lambda: net.eval()],
        "inner training": [lambda: inner[1].train(), lambda: inner[1].eval()],
        "hook": [lambda: inner[0].register_forward_hook(hook)],
        "pre hook": [lambda: inner[0].register_forward_pre_hook(hook)],
        "removed": [
            lambda: handles.append(net.register_forward_hook(hook)),
            lambda: handles[0].remove(),
        ],
    }
    follow_changes(lab, cgraph.graphed(net), net, changes[case])


def follow_changes(
    lab: Lab, graphed: Any, net: nn.Module, changes: list[Callable[[], object]]
) -> None:
    """Compare as ``changed``, for modules that write buffers: restore these before eager runs."""
    for change in (lambda: None, *changes):
        change()
        for _ in range(4):
            x = fresh(lab, 5, 3)
            before = [one.clone() for one in net.buffers()]
            expected = net(x)
            after = [one.clone() for one in net.buffers()]
            for one, old in zip(net.buffers(), before, strict=True):
                one.copy_(old)
            equal(graphed(x), expected)
            equal([*net.buffers()], after)
