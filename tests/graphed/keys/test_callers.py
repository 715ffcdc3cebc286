"""The callers of a graphed method do not count for its keys, but everything that it reads does."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgraph
from graphed_calls import near, numbers
from lab import Lab, fresh


class Counted(nn.Module):
    """A counter of its calls that reads the count."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls, self.shown = nn.Linear(4, 4), 0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls % 3 == 0:
            self.shown += 1
        return self.layer(x)


class Trainer:
    """A trainer that counts in a method with the name of an optimizer's."""

    def __init__(self, device: str) -> None:
        self.model = nn.Linear(4, 4).to(device)
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.encoder, self.steps, self.shown = Counted().to(device), 0, 0
        self.run = cgraph.graphed(self._run)

    def _run(self, x: Tensor) -> Tensor:
        self.opt.zero_grad()
        loss = self.model.forward(x).square().mean()
        loss.backward()
        self.opt.step()
        return loss.detach()

    def step(self, x: Tensor) -> Tensor:
        self.steps += 1
        if self.steps % 3 == 0:
            self.shown += 1
        return self.run(self.encoder(x).detach())

    forward = step


def test_what_a_method_counts_of_the_name_of_an_optimizers_makes_no_keys(lab: Lab) -> None:
    trainer = Trainer(lab.device)
    losses = [float(trainer.step(fresh(lab, 2, 4) / 8)) for _ in range(12)]
    assert len(set(losses)) == 12
    assert numbers(trainer.run)[0] == 1
    assert numbers(trainer.run)[1] >= 11


class Scaled(nn.Module):
    """A module that reads a number in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 4), 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.scale

    def of_owner(self, x: Tensor) -> Any:
        return self.owner()(x)  # type: ignore[operator]


def called(module: nn.Module, x: Tensor) -> Any:
    return module(x)


class Ways(nn.Module):
    """A module that reads its own number, or its part's, in many ways."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.scale, self.names = Scaled(), 3.0, ["part"]
        self.part.owner = weakref.ref(self)  # type: ignore[assignment]

    def itself(self) -> Ways:
        return self

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.scale

    def called_itself(self, x: Tensor) -> Any:
        return self(x)

    def handed_on(self, x: Tensor) -> Any:
        return called(self, x)

    def of_another_name(self, x: Tensor) -> Tensor:
        me = self
        return me.scaled(x)

    def inside(self, x: Tensor) -> Tensor:
        return sum((self.scaled(row) for row in x), torch.zeros_like(x[0]))

    def bound(self, x: Tensor) -> Tensor:
        scaled = self.scaled
        return scaled(x)

    def by_text(self, x: Tensor) -> Any:
        return getattr(self, "sca" + "led")(x)

    def of_class(self, x: Tensor) -> Any:
        return type(self).scaled(self, x)

    def all_parts(self, x: Tensor) -> Tensor:
        for part in self.children():
            x = part(x)
        return x

    def by_list(self, x: Tensor) -> Any:
        return self._modules[self.names[0]](x)  # type: ignore[misc]

    def by_method_of_torchs(self, x: Tensor) -> Any:
        return self.get_submodule(self.names[0])(x)

    def by_call(self, x: Tensor) -> Any:
        return self.__call__(x)

    def by_what_returns_it(self, x: Tensor) -> Tensor:
        return self.eval().scaled(x)

    def by_own_method_that_returns_it(self, x: Tensor) -> Tensor:
        return self.itself().scaled(x)

    def by_class(self, x: Tensor) -> Any:
        return self.__class__.scaled(self, x)

    def by_dictionary(self, x: Tensor) -> Any:
        return self.__dict__["_modules"]["part"](x)

    def by_weak_reference_of_a_part(self, x: Tensor) -> Any:
        return self.part.of_owner(x)

    def part_of_it(self, x: Tensor) -> Any:
        return self.part(x)

    def method_of_part(self, x: Tensor) -> Tensor:
        return self.part.scaled(x)

    def by_function(self, x: Tensor) -> Any:
        return torch.func.functional_call(self.part, {}, (x,))


WAYS = [name for name in vars(Ways) if name[:1] != "_" and name not in ("forward", "itself")]


@pytest.mark.parametrize("name", WAYS)
def test_a_number_that_a_method_comes_to_is_that_of_each_call(lab: Lab, name: str) -> None:
    module = Ways().to(lab.device)
    eager: Callable[[Tensor], Tensor] = getattr(module, name)
    graphed = cgraph.graphed(eager)
    with torch.no_grad():
        for scale in (2.0, 2.0, 5.0, 5.0, 2.0):
            module.scale = module.part.scale = scale
            x = fresh(lab, 3, 4)
            assert near(graphed(x), eager(x)), scale


def test_a_forward_of_torchs_that_is_graphed_as_a_method_comes_to_its_parts(lab: Lab) -> None:
    net = nn.Sequential(Scaled(), nn.Tanh()).to(lab.device)
    graphed = cgraph.graphed(net.forward)
    with torch.no_grad():
        for scale in (2.0, 5.0, 2.0):
            net[0].scale = scale
            x = fresh(lab, 3, 4)
            assert near(graphed(x), (net[0].layer(x) * scale).tanh())


class Base(nn.Module):
    """A module that reads a number in a method that others call."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0

    def run(self, x: Tensor) -> Tensor:
        return x * self.scale


class Derived(Base):
    def run(self, x: Tensor) -> Tensor:
        return super().run(x) + 1


class Named(nn.ModuleDict):
    def run(self, x: Tensor) -> Tensor:
        for part in self.values():
            x = part(x)
        return x


class Row(nn.Sequential):
    def run(self, x: Tensor) -> Any:
        return self.forward(x) + 1


class Delegating:
    """An object that asks another one for missing attributes."""

    def __init__(self) -> None:
        self.other = Base()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["other"], name)

    def through(self, x: Tensor) -> Any:
        return self.run(x)


class Reading:
    """A descriptor that reads a number of its owner."""

    def __get__(self, one: Any, kind: Any) -> Any:
        return one.part.scale


class Described(nn.Module):
    factor = Reading()

    def __init__(self) -> None:
        super().__init__()
        self.part = Base()

    def run(self, x: Tensor) -> Any:
        return x * self.factor


CASES: list[tuple[Callable[[], Any], str, Callable[[Any], Any]]] = [
    (Derived, "run", lambda one: one),
    (lambda: Named({"part": Scaled()}), "run", lambda one: one["part"]),
    (lambda: Row(Scaled()), "run", lambda one: one[0]),
    (Delegating, "through", lambda one: one.__dict__["other"]),
    (Described, "run", lambda one: one.part),
]


@pytest.mark.parametrize(("make", "name", "owner"), CASES)
def test_a_number_behind_what_the_class_inherits_is_that_of_each_call(
    lab: Lab, make: Callable[[], Any], name: str, owner: Callable[[Any], Any]
) -> None:
    one = make()
    if isinstance(one, nn.Module):
        one.to(lab.device)
    eager = getattr(one, name)
    graphed = cgraph.graphed(eager)
    with torch.no_grad():
        for scale in (2.0, 2.0, 5.0, 2.0):
            owner(one).scale = scale
            x = fresh(lab, 3, 4)
            assert near(graphed(x), eager(x)), scale
