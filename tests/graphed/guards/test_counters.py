"""What a function leaves elsewhere than in its result: numbers, flags, modules and tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from graphed_calls import Case, method, states, twins_agree
from lab import Lab, fresh


def of_width(one: Any, x: Tensor) -> Tensor:
    one.width = one.width or x.shape[-1]
    return x * one.width  # type: ignore[no-any-return]


def take_away(one: Any, x: Tensor) -> Tensor:
    scale = one.space.scale if hasattr(one.space, "scale") else 1
    vars(one.space).pop("scale", None)
    return x * one.known.pop("scale", 1) * scale  # type: ignore[no-any-return]


class Once:
    is_first = True

    def __init__(self, lab: Lab) -> None:
        self.is_first = True


def once(one: Once, x: Tensor) -> Tensor:
    if one.is_first:
        one.is_first = False
        return x * 10
    return x * 2


def in_a_break(lab: Lab) -> Case:
    engine = SimpleNamespace(place=1)

    @cgraph.eager_break
    def counted(x: Tensor) -> Tensor:
        engine.place += 1
        return x + engine.place

    return Case(lambda x: counted(x * 2) * 3, state=lambda: engine.place)


class Normed(nn.Module):
    """A layer that its first data set up."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(3))
        self.is_ready = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_ready:
            self.shift.data.copy_(-x.detach().mean(0))
            self.is_ready = True
        return x + self.shift


def normed(lab: Lab) -> Case:
    module = Normed().to(lab.device)
    return Case(module, state=lambda: (module.shift, module.is_ready))


class Growing(nn.Module):
    """A layer that gets modules in a break, none of which it calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.calls = 0

    @cgraph.eager_break
    def grow(self) -> None:
        self.calls += 1
        if self.calls % 7 == 0:
            self.linear.add_module(f"extra{self.calls}", nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        self.grow()
        return self.linear(x)  # type: ignore[no-any-return]


def growing(lab: Lab) -> Case:
    module = Growing().to(lab.device)
    return Case(module, state=lambda: (module.calls, len([*module.linear.children()])))


CHANGED: dict[str, Callable[[Lab], Case]] = {
    "a number that only the first call sets": method(
        lambda lab: SimpleNamespace(width=0), of_width, state=vars
    ),
    "what the first call takes away": method(
        lambda lab: SimpleNamespace(known={"scale": 5}, space=SimpleNamespace(scale=3)),
        take_away,
        state=vars,
    ),
    "what only the first call does": method(Once, once, state=vars),
    "what a break counts": in_a_break,
    "modules that a break adds": growing,
    "what the first call sets up from its data": normed,
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("what", CHANGED)
def test_replays_leave_as_eager_calls_do(lab: Lab, what: str, grad: bool) -> None:
    graphed = twins_agree(lab, CHANGED[what], grad=grad, calls=9)
    assert states(graphed) == ["captured"]


@pytest.mark.parametrize("is_method", [True, False])
def test_what_a_call_counts_before_it_raises_stays_counted(lab: Lab, is_method: bool) -> None:
    class Loader:
        calls = 0

        def step(self, x: Tensor) -> Tensor:
            self.calls = min(self.calls + 1, 2)
            if self.calls == 1:
                raise KeyError("not ready")
            return x * 2

    loader = Loader()
    loader.calls = 0
    graphed = cgraph.graphed(loader.step if is_method else lambda x: loader.step(x))
    with pytest.raises(KeyError):
        graphed(fresh(lab, 3))
    for _ in range(4):
        x = fresh(lab, 3)
        assert torch.equal(graphed(x), x * 2)
    assert states(graphed) == ["captured"]


def hooked(lab: Lab, kept: Any, keep: Callable[[Any], object]) -> Case:
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).to(lab.device)
    net[0].register_forward_hook(lambda module, args, out: keep(out.detach()))
    return Case(net, state=lambda: kept)


def by_hook(lab: Lab) -> Case:
    kept: dict[str, Tensor] = {}
    return hooked(lab, kept, lambda out: kept.update(last=out))


def by_hook_in_list(lab: Lab) -> Case:
    kept: list[Tensor] = []
    return hooked(lab, kept, kept.append)


def into_dictionary(kept: Any, x: Tensor) -> Tensor:
    kept["last"] = x.sum()
    return x * 2


def into_object(host: Any, x: Tensor) -> Tensor:
    host.last = x.sum()
    return x * 2


def in_closure(lab: Lab) -> Case:
    last: Any = None

    def function(x: Tensor) -> Tensor:
        nonlocal last
        last = x.sum()
        return x * 2

    return Case(function, state=lambda: last)


STORED: dict[str, Callable[[Lab], Case]] = {
    "a dictionary by a hook": by_hook,
    "a list by a hook": by_hook_in_list,
    "a dictionary": method(lambda lab: {}, into_dictionary, state=dict),
    "an object": method(lambda lab: SimpleNamespace(last=None), into_object, state=vars),
    "a closure": in_closure,
}


@pytest.mark.filterwarnings("ignore:.*runs eagerly:UserWarning")
@pytest.mark.parametrize("place", STORED)
def test_what_each_call_stores_is_in(lab: Lab, place: str) -> None:
    def storing(lab: Lab) -> Case:
        rows = itertools.cycle((2, 4, 2, 2, 4))
        return replace(STORED[place](lab), inputs=lambda: (fresh(lab, next(rows), 3),))

    twins_agree(lab, storing, grad=False, calls=9, rtol=1.3e-6)
