"""Tensors that a function leaves elsewhere than in its result."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from lab import Lab, fresh

Kept = dict[str, Any]


def of_hook(kept: Kept, device: str) -> Callable[[Tensor], Any]:
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).to(device)
    net[0].register_forward_hook(lambda module, args, out: kept.update(last=out.detach()))
    return net


def of_list_in_hook(kept: Kept, device: str) -> Callable[[Tensor], Any]:
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).to(device)
    kept["list"] = []
    net[0].register_forward_hook(lambda module, args, out: kept["list"].append(out.detach()))
    return net


def of_dict(kept: Kept, device: str) -> Callable[[Tensor], Any]:
    def function(x: Tensor) -> Tensor:
        kept["last"] = x.sum()
        return x * 2

    return function


def of_object(kept: Kept, device: str) -> Callable[[Tensor], Any]:
    host = kept["host"] = SimpleNamespace(last=None)

    def function(x: Tensor) -> Tensor:
        host.last = x.sum()
        return x * 2

    return function


def of_cell(kept: Kept, device: str) -> Callable[[Tensor], Any]:
    last: Any = None

    def function(x: Tensor) -> Tensor:
        nonlocal last
        last = x.sum()
        return x * 2

    kept["function"] = lambda: last
    return function


def seen(kept: Kept) -> list[Tensor]:
    """Return the tensors kept so far."""
    if "list" in kept:
        return list(kept["list"])
    if "host" in kept:
        return [kept["host"].last]
    return [kept["last"] if "last" in kept else kept["function"]()]


@pytest.mark.filterwarnings("ignore:.*runs eagerly:UserWarning")
@pytest.mark.parametrize("made", [of_hook, of_list_in_hook, of_dict, of_object, of_cell])
def test_what_is_stored_is_that_of_the_last_call(lab: Lab, made: Any) -> None:
    found: list[list[list[Tensor]]] = []
    inputs = [fresh(lab, rows, 3) for rows in (2, 4, 2, 2, 4)]
    for graphs in (False, True):
        kept: Kept = {}
        torch.manual_seed(3)
        function = made(kept, lab.device)
        run = cgraph.graphed(function) if graphs else function
        found.append([])
        with torch.no_grad():
            for x in inputs:
                if not found[-1]:
                    for _ in range(4):  # some wait for objects that the first calls make
                        run(x)
                    kept.get("list", []).clear()
                run(x)
                found[-1].append([one.clone() for one in seen(kept)])
    torch.testing.assert_close(found[1], found[0])
