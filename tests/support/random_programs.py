"""Random programs from the contract's vocabulary, which can be built twice alike."""

from __future__ import annotations

import random
import types
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from contract_calls import Box
from random_assignments import ASSIGNING
from random_parts import PARTS, RARE, VALUES, Part, first

__all__ = ["MODES", "World"]

MODES = ["no_grad", "grad", "train", "inference"]
Action = Callable[[random.Random], object]


WRAPS = [lambda one: one, lambda one: {"into": one}, lambda one: Box(into=one)]


class World:
    """A program with all the objects that it reads and writes; two of one seed are equal.

    Args:
        seed: The seed of the program.
        device: The device of its tensors.
        has_graphs: True if functions that it calls are graphed themselves.

    Attributes:
        actions: Changes between calls; each draws from the given generator.
        steady: Changes before each call.
        exits: Puts back at the end what is everybody's.
        tensors: Functions that return the tensors of one part as they are now.
        values: Functions that return the Python state that the program changes in one part.
        parts: The functions that the program calls one after another.
        mode: One of ``MODES``.
        wrap: The way of passing the second argument of a call.
        by: A plain argument of the next call.
    """

    def __init__(self, seed: int, device: str, *, has_graphs: bool) -> None:
        self.has_graphs = has_graphs
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        self.device = device
        self.actions: list[Action] = []
        self.steady: list[Action] = []
        self.exits = ExitStack()
        self.tensors: list[Callable[[], list[Tensor | None]]] = []
        self.values: list[Callable[[], Any]] = []
        self.by = 1.0
        self.mode = self.random.choice(MODES)
        self.sizes = self.random.choice([None, None, None, [3, 6]])
        self.net = nn.ModuleDict()
        self.parts: list[Part] = [first(self)]
        many = self.random.randint(1, 4)
        kinds = [
            *PARTS,
            *ASSIGNING,
            *(RARE if self.sizes is None and self.random.random() < 0.2 else ()),
        ]
        self.parts += [make(self) for make in self.random.sample(kinds, many)]
        self.tensors.append(lambda: [*self.net.parameters()])
        self.tensors.append(lambda: [one.grad for one in self.net.parameters()])
        self.tensors.append(lambda: [*self.net.buffers()])
        self.actions.append(lambda draw: setattr(self, "by", draw.choice(VALUES)))
        self.actions.append(lambda draw: self.net.train(draw.random() < 0.5))
        self.writes_argument = self.random.random() < 0.3
        self.adds_to_argument = self.random.random() < 0.3
        self.wrap: Callable[[Tensor], Any] = self.random.choice(WRAPS)
        self.kind = self.random.choice(["one", "tuple", "dict", "views", "argument"])
        self.run = self._entry()

    def fresh(self, draw: random.Random, *shape: int) -> Tensor:
        """Return numbers that are equal for equal draws."""
        generator = torch.Generator().manual_seed(draw.getrandbits(31))
        return torch.randn(*shape, generator=generator).to(self.device)

    def add(self, module: nn.Module) -> str:
        """Let a module be part of the net; return its name."""
        name = f"m{len(self.net)}"
        self.net[name] = module.to(self.device)
        return name

    def _entry(self) -> Callable[..., Any]:
        parts, kind, writes, net = self.parts, self.kind, self.writes_argument, self.net
        adds = self.adds_to_argument

        def forward(x: Tensor, given: Any, by: float) -> Any:
            y = x
            into = given["into"] if isinstance(given, dict) else given
            into = into if isinstance(into, Tensor) else into.into
            for part in parts:
                y = part(y)
            if writes:
                into.mul_(0.5).add_(x.detach().sum())
            y = y * by
            if adds and isinstance(given, dict):
                given["pred"] = y.detach() * 2
            if kind == "tuple":
                return y, (y.sum(-1), None)
            if kind == "dict":
                return {"y": y, "t": y.t(), "by": by}
            if kind == "views":
                return y, y[:, 1:]
            return (x, y) if kind == "argument" else y

        if self.mode != "train":
            if self.random.random() < 0.5:
                return forward
            return types.MethodType(_method, Box(forward=forward, net=net))
        optimizer, to_none = _optimizer(self), self.random.random() < 0.5
        clips = self.random.random() < 0.3
        self.actions.append(lambda draw: _set_rate(optimizer, draw.choice([0.05, 0.1, 0.2])))

        def step(x: Tensor, given: Any, by: float) -> Tensor:
            optimizer.zero_grad(set_to_none=to_none)
            found = forward(x, given, by)
            y = found if isinstance(found, Tensor) else found["y"] if kind == "dict" else found[-1]
            if not isinstance(y, Tensor):
                y = found[0]
            loss = y.square().mean()
            loss.backward()
            if clips:
                nn.utils.clip_grad_norm_(net.parameters(), 1.0, foreach=False)
            optimizer.step()
            return loss.detach()

        return step


def _method(self: Any, x: Tensor, given: Any, by: float) -> Any:
    return self.forward(x, given, by)


def _optimizer(world: World) -> torch.optim.Optimizer:
    parameters = [*world.net.parameters()]
    makes: list[Callable[[], torch.optim.Optimizer]] = [
        lambda: torch.optim.SGD(parameters, lr=0.1),
        lambda: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda: torch.optim.Adam(parameters, lr=0.1, capturable=True),
        lambda: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    ]
    optimizer = world.random.choice(makes)()

    def state() -> list[Tensor | None]:
        states = [optimizer.state[one] for one in parameters if one in optimizer.state]
        return [v for one in states for v in one.values() if isinstance(v, Tensor)]

    world.tensors.append(state)
    return optimizer


def _set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    optimizer.param_groups[0]["lr"] = rate
