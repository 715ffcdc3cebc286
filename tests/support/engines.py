"""A module that reads many Python objects that callers may change between its calls."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Doubled", "Engine", "Mode", "Plus", "Settings", "Slotted"]


class Mode(enum.Enum):
    """The operations of a function."""

    ADD = 1
    MULTIPLY = 2


@dataclasses.dataclass
class Settings:
    """The settings of a caller."""

    scale: float

    @property
    def factor(self) -> float:
        """One."""
        return 1.0


@dataclasses.dataclass
class Doubled(Settings):
    """Settings of another class."""

    @property
    def factor(self) -> float:
        """Twice as much."""
        return 2.0


class Plus:
    """An addend, whose number is added."""

    by = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        return x + self.by


class Slotted:
    """Settings in a slot."""

    __slots__ = ("scale",)

    def __init__(self, scale: float) -> None:
        self.scale = scale


class Engine(nn.Module):
    """A layer, with many Python objects."""

    by_class = 1.5

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.scale, self.mode, self.name, self.missing = 2.0, Mode.ADD, "a", None
        self.shape: Any = (1, 3)
        self.settings: Any = Settings(0.5)
        self.slotted, self.space = Slotted(0.5), types.SimpleNamespace(inner=Settings(2.0))
        self.skipped, self.chosen = [0], {1}
        self.factors, self.active = {"a": 1.0, "b": 3.0}, "a"
        self.activation: Callable[[Tensor], Tensor] = torch.relu
        self.steps: list[Callable[[Tensor], Tensor]] = [torch.sin]
        self.partial = functools.partial(torch.mul, other=2.0)
        self.first = self.second = Settings(1.5)
        self.strategy, self.kind = Plus(), nn.ReLU

    def forward(self, x: Tensor) -> Tensor:
        """Read something of each: [rows, 3], same out."""
        x = self.layer(x).reshape(-1, *self.shape)[:, 0] * self.scale * self.by_class
        x = x + 1 if self.mode is Mode.ADD else x * 2
        x = x if self.name == "a" else x - 1
        x = x if self.missing is None else x * self.missing
        x = x * self.settings.scale + self.slotted.scale * self.space.inner.scale
        for place in range(3):
            if place not in self.skipped:
                x = x + place
            if place in self.chosen:
                x = x * (place + 2)
        x = x * self.settings.factor * self.first.scale + self.second.scale
        x = self.kind()(self.strategy(x))
        x = x + sum(type(one) is bool for one in self.chosen) + isinstance(self.skipped, tuple)
        x = self.activation(x * self.factors[self.active])
        for step in self.steps:
            x = step(x)
        return self.partial(x)
