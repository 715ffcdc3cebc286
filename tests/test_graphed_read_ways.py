"""Ways of Python's to read a setting that callers change, and what other ways calls have."""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import cgraph
from graphed_calls import numbers
from lab import Lab, fresh


class Mode(enum.Enum):
    """A key of settings."""

    DECODE = 1


class Settings:
    """Settings of an engine."""

    default = 2.0

    def act(self, x: Tensor) -> Tensor:
        return x + 1


class AttributeDict(dict[str, Any]):
    """A dictionary whose items are attributes."""

    __getattr__ = dict.__getitem__


@dataclass
class Scale:
    """What a pattern takes apart."""

    k: float


class Times(torch.autograd.Function):
    """An operator whose code reads a setting."""

    k = 1.0

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x * Times.k


class Layer(nn.Module):
    """A layer of a user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight: Any = nn.Parameter(torch.rand(3))
        self.weight.scale = self.layout = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Outer(nn.Module):
    """A model that reads what a layer has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()
        self.window, self.table = slice(0, 2), np.array([1.0, 2.0])
        self.scales = {("k", 0): 1.0, Mode.DECODE: 1.0, torch.float32: 1.0}
        self.bias = {1: 1.0}
        self.settings = Settings()
        self.config = AttributeDict(temperature=1.0, inner=AttributeDict(k=1.0))
        self.scale = Scale(1.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x) * self.layer.layout + self.table[1]
        x = x + self.layer.weight.scale
        x = x * self.scales["k", 0] * self.scales[Mode.DECODE] * self.scales[x.dtype]
        if hasattr(self, "lora"):
            x = x * self.lora
        for place, value in self.bias.items():
            x = x + place * value
        x = self.settings.act(x) * self.settings.default
        match self.scale:
            case Scale(k=k):
                x = x * k
        return x[self.window] * self.config.temperature * self.config.inner.k


CHANGES: dict[str, Callable[[Outer], object]] = {
    "an attribute that comes later": lambda one: setattr(one, "lora", 3.0),
    "a forward of its own": lambda one: setattr(one.layer, "forward", lambda x: x * 5),
    "a method of its own": lambda one: setattr(one.settings, "act", lambda x: x * 5),
    "a constant of the class of its own": lambda one: setattr(one.settings, "default", 5.0),
    "an attribute with a name of tensors": lambda one: setattr(one.layer, "layout", 5.0),
    "a number on a weight": lambda one: setattr(one.layer.weight, "scale", 5.0),
    "a key that is a tuple": lambda one: one.scales.update({("k", 0): 5.0}),
    "a key of an enumeration": lambda one: one.scales.update({Mode.DECODE: 5.0}),
    "a key that is a dtype": lambda one: one.scales.update({torch.float32: 5.0}),
    "a dictionary that grows": lambda one: one.bias.update({2: 5.0}),
    "a dictionary that is exchanged": lambda one: setattr(one, "bias", {1: 1.0, 2: 5.0}),
    "a slice": lambda one: setattr(one, "window", slice(1, 3)),
    "an array": lambda one: one.table.__setitem__(1, 5.0),
    "an array of another dtype": lambda one: setattr(one, "table", one.table.view(np.int64)),
    "an array that is exchanged": lambda one: setattr(one, "table", np.array([1.0, 5.0])),
    "an item that is an attribute": lambda one: one.config.update(temperature=5.0),
    "an item inside of another one": lambda one: one.config["inner"].update(k=5.0),
    "an attribute in a pattern": lambda one: setattr(one.scale, "k", 5.0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_setting_that_somebody_changes_is_that_of_eager(lab: Lab, change: str) -> None:
    model = Outer().to(lab.device)
    model.layer.weight.scale = 1.0
    graphed = cgraph.graphed(model)
    with torch.no_grad():
        for is_other in (False, True):
            if is_other:
                CHANGES[change](model)
            for _ in range(2):
                x = fresh(lab, 3)
                assert_close(graphed(x), model(x))
    assert numbers(graphed)[1:] == (4, 0)


def of_alias() -> Callable[[Tensor], Tensor]:
    times = Times.apply
    return lambda x: times(x)  # type: ignore[no-any-return]


def of_registry() -> Callable[[Tensor], Tensor]:
    registry = {"times": Times}
    return lambda x: registry["times"].apply(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [of_alias, of_registry])
def test_what_the_methods_of_a_class_read_that_is_a_value_is_followed(
    lab: Lab, make: Callable[[], Callable[[Tensor], Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    function = make()
    graphed = cgraph.graphed(function)
    for k in (1.0, 5.0):
        monkeypatch.setattr(Times, "k", k)
        for _ in range(2):
            x = fresh(lab, 3)
            assert_close(graphed(x), x * k)
    assert numbers(graphed)[1:] == (4, 0)


@pytest.mark.parametrize("kind", [dict, types.SimpleNamespace])
def test_a_setting_among_the_keywords_of_a_partial_is_followed(lab: Lab, kind: Any) -> None:
    def read(x: Tensor, cfg: Any) -> Tensor:
        return x * (cfg["scale"] if isinstance(cfg, dict) else cfg.scale)  # type: ignore[no-any-return]

    cfg = kind(scale=1.0)
    graphed = cgraph.graphed(functools.partial(read, cfg=cfg))
    for scale in (1.0, 5.0):
        cfg.update(scale=scale) if kind is dict else vars(cfg).update(scale=scale)
        for _ in range(2):
            x = fresh(lab, 3)
            assert_close(graphed(x), x * scale)
    assert numbers(graphed)[1:] == (4, 0)


def test_a_distribution_that_is_exchanged_is_read(lab: Lab) -> None:
    class Policy:
        prior: Any = None

        def score(self, x: Tensor) -> Tensor:
            return self.prior.log_prob(x)  # type: ignore[no-any-return]

    policy = Policy()
    graphed = cgraph.graphed(policy.score)
    for _ in range(3):
        zero, width = torch.zeros(3, device=lab.device), fresh(lab, 3).abs() + 1
        policy.prior = torch.distributions.Normal(zero, width, validate_args=False)
        for _ in range(2):
            x = fresh(lab, 3)
            assert_close(graphed(x), policy.score(x))


def test_a_function_that_takes_from_its_own_list_runs_eagerly(lab: Lab) -> None:
    def blocks(wrap: Callable[[Any], Any]) -> tuple[list[int], Tensor]:
        free, cache = [*range(10)], torch.zeros(10, device=lab.device)

        def store(x: Tensor) -> Tensor:
            cache[free.pop()] = x
            return cache * 1

        function = wrap(store)
        for place in range(3):
            function(torch.full((), place + 1.0, device=lab.device))
        return free, cache

    got, right = blocks(cgraph.graphed), blocks(lambda one: one)
    assert got[0] == right[0]
    assert_close(got[1], right[1])


DRAWS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "poisson": lambda x, own: torch.poisson(x, generator=own),
    "binomial": lambda x, own: torch.binomial(x, x / x.sum(), generator=own),
    "exponential": lambda x, own: torch.empty_like(x).exponential_(generator=own),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_generators_of_all_operators_are_as_after_the_eager_calls(lab: Lab, kind: str) -> None:
    own = torch.Generator(lab.device)
    graphed = cgraph.graphed(lambda x: DRAWS[kind](x, own))
    x = torch.full((4,), 30.0, device=lab.device)
    own.manual_seed(7)
    right = [DRAWS[kind](x, own) for _ in range(3)]
    own.manual_seed(7)
    for expected in right:
        assert_close(graphed(x), expected)


def test_settings_behind_thousands_of_places_are_followed(lab: Lab) -> None:
    model = nn.Sequential(*(Layer() for _ in range(1500))).to(lab.device)

    class Whole:
        scale = 2.0

        def run(self, x: Tensor) -> Tensor:
            return model[0](x) * self.scale

    whole = Whole()
    graphed = cgraph.graphed(whole.run)
    with torch.no_grad():
        for scale in (2.0, 3.0):
            whole.scale = scale
            x = fresh(lab, 3)
            assert_close(graphed(x), whole.run(x))


@pytest.mark.parametrize("kind", ["large", "objects"])
def test_an_array_that_is_exchanged_for_one_of_data_is_read_and_replayed(
    lab: Lab, kind: str
) -> None:
    class Whole:
        table: Any = np.array([1.0, 2.0])

        def run(self, x: Tensor) -> Tensor:
            return x * float(self.table[1])

    whole = Whole()
    graphed = cgraph.graphed(whole.run)
    for is_other in (False, True):
        if is_other:
            other = np.array([1.0, 3.0] * 100)
            whole.table = other if kind == "large" else np.array([1.0, 3.0], dtype=object)
        for _ in range(3):
            x = fresh(lab, 3)
            assert_close(graphed(x), whole.run(x))
    assert numbers(graphed) == (2, 6, 0)
    assert not any(key.rerecorded for key in graphed.report().keys)
